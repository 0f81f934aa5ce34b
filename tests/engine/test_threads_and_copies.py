"""Fused models in threads and forked processes, and as copies; and what an import leaves alone."""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import fxfuse

WIDTH, THREADS = 16, 8


class Block(nn.Module):
    """`depth` times add + norm + silu gate, so that no two threads need have the same counts."""

    def __init__(self, depth: int = 1) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(depth))
        self.gates = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))
        self.ups = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))

    def forward(self, x, h):  # torch.fx pickles no annotations that are strings
        for norm, gate, up in zip(self.norms, self.gates, self.ups):
            h = h + x
            y = norm(h)
            x = F.silu(gate(y)) * up(y)
        return x + h


def make(depth: int = 1) -> tuple[Block, Tensor, Tensor]:
    torch.manual_seed(depth)
    return Block(depth), torch.randn(4, WIDTH), torch.randn(4, WIDTH)


def step(call: Callable, model: nn.Module, x: Tensor, h: Tensor) -> list[Tensor]:
    """The output and all gradients, by name."""
    leaves = [x.detach().requires_grad_(), h.detach().requires_grad_()]
    parameters = dict(model.named_parameters())
    y = call(*leaves)
    wanted = [*leaves, *(parameters[name] for name in sorted(parameters))]
    return [y.detach(), *torch.autograd.grad(y.square().sum(), wanted)]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def fused(depth: int = 1) -> tuple[fx.GraphModule, Block, Tensor, Tensor]:
    model, x, h = make(depth)
    gm = fxfuse.apply(fx.symbolic_trace(copy.deepcopy(model)), (x, h), policy="always")
    assert gm.meta["fxfuse"].counts == {"add_rms_norm": depth, "silu_gate": depth}
    return gm, model, x, h


# ------------------------------------------------------------ threads


def in_threads(work: Callable[[int], object]) -> list:
    """The results of `work` in as many threads, which begin at the same time."""
    begin = threading.Barrier(THREADS)

    def run(number: int) -> object:
        begin.wait()
        return work(number)

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(run, range(THREADS)))


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_threads_compile_at_once_and_see_their_own_reports(inner):
    torch._dynamo.reset()
    made = [make(1 + number % 3) for number in range(THREADS)]

    def work(number: int) -> tuple[list, list]:
        model, x, h = made[number]
        compiled = torch.compile(model, backend=fxfuse.make_backend(inner, policy="always"))
        with fxfuse.record() as reports:
            found = [step(compiled, model, x, h) for _ in range(3)]
        return found, [report.counts for report in reports]

    for (model, x, h), (found, counts) in zip(made, in_threads(work)):
        depth = len(model.norms)
        assert counts[0] == {"add_rms_norm": depth, "silu_gate": depth}
        assert len(counts) == (2 if inner == "aot_eager" else 1), counts
        expected = step(model, model, x, h)
        for one in found:
            assert_same(one, expected)


def test_threads_rewrite_at_once():
    made = [make(1 + number % 3) for number in range(THREADS)]
    # Before the threads: while torch.fx traces, it patches nn.Module for all of them.
    traced = [fx.symbolic_trace(model) for model, *_ in made]

    def work(number: int) -> fx.GraphModule:
        return fxfuse.apply(traced[number], made[number][1:], policy="always")

    for (model, x, h), gm in zip(made, in_threads(work)):
        depth = len(model.norms)
        assert gm.meta["fxfuse"].counts == {"add_rms_norm": depth, "silu_gate": depth}
        assert_same(step(gm, model, x, h), step(model, model, x, h))


def test_threads_run_one_rewritten_module_at_once():
    gm, model, x, h = fused(2)
    expected = step(model, model, x, h)
    for found in in_threads(lambda _: [step(gm, gm, x, h) for _ in range(10)]):
        for one in found:
            assert_same(one, expected)


# ------------------------------------------------------------ forked processes

