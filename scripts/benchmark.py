"""Times of fxfuse beside plain PyTorch, and its own costs: scripts/benchmark.py [ROW ...]

A row that compares runs its two sides in turn, so that a busy machine slows both, and compares the
medians. A row with a limit is measured by itself. Exits with 1 when a row misses its target.
"""

from __future__ import annotations

import copy
import functools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from long_graphs import long_graph
from op_cases import CASES, Case
from step_memory import Memory, of_step
from tabulate import tabulate
from torch import Tensor
from traffic_blocks import BLOCKS, Size, make

import fxfuse

EPS = 1e-6
ROUNDS, WARM_UP = 31, 3
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Row:
    """The medians in milliseconds of what is measured and what it is measured against."""

    name: str
    ours: float
    baseline: float
    target: float

    @property
    def speedup(self) -> float:
        return self.baseline / self.ours

    @property
    def missed(self) -> bool:
        return self.speedup < self.target


@dataclass(frozen=True)
class Limit:
    """One quantity and the most that it may be."""

    name: str
    value: float
    limit: float
    unit: str

    @property
    def missed(self) -> bool:
        return self.value > self.limit


@dataclass(frozen=True)
class Traffic:
    """Gigabytes that a training step moves, by Inductor's kernels and by our ops.

    alone: under torch.compile without fxfuse; auto, always: with it, by these policies.
    """

    name: str
    alone: float
    auto: float
    always: float

    @property
    def ratio(self) -> float:
        return self.auto / self.alone

    @property
    def missed(self) -> bool:
        return self.ratio > 1


# A thousandth is for what the gradients of weights are gathered in: sums of runs of 128 rows.
PARTIAL_SUMS = 1.001


@dataclass(frozen=True)
class Footprint:
    """Megabytes of a training step on the CPU: at its peak, and saved for the backward.

    alone: under torch.compile without fxfuse; auto, always: with it, by these policies.
    """

    name: str
    alone: Memory
    auto: Memory
    always: Memory

    @property
    def missed(self) -> bool:
        peak = self.alone.peak * PARTIAL_SUMS
        return self.auto.peak > peak or self.auto.saved > self.alone.saved


def add_norm_fp32() -> Row:
    return add_norm(torch.float32)


def add_norm_bf16() -> Row:
    return add_norm(torch.bfloat16)


def norm_fp32() -> Row:
    return norm(torch.float32)


def norm_bf16() -> Row:
    return norm(torch.bfloat16)


