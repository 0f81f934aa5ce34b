"""The fuzzer itself: what it draws, that it sees each fault put in by hand, that it cuts down."""

from __future__ import annotations

import logging
import random

import pytest
import torch

from fxfuse import guard, memory
from fxfuse.kernels import norm_ops
from fxfuse.patterns import add_rms_norm, gates, norms
from scripts import fuzz
from scripts.fuzzing.builder import Builder
from scripts.fuzzing.check import Failure, check
from scripts.fuzzing.generate import generate, runs
from scripts.fuzzing.noise import Noisy
from scripts.fuzzing.outcome import run
from scripts.fuzzing.pieces import PIECES
from scripts.fuzzing.program import Program, arguments
from scripts.fuzzing.shrink import shrink
from tests.property.test_random_programs import counterexamples

Guards = guard.Guards
MOST = 200


@pytest.fixture(autouse=True)
def quiet():
    torch._logging.set_logs(all=logging.CRITICAL)
    yield
    torch._logging.set_logs()


def nothing(*args, **options):
    return None


def ten_times_eps(number):
    def wrong(self, name, default):
        value = number(self, name, default)
        return value * 10 if name == "eps" and value else value

    return wrong


def without_rounding(numbers):
    def wrong(norm):
        found = numbers(norm)
        return found | {"unit_dtype": ""} if isinstance(found, dict) else found

    return wrong


def without_residual_gradient(backward):
    def wrong(dys, h, weight, rstd, dres=None, **options):
        return backward(dys, h, weight, rstd, None, **options)

    return wrong


# Where, the name, what takes its place (given what was there), and where to begin, to be quick.
FAULTS = {
    "a wrong eps": (norms.Norm, "number", ten_times_eps, 100),
    "a rounding is dropped": (norms, "_from_metadata", without_rounding, 104),
    "no guard for borders of regions": (Guards, "_regions_differ", lambda _: nothing, 150),
    "no guard for values that are read elsewhere": (Guards, "_escapes", lambda _: nothing, 0),
    "no guard for writes": (Guards, "_moved_or_written", lambda _: nothing, 0),
    "no write is seen": (memory.Memory, "writes", lambda _: lambda self: [], 0),
    "all nodes return memory of their own": (
        memory.Memory, "allocates", lambda _: lambda self, node: True, 0,
    ),
    "aliases may be written to": (Guards, "_only_reads", lambda _: lambda *_: True, 110),
    "operands of a gate change places": (gates, "_is_swapped", lambda _: lambda b: False, 40),
    "sums that broadcast": (add_rms_norm, "add_problem", lambda _: nothing, 160),
    "statistics in half precision": (norms, "_statistic_problem", lambda _: nothing, 215),
}  # fmt: skip


LONG = """
def f(x: "2x4x8 float32 grad small", r: "2x4x8 float32 grad", w: "8 float32 grad") -> "train":
    v0 = torch.sin(x)
    v1 = v0 + r
    v2 = F.rms_norm(v1, (8,), w, 0.01)
    v3 = v2 * F.silu(r)
    v4 = v3.roll(1, -1) * 1.5
    v5 = v4 + v1
    return v5, v1
"""


def first_failure(start: int) -> Failure:
    for seed in range(start, start + MOST):
        failures = check(generate(seed), ["eager"]).failures
        if failures:
            return failures[0]
    raise AssertionError(f"nothing was found in {MOST} programs")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault, monkeypatch):
    owner, name, wrong, start = FAULTS[fault]
    monkeypatch.setattr(owner, name, wrong(getattr(owner, name)))
    failure = first_failure(start)
    monkeypatch.undo()
    assert not check(failure.program, ["eager"]).failures  # it is the fault that was found


def test_a_residual_gradient_that_is_dropped(monkeypatch):
    program = Program.parse(
        'def f(x: "2x5x16 float32 grad") -> "train":\n'
        "    v0 = x * 1.5\n"
        "    v1 = v0 * torch.rsqrt(v0.pow(2).mean(-1, keepdim=True) + 1e-06)\n"
        "    return v1 + v0 * 0.001\n"
    )
    assert not check(program, ["eager"]).failures
    formulas = norm_ops.compiled
    wrong = without_residual_gradient(formulas.rms_norm_bwd)
    monkeypatch.setattr(formulas, "rms_norm_bwd", wrong)
    (failure,) = check(program, ["eager"]).failures
    assert [c.what for c in failure.complaints] == ["gradient of x"]


