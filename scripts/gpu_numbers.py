"""Numbers of an op against fp64 and plain ops, bits of two runs, rows beside those with NaN.

The op writes into memory that is full of NaN, so that an element which no one writes is found.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from op_cases import BF16, FP16, FP32, Case
from torch import Tensor

# The relative RMS error against fp64 may be this many times the chain's, or so many fp32 steps.
FACTOR = 1.1
FACTOR_FP32_DWEIGHT = 2.0
FP32_STEPS = 4
# Numbers of gradients of y, and whether there is a residual gradient. A kernel is compiled for
# each, so not every dtype gets every one.
GRADIENTS = ((1, False), (1, True), (2, False), (3, True))
FEW_GRADIENTS = ((1, False), (3, True))
BAD_ROWS = 37
Results = dict[str, Tensor]


@dataclass(frozen=True)
class Scope:
    """How much is checked.

    rows: of most checks; few_rows: of the others; elements: the most that a tensor may have, which
    is why wide ones have fewer rows. widths: those of the case if None; gradients: for the first
    dtype, how many of y, and whether there is a residual gradient too.
    """

    rows: int
    few_rows: tuple[int, ...]
    widths: tuple[int, ...] | None = None
    dtypes: tuple[torch.dtype, ...] = (BF16, FP16, FP32)
    gradients: tuple[tuple[int, bool], ...] = GRADIENTS
    elements: int = 1 << 25

    def widths_of(self, case: Case, dtype: torch.dtype) -> tuple[int, ...]:
        return self.widths or case.widths[dtype]


FULL = Scope(4096, (1, 3, 257))
DRY = Scope(64, (1, 3), (64, 96))
# Triton's interpreter truncates where a GPU rounds to bf16, so bf16 is left out. The widths have
# tiles of several rows, masked columns, and in the backward chunks of a row.
INTERPRETED = Scope(9, (1,), (64, 1000, 8208), (FP16, FP32), FEW_GRADIENTS, 1 << 15)


@dataclass(frozen=True)
class Setting:
    """One way to call an op: operands [M, N] of a dtype, so many gradients [M, N] of y.

    residual: whether there is a residual gradient [M, N] too. strided: whether the operands are
    halves of one tensor [M, 2 N].
    """

    M: int
    N: int
    dtype: torch.dtype
    gradients: int = 1
    residual: bool = False
    strided: bool = False

    def __str__(self) -> str:
        text = f"{self.M} x {self.N} {str(self.dtype).removeprefix('torch.')}, {self.gradients} dy"
        return text + " + dres" * self.residual + ", strided" * self.strided


def settings(case: Case, dtype: torch.dtype, scope: Scope) -> Iterator[Setting]:
    """All widths: with one gradient and more, of many rows and few, and strided."""
    taken = scope.gradients if dtype == scope.dtypes[0] else FEW_GRADIENTS
    for N in scope.widths_of(case, dtype):
        whole = Setting(min(scope.rows, scope.elements // N), N, dtype)
        yield from (replace(whole, M=M) for M in scope.few_rows)
        for count, residual in dict.fromkeys((n, r and case.residual) for n, r in taken):
            yield replace(whole, gradients=count, residual=residual)
        if case.gated:
            yield replace(whole, strided=True)


@dataclass(frozen=True)
class Inputs:
    """operands: [M, N] and [N], as the case takes them; dys, dres: gradients [M, N]."""

    operands: list[Tensor]
    dys: list[Tensor]
    dres: Tensor | None

    @property
    def dy(self) -> Tensor:
        """The sum of the gradients, rounded after each add as autograd does."""
        total = self.dys[0]
        for dy in self.dys[1:]:
            total = total + dy
        return total


def draw(case: Case, setting: Setting, device: str) -> Inputs:
    M, N = setting.M, setting.N
    generator = torch.Generator(device).manual_seed(M * 100003 + N)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(setting.dtype)

    if setting.strided:
        rows = list(normal(M, len(case.rows) * N).chunk(len(case.rows), -1))
    else:
        rows = [normal(M, N) for _ in case.rows]
    weights = [normal(N) for _ in case.weights]
    dys = [normal(M, N) for _ in range(setting.gradients)]
    return Inputs(rows + weights, dys, normal(M, N) if setting.residual else None)


# --- the op, the chain, and what is exact --------------------------------------------------


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """New tensors are full of NaN inside."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        if not torch.empty(8).isnan().all():
            raise RuntimeError("torch.utils.deterministic.fill_uninitialized_memory is off")
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def by_op(case: Case, inputs: Inputs) -> Results:
    """Outputs and gradients of our op; where autograd cannot ask for them, of the inner one."""
    leaves = [t.detach().requires_grad_() for t in inputs.operands]
    asked = [*inputs.dys] + ([] if inputs.dres is None else [inputs.dres])
    with poisoned():
        outputs = case.op(*leaves)
        if len(inputs.dys) == 1 and len(asked) <= len(outputs):
            gradients = torch.autograd.grad(outputs[: len(asked)], leaves, asked)
        else:
            gradients = case.backward(*inputs.operands)(inputs.dys, inputs.dres)
    return named(case, outputs, gradients)


