"""Times of an op's forward and backward at one shape: ours, and what they are compared with."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import gpu_time
import torch
from gpu_ceilings import ceiling
from gpu_peers import PEERS, Compute
from gpu_time import Call, Time
from op_cases import BF16, CASES, FP32, MOST_GRADIENTS, Case
from torch import Tensor

import fxfuse

ELEMENTS = 1 << 26  # of a tensor, where the widths of an op are compared
DRY_ROWS, DRY_COLUMNS, DRY_WIDTHS = 64, 128, (64, 128)
GATE_GAP = 256  # columns between a strided gate and the next row's x
# A peer computes something else if its results are so far from eager's, by relative RMS.
APART = 0.02
OURS, THEIRS, FUSED = "ours", "torch.compile", "fxfuse in torch.compile"


@dataclass(frozen=True)
class Shape:
    """A case with operands [M, N]. strided: the gate is a part of rows of 2 N + 256 elements."""

    name: str
    M: int
    N: int
    dtype: torch.dtype = BF16
    strided: bool = False

    @property
    def case(self) -> Case:
        return CASES[self.name]

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.name}, {self.M} x {self.N} {dtype}" + ", strided gate" * self.strided


ADD_SIZES = (
    (8192, 4096), (8192, 8192), (4096, 4096), (16384, 8192), (16384, 2048), (8192, 5120),
    (8192, 16384), (32768, 1024), (8192, 7168), (2048, 4096), (512, 4096),
)  # fmt: skip
GATED_SIZES = ((262144, 128), (16384, 4096), (131072, 256), (65536, 64))


def compared(dry: bool) -> list[Shape]:
    """What is compared with others, in the order in which it is measured."""
    gated, fp32 = "rms_norm_silu_gate", Shape("add_rms_norm", 8192, 4096, FP32)
    if dry:
        small = Shape("add_rms_norm", DRY_ROWS, DRY_COLUMNS)
        return [small, Shape(gated, DRY_ROWS, DRY_COLUMNS, strided=True)]
    add = [Shape("add_rms_norm", *size) for size in ADD_SIZES]
    gates = [Shape(gated, *size) for size in GATED_SIZES]
    strided = Shape(gated, 16384, 4096, strided=True)
    heads = Shape("rms_norm", 262144, 128)
    return [*add[:2], *gates[:2], *add[2:], *gates[2:], strided, fp32, heads]


def swept(dry: bool) -> list[Shape]:
    """Every op at its widths, as many elements each time."""
    return [
        Shape(case.name, DRY_ROWS if dry else ELEMENTS // N, N)
        for case in CASES.values()
        for N in (DRY_WIDTHS if dry and case.timed else case.timed)
    ]


class Operands:
    """One input set: leaves as the case takes them, gradients of y, and one of the residual."""

    def __init__(self, shape: Shape, device: str) -> None:
        case, M, N = shape.case, shape.M, shape.N
        make = functools.partial(torch.randn, dtype=shape.dtype, device=device)
        rows = {name: make(M, N) for name in case.rows}
        if shape.strided:
            rows["gate"] = make(M, 2 * N + GATE_GAP)[:, N : 2 * N]
        self.values = [*rows.values(), *(make(N) for _ in case.weights)]
        self.leaves = [t.detach().requires_grad_() for t in self.values]
        self.dys = [make(M, N) for _ in range(MOST_GRADIENTS)]
        self.residual = [make(M, N)] if case.results == 2 else []


# --- the sides -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Side:
    """name: for the table; make: for operands and a number of gradients, what is timed.

    No gradients: the forward. own: whether it is a failure if it does not run.
    """

    name: str
    make: Callable[[Operands, int], Call]
    own: bool = True


def ours(case: Case) -> Side:
    """Our op, and its inner backward op called as such."""

    def make(operands: Operands, gradients: int) -> Call:
        if not gradients:
            return lambda: case.op(*operands.leaves)
        inner = case.backward(*operands.values)
        return lambda: inner(operands.dys[:gradients], *(operands.residual or [None]))

    return Side(OURS, make)


def by_autograd(name: str, compute: Compute, add: Callable[..., Tensor], own: bool) -> Side:
    """A function that returns y and the sum; `add` sums several gradients before its backward."""

    def make(operands: Operands, gradients: int) -> Call:
        if not gradients:
            return lambda: compute(*operands.leaves)
        outputs, dys = compute(*operands.leaves), operands.dys[:gradients]

        def backward() -> object:
            dy = add(*dys) if gradients > 1 else dys[0]
            return differentiate(outputs, operands, [dy, *operands.residual])

        return backward

    return Side(name, make, own)


def compiled(name: str, case: Case, backend: Callable | str) -> Side:
    """The chain under torch.compile; y is copied, so that its gradients are summed in there."""

    @functools.cache
    def compute(copies: int) -> Compute:
        def chain(*operands: Tensor) -> tuple[Tensor, ...]:
            y, *more = case.chain(*operands)[: case.results]
            return (*(y.clone() for _ in range(copies)), *more) if copies > 1 else (y, *more)

        return torch.compile(chain, backend=backend, dynamic=False)

    def make(operands: Operands, gradients: int) -> Call:
        # A backward runs again and again, so it may not write into what was saved for it.
        with torch._functorch.config.patch(donated_buffer=False):
            function = compute(max(1, gradients))
            outputs = function(*operands.leaves)
            if not gradients:
                return lambda: function(*operands.leaves)
            asked = [*operands.dys[:gradients], *operands.residual]
            differentiate(outputs, operands, asked)
        return lambda: differentiate(outputs, operands, asked)

    return Side(name, make)


def differentiate(outputs: Sequence[Tensor], operands: Operands, asked: list[Tensor]) -> tuple:
    return torch.autograd.grad(outputs, operands.leaves, asked, retain_graph=True)


def sides(case: Case, dry: bool) -> Iterator[Side]:
    inner = "aot_eager" if dry else "inductor"
    torch.compiler.reset()
    yield ours(case)
    yield compiled(THEIRS, case, inner)
    yield compiled(FUSED, case, fxfuse.make_backend(inner))
    yield by_autograd("eager", lambda *t: case.chain(*t)[: case.results], add, own=True)
    sum_ = torch.compile(add, backend=inner, dynamic=True)
    for peer in PEERS:
        if peer.missing() is None and (compute := peer.compute(case.name)) is not None:
            yield by_autograd(peer.name, compute, sum_, own=False)


def add(*tensors: Tensor) -> Tensor:
    return functools.reduce(torch.add, tensors)


# --- the measurement -----------------------------------------------------------------------


@dataclass
class Row:
    """The times of one pass at a shape, by side; gradients: how many of y, none forward."""

    shape: Shape
    gradients: int
    device: str
    times: dict[str, Time] = field(default_factory=dict)

    @property
    def pass_(self) -> str:
        return {0: "forward", 1: "backward"}.get(self.gradients, f"backward, {self.gradients} dy")

    @property
    def rate(self) -> float:
        """GB/s of ours, by the fewest bytes that must move."""
        shape = self.shape
        least = shape.case.least_bytes(shape.M, shape.N, shape.dtype.itemsize, self.gradients)
        return least / self.times[OURS].ms / 1e6

    @property
    def share(self) -> float:
        """Of what a kernel reaches that only reads and writes as many tensors."""
        return self.rate / ceiling(self.shape.case.mix(self.gradients), self.device)

    def faster(self, than: str, side: str = OURS) -> float | None:
        """How many times as fast a side is; None where one of the two has no time."""
        if than not in self.times or side not in self.times:
            return None
        return self.times[than].ms / self.times[side].ms


def measure(shape: Shape, taken: Sequence[Side], device: str) -> Iterator[Row | str]:
    """The rows of a shape, and what went wrong; sides of others that fail are left out."""
    case = shape.case
    size = case.least_bytes(shape.M, shape.N, shape.dtype.itemsize)
    sets = [Operands(shape, device) for _ in range(gpu_time.input_sets(size, device))]
    for gradients in (0, 1, MOST_GRADIENTS):
        row = Row(shape, gradients, device)
        for side in taken:
            try:
                calls = [side.make(operands, gradients) for operands in sets]
                row.times[side.name] = gpu_time.measure(calls, device)
            except Exception as error:
                text = str(error).partition("\n")[0]
                if side.own:
                    yield f"{shape}, {row.pass_}, {side.name}: {type(error).__name__}: {text}"
        if OURS in row.times:
            yield row


def agreeing(taken: Sequence[Side], shape: Shape, device: str) -> tuple[list[Side], list[str]]:
    """The sides that compute the same, and a line on each of the others."""
    small = Operands(Shape(shape.name, DRY_ROWS, shape.N, shape.dtype), device)
    right = by_autograd("", lambda *t: shape.case.chain(*t)[: shape.case.results], add, own=True)
    kept, lines = [], []
    for side in taken:
        try:
            apart = 0.0 if side.own else distance(side, right, small)
            reason = f"its results are {apart:.1%} from eager's" if apart > APART else None
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        kept += [] if reason else [side]
        lines += [f"{side.name} is left out of {shape}: {reason}"] if reason else []
    return kept, lines


def distance(side: Side, right: Side, operands: Operands) -> float:
    """The farthest of the results and gradients, by relative RMS."""
    return max(
        ((one.float() - other.float()).norm() / other.float().norm()).item()
        for gradients in (0, 1)
        for one, other in zip(*(s.make(operands, gradients)() for s in (side, right)))
    )


def prepare(shape: Shape, device: str, dry: bool) -> None:
    """Fill the caches of Triton and Inductor with what `measure` runs, on one input set."""
    taken, _ = agreeing(list(sides(shape.case, dry)), shape, device)
    operands = Operands(shape, device)
    for side in taken:
        for gradients in (0, 1, MOST_GRADIENTS):
            try:
                side.make(operands, gradients)()
            except Exception:
                if side.own:
                    raise


def prepare_ours(name: str, device: str, dry: bool) -> None:
    """Fill Triton's cache with what is swept of one op: few rows are enough."""
    for shape in swept(dry):
        if shape.name == name:
            operands = Operands(Shape(name, DRY_ROWS, shape.N), device)
            for gradients in (0, 1, MOST_GRADIENTS):
                ours(shape.case).make(operands, gradients)()