ALL_CANCELS = """
def f(x: "12x1 float32 grad", w: "1 float32 grad") -> "train":
    v0 = x * 1.5
    v1 = v0 * torch.rsqrt(v0.pow(2).mean(-1, keepdim=True))
    return v1 * w
"""


# Of the terms that cancel: noise is 1e-7 of them, and no less than all of a gradient that is 0.
@pytest.mark.parametrize("part, is_fault", [(1e-8, False), (1e-7, False), (1e-5, True), (1, True)])
def test_where_all_cancels_a_fault_is_more_than_noise(part, is_fault, monkeypatch):
    backward = norm_ops.compiled.rms_norm_bwd

    def wrong(dys, h, weight, rstd, dres=None, **options):
        dx, *others = backward(dys, h, weight, rstd, dres, **options)
        return dx + part * rstd * weight, *others

    monkeypatch.setattr(norm_ops.compiled, "rms_norm_bwd", wrong)
    failures = check(Program.parse(ALL_CANCELS), ["eager"]).failures
    assert [c.what for f in failures for c in f.complaints] == ["gradient of x"] * is_fault


def test_a_lucky_gradient_of_which_roundings_are_left_is_no_standard(monkeypatch):
    program = counterexamples()["a_gradient_of_which_roundings_are_all_that_is_left"]
    assert not check(program, ["aot_eager"]).failures
    monkeypatch.setattr("scripts.fuzzing.check._noisy", lambda *_: [])
    (failure,) = check(program, ["aot_eager"]).failures
    assert [c.what for c in failure.complaints] == ["gradient of w1"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_noise_is_a_few_steps_where_little_cancels(dtype):
    program = Program.parse(LONG.replace("float32", str(dtype).removeprefix("torch.")))
    plain = run(program, program.function(), 0)
    with Noisy(0):
        noisy = run(program, program.function(), 0)
    for kind in ("outputs", "gradients"):
        for name, t in getattr(plain, kind).items():
            error = (getattr(noisy, kind)[name] - t).double().norm() / t.double().norm()
            assert 0.2 < error / torch.finfo(dtype).eps * 2 < 8, name


def test_a_failure_is_cut_down(monkeypatch):
    monkeypatch.setattr(norms.Norm, "number", ten_times_eps(norms.Norm.number))
    program = Program.parse(LONG)
    (failure,) = check(program, ["eager"]).failures
    smallest = shrink(failure, trials=120)
    assert smallest.kinds == {"numbers"} and len(smallest.program.inputs) <= 2
    assert len(smallest.program.body) <= 2 and "rms_norm" in smallest.program.source


def test_a_program_is_the_same_for_its_seed_and_is_read_back():
    for seed in range(40):
        program = generate(seed)
        assert generate(seed) == program
        again = Program.parse(program.source)
        assert Program.parse(again.source) == again and again.inputs == program.inputs


def test_most_programs_run():
    assert sum(runs(generate(seed)) for seed in range(60)) > 55


@pytest.mark.parametrize("piece", PIECES, ids=lambda piece: piece.__name__)
def test_each_piece_adds_lines_that_run(piece):
    made = 0
    for seed in range(10):
        b = Builder(random.Random(seed))
        x = b.let(f"{b.input('x', (2, 3, 8), torch.bfloat16)} * 2")
        if b.attempt(piece, x) is not None:
            made += len(b.lines) > 1
            program = Program(tuple(b.inputs), tuple(b.lines), (x,))
            program.function()(*arguments(program, 0))
    assert made > 3


def test_the_twin_in_fp64_keeps_its_autocast_and_tells_eps():
    program = Program.parse(
        'def f(x: "2x8 bfloat16") -> "train":\n'
        '    with torch.autocast("cpu", dtype=torch.bfloat16):\n'
        "        v0 = x.float().to(torch.float16)\n"
        "    return F.rms_norm(v0, (8,), None, None)\n"
    )
    source = program.twin(torch.float64).source
    assert "dtype=torch.bfloat16" in source and source.count("torch.float64") == 2
    assert "float16" not in source.replace("bfloat16", "") and "1.19209" in source


def test_the_command_tells_what_it_found(monkeypatch, tmp_path, capsys):
    """The loop itself, with a worker that finds something at once."""
    file = tmp_path / "found.py"
    monkeypatch.setattr(fuzz.Fuzz, "_start", lambda self, number: None)
    options = fuzz.parse(["--minutes", "0", "--start", "0", "--append", str(file)])
    found = fuzz.Fuzz(options)
    found._tell("# seed 7\ndef f(x): return x")
    assert "# seed 7" in capsys.readouterr().out and "# seed 7" in file.read_text()
    assert found.failures and "1 failures" in found.summary()