def by_chain(case: Case, inputs: Inputs, exact: bool = False) -> Results:
    """Outputs and gradients of the plain ops, in fp64 where they shall be exact."""
    operands = case.exact(*inputs.operands) if exact else inputs.operands
    asked = [inputs.dy] + ([] if inputs.dres is None else [inputs.dres])
    leaves = [t.detach().requires_grad_() for t in operands]
    outputs = case.chain(*leaves)
    asked = [dy.to(leaves[0].dtype) for dy in asked]
    return named(case, outputs, torch.autograd.grad(outputs[: len(asked)], leaves, asked))


def named(case: Case, outputs: tuple[Tensor, ...], gradients: tuple[Tensor, ...]) -> Results:
    found = dict(zip(("y", "h"), (t.detach() for t in outputs)))
    return found | dict(zip((f"d{name}" for name in case.operands), gradients))


# --- the checks ----------------------------------------------------------------------------


def failures_of(case: Case, setting: Setting, device: str) -> Iterator[str]:
    """What is wrong with the results of one call."""
    inputs = draw(case, setting, device)
    found, again, plain = by_op(case, inputs), by_op(case, inputs), by_chain(case, inputs)
    for name, exact in by_chain(case, inputs, exact=True).items():
        if name not in found:  # the input of a norm that returns no alias of it
            continue
        if found[name].dtype != plain[name].dtype:
            yield f"{name} is {found[name].dtype}, the chain's is {plain[name].dtype}"
        if not torch.equal(found[name], again[name]):
            yield f"{name} differs between two runs"
        error = distance(found[name], exact)
        most = allowed(name, distance(plain[name], exact), setting.dtype)
        if not error <= most:
            yield f"{name} is {error:.3e} from fp64, allowed are {most:.3e}"


def distance(found: Tensor, exact: Tensor) -> float:
    """Relative RMS error."""
    scale = exact.square().mean().sqrt().clamp_min(torch.finfo(torch.float64).tiny)
    return ((found.double() - exact).square().mean().sqrt() / scale).item()


def allowed(name: str, error: float, dtype: torch.dtype) -> float:
    """The most that a result may be from fp64 where the chain is `error` from it."""
    if dtype != FP32:
        return FACTOR * error
    factor = FACTOR_FP32_DWEIGHT if name.startswith("dweight") else FACTOR
    return max(factor * error, FP32_STEPS * torch.finfo(FP32).eps)


def spilt(case: Case, setting: Setting, device: str) -> Iterator[str]:
    """Where NaN and Inf in some rows change other rows, or y where the chain stays finite."""
    inputs = draw(case, setting, device)
    clean = by_op(case, inputs)
    bad = torch.zeros(setting.M, dtype=torch.bool, device=device)
    tensors = [*inputs.operands[: len(case.rows)], inputs.dys[0]]
    for i, tensor in enumerate(tensors):
        for row, value in ((3 + 8 * i, math.nan), (5 + 8 * i, math.inf)):
            tensor[row, -1 - i] = value
            bad[row] = True
    dirty, plain = by_op(case, inputs), by_chain(case, inputs)
    for name in [n for n in dirty if not n.startswith("dweight")]:
        if not torch.equal(dirty[name][~bad], clean[name][~bad]):
            yield f"{name} changes in rows beside those with NaN or Inf"
    if not torch.equal(dirty["y"].isfinite(), plain["y"].isfinite()):
        yield "y is not finite in other places than the chain's"


def check(case: Case, dtype: torch.dtype, device: str, scope: Scope) -> tuple[int, list[str]]:
    """The number of checks of a case in one dtype, and what was wrong with them."""
    checks = {str(s): failures_of(case, s, device) for s in settings(case, dtype, scope)}
    if dtype == scope.dtypes[0]:
        for N in scope.widths_of(case, dtype):
            setting = Setting(BAD_ROWS, N, dtype, residual=case.residual)
            if scope.elements // N >= BAD_ROWS:
                checks[f"{setting}, bad rows"] = spilt(case, setting, device)
    failures = [f"{label}: {text}" for label, texts in checks.items() for text in survived(texts)]
    return len(checks), failures


def survived(texts: Iterator[str]) -> Iterator[str]:
    """`texts`, and the error that they end with."""
    try:
        yield from texts
    except Exception as error:
        yield f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