def add_norm(dtype: torch.dtype, M: int = 2048, N: int = 2048) -> Row:
    """Residual add + RMSNorm in an eager graph, forward and backward; the loss reads y and h."""
    inputs, (dy, dh) = operands((M, N), (M, N), (N,), dtype=dtype), gradients(2, M, N, dtype)

    def ours(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        op = torch.ops.fxfuse.add_rms_norm.default
        return op(x, residual, weight, eps=EPS, unit_dtype="input")

    def eager(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        h = x + residual
        return llama_norm(h, weight), h

    sides = [step(side, inputs, (dy, dh)) for side in (ours, eager)]
    return Row(f"add + norm, {M} x {N}, {name(dtype)}", *compare(*sides), target=2.0)


def norm(dtype: torch.dtype, M: int = 2048, N: int = 2048) -> Row:
    """RMSNorm alone in an eager graph, forward and backward."""
    inputs, dys = operands((M, N), (N,), dtype=dtype), gradients(1, M, N, dtype)

    def ours(x: Tensor, weight: Tensor) -> tuple[Tensor]:
        return (torch.ops.fxfuse.rms_norm.default(x, weight, eps=EPS, unit_dtype="input"),)

    def eager(x: Tensor, weight: Tensor) -> tuple[Tensor]:
        return (llama_norm(x, weight),)

    sides = [step(side, inputs, dys) for side in (ours, eager)]
    return Row(f"norm, {M} x {N}, {name(dtype)}", *compare(*sides), target=2.0)


def compiled_fp32() -> Row:
    return compiled(torch.float32)


def compiled_bf16() -> Row:
    return compiled(torch.bfloat16)


def compiled(dtype: torch.dtype, M: int = 2048, N: int = 2048) -> Row:
    """Residual add + RMSNorm under torch.compile, with fxfuse and with Inductor alone."""
    inputs, dys = operands((M, N), (M, N), (N,), dtype=dtype), gradients(2, M, N, dtype)
    sides = [
        step(torch.compile(add_then_norm(), backend=backend), inputs, dys)
        for backend in (fxfuse.backend, "inductor")
    ]
    return Row(f"torch.compile, {M} x {N}, {name(dtype)}", *compare(*sides), target=0.97)


def add_then_norm() -> Callable:
    """A function of its own for each call, so that nothing is shared between compilations."""

    def function(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        h = x + residual
        return llama_norm(h, weight), h

    return function


def op_row(name_: str, dtype: torch.dtype, M: int = 2048, N: int = 2048) -> Row:
    """One of the other ops in an eager graph, forward and backward; the loss reads all it returns.

    x, gate or residual: [M, N]; weights: [N].
    """
    case = CASES[name_]
    inputs, dys = case_operands(case, dtype, M, N), gradients(case.results, M, N, dtype)
    sides = [step(side, inputs, dys) for side in (case.op, plain(case))]
    return Row(
        f"{name_}, {M} x {N}, {name(dtype)}", *compare(*sides), target=2.0 if case.weights else 1.0
    )


def compiled_op_row(name_: str, dtype: torch.dtype, M: int = 2048, N: int = 2048) -> Row:
    """The plain ops of an op under torch.compile, with fxfuse and with Inductor alone."""
    case = CASES[name_]
    inputs, dys = case_operands(case, dtype, M, N), gradients(case.results, M, N, dtype)
    torch.compiler.reset()  # the code is the same for all rows, and compiled a few times at most
    sides = [
        step(torch.compile(plain(case), backend=backend), inputs, dys)
        for backend in (fxfuse.backend, "inductor")
    ]
    label = f"torch.compile, {name_}, {name(dtype)}"
    return Row(label, *compare(*sides), target=0.97)


def plain(case: Case) -> Callable:
    """A function of its own for each call: the plain ops, with the results of the op."""

    def function(*inputs: Tensor) -> tuple[Tensor, ...]:
        return case.chain(*inputs)[: case.results]

    return function


def case_operands(case: Case, dtype: torch.dtype, M: int, N: int) -> list[Tensor]:
    return operands(*[(M, N)] * len(case.rows), *[(N,)] * len(case.weights), dtype=dtype)


def matching() -> Limit:
    """Matching and rewriting the graph of a Llama of 32 layers, the median of ten."""
    graphs = []

    def keep(gm: torch.fx.GraphModule, example_inputs: list) -> Callable:
        graphs.append(gm)
        return gm.forward

    model, ids = small_llama(layers=32)
    with torch.no_grad():
        torch.compile(model, backend=keep)(ids, use_cache=False)
    seconds = []
    for _ in range(10):
        gm = copy.deepcopy(graphs[0])
        seconds.append(fxfuse.apply(gm).meta["fxfuse"].seconds)
    return Limit(
        "match and rewrite, Llama of 32 layers", 1e3 * statistics.median(seconds), 100, "ms"
    )


def long_graphs(nodes: int, fuses: bool) -> Limit:
    """Matching and rewriting a graph with norms and gates, or one without, the median of five."""
    graph = long_graph(nodes, fuses)
    seconds, sites = [], 0
    for _ in range(5):
        report = fxfuse.apply(copy.deepcopy(graph)).meta["fxfuse"]
        seconds.append(report.seconds)
        sites = len(report.matches)
    limit = (100 if fuses else 20) * nodes / 1000
    label = f"match {len(graph.graph.nodes)} nodes, {sites} sites"
    return Limit(label, 1e3 * statistics.median(seconds), limit, "ms")


def small_llama(layers: int) -> tuple[torch.nn.Module, Tensor]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval(), torch.randint(0, 128, (1, 16))


LLAMA_70B = dict(
    model_type="llama", hidden_size=8192, intermediate_size=28672, num_hidden_layers=80,
    num_attention_heads=64, num_key_value_heads=8, vocab_size=128256, dtype="bfloat16",
)  # fmt: skip


def inspecting() -> Limit:
    return Limit("fxfuse inspect, Llama of 70B", inspect_70b()[0], 30, "s")


def inspecting_memory() -> Limit:
    return Limit("the same, peak memory", inspect_70b()[1], 4, "GiB")


@functools.cache
def inspect_70b() -> tuple[float, float]:
    """Seconds and GiB of the whole command, imports included."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.json"
        file.write_text(json.dumps(LLAMA_70B))
        begin = time.perf_counter()
        command = [sys.executable, "-c", MEASURED, "inspect", f"hf:{file}"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return time.perf_counter() - begin, int(done.stderr.split()[-1]) / 2**20


MEASURED = """
import resource, sys
from fxfuse.__main__ import main
code = main(sys.argv[1:])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)
sys.exit(code)
"""


def importing() -> Limit:
    """`import fxfuse` after `import torch`, the median of five processes."""
    script = (
        "import time, torch; t = time.perf_counter(); import fxfuse; print(time.perf_counter() - t)"
    )
    run = [sys.executable, "-c", script]
    seconds = [
        float(subprocess.run(run, capture_output=True, text=True, check=True).stdout)
        for _ in range(5)
    ]
    return Limit("import fxfuse after torch", 1e3 * statistics.median(seconds), 200, "ms")


def traffic_llama() -> Traffic:
    return traffic("llama")


def traffic_gated() -> Traffic:
    return traffic("gated")


def traffic(block: str) -> Traffic:
    """What scripts/traffic.py counts for a block on an H100, in a process of its own."""
    command = [sys.executable, Path(__file__).with_name("traffic.py"), "--json", block]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    sides = json.loads(done.stdout)[block].values()
    moved = [sum(one["kernel_bytes"] + one["op_bytes"] for one in side) / 1e9 for side in sides]
    return Traffic(f"{block} block", *moved)


def memory(block: str, dtype: torch.dtype) -> Footprint:
    """Two layers of a block of scripts/traffic_blocks.py, small, with more rows than columns."""
    size = Size(batch=2, tokens=512, width=128, head=32, mlp=344)
    backends = ["inductor", *(fxfuse.make_backend(policy=p) for p in ("auto", "always"))]
    found = []
    for backend in backends:
        torch.compiler.reset()
        model = torch.nn.Sequential(*(make(block, size, dtype) for _ in range(2)))
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        x, dy = torch.randn(2, size.batch, size.tokens, size.width).to(dtype).unbind()
        compiled_ = torch.compile(model, backend=backend, dynamic=False)
        found.append(of_step(compiled_, [x.requires_grad_(), *model.parameters()], dy))
    return Footprint(f"{block}, {name(dtype)}", *found)


OPS = ("silu_gate", "rms_norm_silu_gate", "silu_gate_rms_norm", "rms_norm_add_rms_norm")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ROWS = {
    **{
        row.__name__: row
        for row in (
            add_norm_fp32, add_norm_bf16, norm_fp32, norm_bf16, compiled_fp32, compiled_bf16,
        )
    },
    **{
        f"{prefix}{op}_{short}": functools.partial(row, op, dtype)
        for prefix, row in (("", op_row), ("compiled_", compiled_op_row))
        for op in OPS
        for short, dtype in DTYPES.items()
    },
    **{
        f"memory_{block}_{short}": functools.partial(memory, block, dtype)
        for block in BLOCKS
        for short, dtype in DTYPES.items()
    },
    **{
        f"{prefix}_{nodes}_nodes": functools.partial(long_graphs, nodes, fuses)
        for prefix, fuses in (("matching", True), ("no_candidates", False))
        for nodes in (1000, 3000, 10000, 30000)
    },
    **{
        row.__name__: row
        for row in (
            matching, inspecting, inspecting_memory, importing, traffic_llama, traffic_gated,
        )
    },
}  # fmt: skip


def llama_norm(h: Tensor, weight: Tensor) -> Tensor:
    s = h.to(torch.float32)
    s = s * torch.rsqrt(s.pow(2).mean(-1, keepdim=True) + EPS)
    return weight * s.to(h.dtype)


def operands(*shapes: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(s, dtype=dtype, device=DEVICE, requires_grad=True) for s in shapes]


def gradients(count: int, M: int, N: int, dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(M, N, dtype=dtype, device=DEVICE) for _ in range(count)]


def step(function: Callable, inputs: list[Tensor], dys: tuple | list) -> Callable[[], object]:
    """One training step of `function`: its outputs, then the gradients of its inputs."""
    return lambda: torch.autograd.grad(function(*inputs), inputs, dys)


def compare(*sides: Callable[[], object]) -> list[float]:
    """The median of each side in milliseconds, measured in turn."""
    times = [[] for _ in sides]
    for round_ in range(WARM_UP + ROUNDS):
        for side, record in zip(sides, times):
            seconds = timed(side)
            if round_ >= WARM_UP:
                record.append(1e3 * seconds)
    return [statistics.median(record) for record in times]


def timed(side: Callable[[], object]) -> float:
    synchronize()
    begin = time.perf_counter()
    side()
    synchronize()
    return time.perf_counter() - begin


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def main(names: list[str]) -> int:
    if {"-h", "--help"} & set(names):
        print(__doc__, "Rows:", *ROWS, sep="\n")
        return 0
    unknown = sorted(set(names) - set(ROWS))
    if unknown:
        print(f"no row {', '.join(unknown)}: the rows are {', '.join(ROWS)}", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    rows = [ROWS[n]() for n in names or ROWS]
    print(f"{DEVICE}, {torch.get_num_threads()} threads, medians of {ROUNDS} alternating runs\n")
    print(table(rows))
    return int(any(r.missed for r in rows))


def table(rows: list[Row | Limit | Traffic | Footprint]) -> str:
    compared = [
        (r.name, r.ours, r.baseline, f"{r.speedup:.2f} x", f"{r.target} x")
        for r in rows
        if isinstance(r, Row)
    ]
    limited = [
        (r.name, f"{r.value:.3g} {r.unit}", f"{r.limit:g} {r.unit}")
        for r in rows
        if isinstance(r, Limit)
    ]
    moved = [
        (r.name, r.alone, r.auto, r.always, f"{r.ratio:.3f}", "1")
        for r in rows
        if isinstance(r, Traffic)
    ]
    head = ("forward + backward", "fxfuse, ms", "plain, ms", "faster", "at least")
    parts = [tabulate(compared, head, floatfmt=".2f")] if compared else []
    parts += [tabulate(limited, ("cost", "measured", "at most"))] if limited else []
    head = ("GB moved on sm_90", "torch.compile", "auto", "always", "auto's share", "at most")
    parts += [tabulate(moved, head, floatfmt=".3f")] if moved else []
    held = [
        (r.name, *(n / 1e6 for m in (r.alone, r.auto, r.always) for n in (m.peak, m.saved)))
        for r in rows
        if isinstance(r, Footprint)
    ]
    sides = ("torch.compile", "auto", "always")
    head = ("MB of a step", *(f"{side}, {what}" for side in sides for what in ("peak", "saved")))
    parts += [tabulate(held, head, floatfmt=".2f")] if held else []
    return "\n\n".join(parts)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