FORKED = """
import os, sys
import torch, fxfuse, fxfuse.kernels.ops

def norm(x, weight):
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))

def differs():
    torch.manual_seed(0)
    x, weight = torch.randn(4, 16, requires_grad=True), torch.randn(16, requires_grad=True)
    ours = torch.ops.fxfuse.rms_norm(x, weight, eps=1e-6)
    gm = fxfuse.apply(torch.fx.symbolic_trace(norm), (x, weight), policy="always")
    if gm.meta["fxfuse"].counts != {"rms_norm": 1}:
        return 3
    plain = norm(x, weight)
    pairs = [(ours, plain), (gm(x, weight), plain)]
    pairs += zip(*(torch.autograd.grad(y.sum(), (x, weight)) for y in (ours, plain)))
    return 0 if all(torch.allclose(a, b, atol=1e-6) for a, b in pairs) else 4

if sys.argv[1] == "used":
    # A build for CUDA lets no child differentiate if the first backward comes after fake tensors.
    torch.ones(1, requires_grad=True).sum().backward()
    assert differs() == 0
child = os.fork()
if child == 0:
    os._exit(differs())
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.parametrize("before", ["unused", "used"])
def test_a_forked_process_fuses_and_runs(before):
    command = [sys.executable, "-c", FORKED, before]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr[-2000:]


# ------------------------------------------------------------ copies


def of_file(gm: fx.GraphModule) -> fx.GraphModule:
    return pickle.loads(pickle.dumps(gm))


@pytest.mark.parametrize("copied", [copy.deepcopy, of_file], ids=["deepcopy", "pickle"])
def test_a_copy_runs_and_trains_the_same(copied):
    gm, _, x, h = fused(2)
    twin = copied(gm)
    targets = [[n.target for n in m.graph.nodes if n.op == "call_function"] for m in (gm, twin)]
    assert targets[0] == targets[1] and torch.ops.fxfuse.add_rms_norm.default in targets[1]
    for one, other in zip(step(twin, twin, x, h), step(gm, gm, x, h), strict=True):
        assert torch.equal(one, other)


def test_a_copy_is_a_module_of_its_own():
    gm, _, x, h = fused()
    expected = step(gm, gm, x, h)
    twin = copy.deepcopy(gm)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert_same(step(gm, gm, x, h), expected)
    assert not torch.equal(twin(x, h), expected[0])


def test_a_copy_is_rewritten_no_further():
    gm, *_ = fused()
    twin = fxfuse.apply(copy.deepcopy(gm), policy="always")
    assert not twin.meta["fxfuse"].modified


def test_a_pickle_is_loaded_by_another_process(tmp_path):
    """The ops are named in it: fxfuse has to be imported before it runs, nothing else."""
    gm, model, x, h = fused()
    file = tmp_path / "model"
    file.write_bytes(pickle.dumps((gm, x, h, model(x, h))))
    code = (
        "import pickle, sys, torch, fxfuse; gm, x, h, y = pickle.load(open(sys.argv[1], 'rb')); "
        "torch.testing.assert_close(gm(x, h), y); "
        "assert torch.ops.fxfuse.add_rms_norm.default in [n.target for n in gm.graph.nodes]"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, file], capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr[-2000:]


# ------------------------------------------------------------ importing


def test_an_import_starts_nothing_and_loads_nothing_but_ours():
    """tests/test_packaging.py names what must not be there; this is all that comes along."""
    code = (
        "import sys, threading, torch; before, threads = set(sys.modules), threading.active_count()"
        "; flags = torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_num_threads()"
        "; import fxfuse; added = set(sys.modules) - before"
        "; assert threading.active_count() == threads, threading.enumerate()"
        "; now = torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_num_threads()"
        "; assert now == flags; assert not torch.cuda.is_initialized()"
        "; print(*sorted(m for m in added if m.partition('.')[0] != 'fxfuse'))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr[-2000:]
    others = ran.stdout.split()
    foreign = {name.partition(".")[0] for name in others} - set(sys.stdlib_module_names) - {"torch"}
    assert not foreign and len(others) < 60, others


def test_worker_processes_that_fork():
    """As a data loader's workers do, with the module that the parent made."""
    gm, model, x, h = fused()
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()

    def work() -> None:
        torch.set_num_threads(1)
        queue.put(gm(x, h).detach().numpy())

    worker = context.Process(target=work)
    worker.start()
    worker.join(60)
    assert worker.exitcode == 0 and os.getpid() != worker.pid
    torch.testing.assert_close(torch.from_numpy(queue.get()), model(x, h).detach())
