"""scripts/gpu_check.py on a CPU: its report, and that its checks find what is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

SCRIPTS = Path(__file__).parents[1] / "scripts"
sys.path.insert(0, str(SCRIPTS))  # where they import one another from
import gpu_check  # noqa: E402
import gpu_large  # noqa: E402
import gpu_numbers  # noqa: E402
import gpu_parts  # noqa: E402
import gpu_peers  # noqa: E402
import gpu_pool  # noqa: E402
import gpu_speed  # noqa: E402
import gpu_targets  # noqa: E402
from gpu_speed import OURS, THEIRS, Row, Shape  # noqa: E402
from gpu_time import Time  # noqa: E402
from op_cases import BF16, CASES, FP32  # noqa: E402

NORM = CASES["rms_norm"]
TINY = replace(gpu_numbers.DRY, widths=(64,), few_rows=(1,))


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, cwd=SCRIPTS
    )


# --- the report ----------------------------------------------------------------------------


def test_a_dry_run_reports_as_text_and_json(tmp_path):
    parts = ("large", "ceilings", "sweep", "race", "targets")
    kept = {flag: tmp_path / "folder" / f"kept.{flag}" for flag in ("output", "json")}
    flags = [part for flag, path in kept.items() for part in (f"--{flag}", str(path))]
    done = run("gpu_check.py", "--dry-run", "--only", *parts, *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    assert kept["output"].read_text().strip() == done.stdout.strip()
    found = json.loads(kept["json"].read_text())
    titles = ["More than 2**31 elements", "Ceilings", "Shares of the ceilings"]
    titles += ["Cuts of the backward kernels", "Targets"]
    assert found["dry"] and [part["title"] for part in found["parts"]] == titles
    swept = found["parts"][2]["rows"]
    assert {row["op"] for row in swept} == {c.name for c in CASES.values() if c.timed}
    assert {row["pass"] for row in swept} == {"forward", "backward", "backward, 3 dy"}
    assert all(row["times"]["ours"]["alone_ms"] > 0 for row in swept)
    for raced in found["parts"][3]["rows"]:
        times = [cut["ms"] for cut in raced["cuts"]]
        assert times == sorted(times) and len(times) + raced["do not fit"] >= 2


def test_without_a_gpu_it_says_how_to_run_it():
    done = run("gpu_check.py", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2
    assert "--dry-run runs the script on the CPU" in done.stderr


def test_a_part_that_fails_leaves_a_line():
    def fill(part):
        part.rows.append({"a": 1})
        raise ValueError("no room\nmore of it")

    part = gpu_parts.finish(fill, gpu_parts.Part("Title"))
    assert part.failures == ["ValueError: no room"]
    assert "ValueError: no room" in str(part) and "|   a |" in str(part)


def test_what_is_not_reached_is_said_and_what_fails_leaves_the_others():
    part, run_, done = gpu_parts.Part("Title"), gpu_parts.Run(dry=True), []

    def do(item):
        done.append(10 / item)

    gpu_parts.each(part, run_, run_.seconds + 60, [5, 0, 2], do)
    assert done == [2, 5]
    assert part.failures == ["0: ZeroDivisionError: division by zero"] and not part.notes
    gpu_parts.each(part, run_, -1.0, [5, 2], do)
    assert part.notes == ["5: not reached in time", "2: not reached in time"] and done == [2, 5]


def test_a_check_without_time_has_failed_and_a_compilation_has_not():
    part, run_ = gpu_parts.Part("Title"), gpu_parts.Run(dry=True)
    gpu_check.numbers(part, run_, end=-1.0, only=gpu_check.PARTS)
    assert "check rms_norm, bfloat16, not reached in time" in part.failures
    assert "compile ceilings, not reached in time" in part.notes
    assert all(line.startswith("check") for line in part.failures)
    assert all(line.startswith("compile") for line in part.notes)


# --- numbers -------------------------------------------------------------------------------


def failures(case, dtype=BF16) -> list[str]:
    checks, found = gpu_numbers.check(case, dtype, "cpu", TINY)
    assert checks == (6 if dtype == BF16 else 3)
    return found


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_right_numbers_pass(dtype):
    assert failures(NORM, dtype) == []


def changed(change):
    """The norm with one result changed by `change`, which also gets the input."""

    def op(x, weight):
        (y,) = NORM.op(x, weight)
        return (change(y, x),)

    return replace(NORM, op=op)


def test_an_element_that_is_not_written_is_found():
    def skip_the_last(y, x):
        mine = torch.empty(y.shape, dtype=y.dtype)
        mine[..., :-1] = y[..., :-1]
        return mine.detach() + 0 * y

    found = failures(changed(skip_the_last))
    assert any("y is nan from fp64" in text for text in found)


def test_other_bits_in_a_second_run_are_found():
    calls = iter(range(100))
    found = failures(changed(lambda y, x: y + next(calls) * 2**-20), FP32)
    assert any("y differs between two runs" in text for text in found)


def test_rows_that_reach_others_are_found():
    found = failures(changed(lambda y, x: y + 0 * x.sum()))
    assert any("y changes in rows beside those with NaN or Inf" in text for text in found)


def test_a_row_in_another_place_of_a_large_tensor_is_found():
    def wrap(y, x):
        place = torch.arange(len(y))
        place[-1] = 0  # as an offset that wraps would
        return y[place]

    sizes = gpu_large.Large(NORM, 300, 64)
    assert gpu_large.check(sizes, "cpu", True) == []
    found = gpu_large.check(replace(sizes, case=changed(wrap)), "cpu", True)
    assert [text for text in found if text.startswith("rows from 256, y is")]


@pytest.mark.skipif(sys.platform != "linux", reason="Triton is there on Linux only")
def test_kernels_run_in_the_interpreter():
    script = (
        "import gpu_numbers, op_cases; from dataclasses import replace; "
        "scope = replace(gpu_numbers.INTERPRETED, widths=(72,), few_rows=(1,)); "
        "case = op_cases.CASES['rms_norm_silu_gate']; "
        "print(gpu_numbers.check(case, op_cases.FP16, 'cpu', scope))"
    )
    done = run("-c", script, TRITON_INTERPRET="1")
    assert done.stdout.strip() == "(5, [])", done.stdout + done.stderr


# --- times ---------------------------------------------------------------------------------


def row(shape, gradients=1, **ms):
    times = {"torch.compile" if n == "theirs" else n: Time(t + 1, t) for n, t in ms.items()}
    return Row(shape, gradients, "cpu", times)


def test_bytes_are_those_that_must_move():
    # x, residual, y and h, 2 bytes each; rstd in fp32; the weight
    assert CASES["add_rms_norm"].least_bytes(10, 64, 2) == 4 * 10 * 64 * 2 + 10 * 4 + 64 * 2
    # three dy, dres, h and dh; the weight and its gradient
    assert CASES["add_rms_norm"].least_bytes(10, 64, 2, gradients=3) == 6 * 1280 + 40 + 256
    assert row(Shape("silu_gate", 1 << 20, 64), 0, ours=1.0).rate == pytest.approx(3 * 2**27 / 1e6)


def test_targets_are_met_or_missed(monkeypatch):
    monkeypatch.setattr(gpu_speed, "ceiling", lambda mix, device: 1000.0)
    large = Shape("add_rms_norm", 16384, 4096)
    ms = large.case.least_bytes(16384, 4096, 2, 1) / 1e9  # at the ceiling
    compared = [
        row(large, ours=ms / 0.95, theirs=2 * ms, eager=9 * ms),
        row(large, 3, ours=10.0, theirs=11.0, Liger=9.0),
    ]
    found = {t.name: t for t in gpu_targets.targets([], compared)}
    backward = found["backward, share of the ceiling, 2048 to 16384 columns"]
    assert backward.verdict == "missed" and "backward, 3 dy" in backward.where
    mean = found["backward, times as fast as torch.compile"]
    assert mean.found == pytest.approx((1.9 * 1.1) ** 0.5) and mean.verdict == "met"
    others = found["our kernels, times as fast as the best of the others"]
    assert others.found == pytest.approx(0.9) and others.verdict == "missed"
    assert found["forward, share of the ceiling, 64 to 512 columns"].verdict == "not measured"


def test_all_sides_take_the_same_gradients():
    shape = Shape("add_rms_norm", 8, 64, FP32)
    operands = gpu_speed.Operands(shape, "cpu")
    taken = {side.name: side for side in gpu_speed.sides(shape.case, dry=True)}
    for gradients in (1, 3):
        right = taken["eager"].make(operands, gradients)()
        for side in taken.values():
            for one, other in zip(side.make(operands, gradients)(), right, strict=True):
                torch.testing.assert_close(one, other, msg=f"{side.name}, {gradients} dy")


def test_a_strided_gate_is_a_part_of_wider_rows():
    operands = gpu_speed.Operands(Shape("rms_norm_silu_gate", 4, 64, strided=True), "cpu")
    assert operands.leaves[1].stride() == (2 * 64 + 256, 1)


def fake_liger(monkeypatch, scale):
    """A package that computes what Liger does, in plain PyTorch, times `scale`."""

    def apply(x, residual, weight, eps, offset, casting_mode, in_place):
        assert (offset, casting_mode, in_place) == (0.0, "llama", False)
        h = x + residual
        return scale * torch.nn.functional.rms_norm(h, h.shape[-1:], weight, eps), h

    module = SimpleNamespace(LigerFusedAddRMSNormFunction=SimpleNamespace(apply=apply))
    monkeypatch.setitem(sys.modules, "liger_kernel.ops.fused_add_rms_norm", module)
    for name in ("liger_kernel", "liger_kernel.ops"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())


@pytest.mark.parametrize(("scale", "kept"), [(1.0, True), (1.1, False)])
def test_others_are_timed_if_they_compute_the_same(monkeypatch, scale, kept):
    fake_liger(monkeypatch, scale)
    shape = Shape("add_rms_norm", 8, 64)
    sides, lines = gpu_speed.agreeing(list(gpu_speed.sides(shape.case, True)), shape, "cpu")
    names = [side.name for side in sides]
    assert names[:2] == [OURS, THEIRS] and ("Liger" in names) == kept
    assert kept or "Liger is left out of add_rms_norm, 8 x 64 bfloat16: its results" in lines[0]
    timed = [r for r in gpu_speed.measure(shape, sides, "cpu") if isinstance(r, Row)]
    assert [r.gradients for r in timed] == [0, 1, 3]
    assert all(("Liger" in r.times) == kept for r in timed)


def test_carried_packages_can_be_imported(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "carried_along.py").write_text("")
    (tmp_path / "more.pth").write_text("deep\n")
    peer = gpu_peers.Peer("It", "carried_along", {})
    assert "It is not here (ModuleNotFoundError" in peer.missing()
    gpu_peers.add_folder(tmp_path)
    assert peer.missing() is None


# --- processes -----------------------------------------------------------------------------

WORKER = """
import os, sys, time
sys.path.insert(0, {scripts!r})
import gpu_pool
tasks = {{
    "good": lambda: {{"failures": [], "pid": os.getpid()}},
    "bad": lambda: {{"failures": [str(1 / 0)]}},
    "dead": lambda: os._exit(3),
    "slow": lambda: time.sleep(60),
    "last": lambda: globals().update(ill=True) or {{"failures": []}},
}}
ill = False
gpu_pool.answer(tasks, lambda: not ill)
"""


def pool(names, seconds=60.0):
    command = [sys.executable, "-c", WORKER.format(scripts=str(SCRIPTS))]
    found = gpu_pool.run(names, command, 1, seconds)
    assert [one["task"] for one in found] == names
    return [one["failures"] for one in found]


def test_a_process_that_ends_fails_its_task_only():
    found = pool(["good", "bad", "dead", "last", "good"])
    assert found[:2] == [[], ["ZeroDivisionError: division by zero"]]
    assert found[2:] == [["its process ended with 3"], [], []]


def test_a_task_that_takes_too_long_is_ended():
    assert pool(["slow", "good"], 4.0) == [["not done in time"], ["not reached in time"]]
