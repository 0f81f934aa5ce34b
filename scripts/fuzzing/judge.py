"""Whether a fused run is as good as the run without fusing, and why not.

The truth is the same program in fp64. What is compared with it is the root of the mean square of
each tensor's errors, relative to that of the tensor: one number for a tensor, in steps (half the
machine epsilon of the coarsest dtype of the program).

    forward and gradients of rows    at most 1.1 x the error without fusing, and 4 steps
    gradients of weights             at most 2 x, and 4 steps: their sums have another order
    forward in fp16 and bf16         97 % of the elements equal, bit for bit

Why this catches what it is for: inputs have unit scale, some rows 1/512 of it. A wrong eps
(1e-5 for 1e-6) changes such rows by tens of per cent, a residual gradient that is dropped changes
dx by its own size, a statistic in half precision costs 2 to 3 steps of bf16 in every element of a
row: all far beyond the bounds. A rounding that is dropped makes a result *better* against fp64; it
shows in the bits, since it moves a quarter of the elements of a half-precision tensor.

Why it gives no false alarms: fused and plain steps round alike, so that they differ where the order
of a sum moves a value over a rounding border, one element in 2^12 or fewer; such an element may
take its row along if a root is rounded, which is 3 % of the bits at most. What is over a bound is
run again on other inputs, and judged by all of them together, so that no single row decides. Where
a tensor is made of noise (terms that cancel, as in the gradient of a norm of one column) the error
without fusing is large, too; then only its size counts. It may be small by luck: it is taken for no
less than what roundings can do to the tensor (noise.py), where they can do what only cancelling
lets them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from scripts.fuzzing.outcome import Outcome
from scripts.fuzzing.program import Program

HALVES = (torch.float16, torch.bfloat16)
SLACK, SLACK_OF_FP64 = 4, 64
RATIO, RATIO_OF_WEIGHTS = 1.1, 2.0
EQUAL = 0.97
# Errors beyond so many steps are of a tensor whose terms cancel: two orders of a sum differ more.
CANCELS, RATIO_WHERE_IT_CANCELS = 64, 4.0
NOISE = 0.3


@dataclass(frozen=True)
class Complaint:
    """What is wrong with a run.

    kind: "raises", "facts", "strides" or "numbers". what: the tensor or the fact.
    """

    kind: str
    what: str
    text: str

    def __str__(self) -> str:
        return f"{self.what}: {self.text}"


@dataclass(frozen=True)
class Runs:
    """The runs of one program, on the same inputs each.

    exact, narrow: the program in fp64 and in fp32, where it can be run so. noisy: the program as it
    is, where each step errs as roundings may; empty if nobody has looked.
    """

    program: Program
    reference: Sequence[Outcome]
    fused: Sequence[Outcome]
    exact: Sequence[Outcome]
    narrow: Sequence[Outcome]
    noisy: Sequence[Outcome] = ()


def judge(runs: Runs, bits: bool) -> list[Complaint]:
    """What is wrong with the fused runs. bits: whether halves have to be equal in the forward."""
    first, fused = runs.reference[0], runs.fused[0]
    raised = _raised(first, fused)
    if raised is not None or first.stage == "forward":
        return [raised] if raised else []
    found = [
        Complaint(_kind(name), name, f"{fused.facts.get(name)}, without fusing {value}")
        for name, value in first.facts.items()
        if fused.facts.get(name) != value
    ]
    return found + _numbers(runs, bits)


def _kind(fact: str) -> str:
    return "strides" if fact.endswith("strides") else "facts"


def _raised(reference: Outcome, fused: Outcome) -> Complaint | None:
    if fused.stage and fused.stage != reference.stage:
        return Complaint("raises", fused.stage, fused.error)
    if reference.stage == "forward" and not fused.stage:
        return Complaint("raises", "forward", f"runs, without fusing {reference.error}")
    # An op that saves less lets more be written, and its gradient is right then.
    return None


def _numbers(runs: Runs, bits: bool) -> list[Complaint]:
    found = []
    kinds = ("outputs", "written", "gradients")
    for kind in kinds if not runs.reference[0].stage else kinds[:2]:
        for name, want in getattr(runs.reference[0], kind).items():
            what = f"gradient of {name}" if kind == "gradients" else name
            got = getattr(runs.fused[0], kind).get(name)
            problem = _differs_in_kind(got, want) or _Tensors(runs, kind, name).problem(bits)
            if problem:
                found.append(Complaint("numbers", what, problem))
    return found


def _differs_in_kind(got: Tensor | None, want: Tensor | None) -> str | None:
    one, other = (None if t is None else (t.dtype, tuple(t.shape)) for t in (got, want))
    return f"{one}, without fusing {other}" if one != other else None


@dataclass(frozen=True)
class _Tensors:
    """One tensor of all the runs."""

    runs: Runs
    kind: str
    name: str

    def problem(self, bits: bool) -> str | None:
        wants, gots = self._all(self.runs.reference), self._all(self.runs.fused)
        if wants[0] is None or not wants[0].numel():
            return None
        if not wants[0].is_floating_point():
            return None if all(map(torch.equal, gots, wants)) else "differs"
        forward = self.kind != "gradients"
        if bits and forward and wants[0].dtype in HALVES:
            share = _equal(gots, wants)
            if share < EQUAL:
                return f"{share:.1%} of the bits are equal"
        exact = self._all(self.runs.exact)
        if not exact or exact[0] is None or exact[0].shape != wants[0].shape:
            return None
        return self._infinite(gots, wants, exact, forward) or self._error(gots, wants, exact)

    def _all(self, outcomes: Sequence[Outcome]) -> list[Tensor | None]:
        return [getattr(o, self.kind).get(self.name) for o in outcomes]

    def _infinite(self, gots: list, wants: list, exact: list, forward: bool) -> str | None:
        """A gradient that is finite where the reference's is not is only better."""
        for got, want, right in zip(gots, wants, exact):
            more = ~got.isfinite() & want.isfinite()
            fewer = got.isfinite() & ~want.isfinite() & ~right.isfinite()
            if more.any() or (forward and fewer.any()):
                return "is not finite elsewhere than without fusing"
        return None

    def _error(self, gots: list, wants: list, exact: list) -> str | None:
        step = self._step()
        ours, theirs = _error_of(gots, exact, wants), _error_of(wants, exact, gots)
        size = _size(exact, wants, gots)
        if size == 0 or ours == 0:
            return None
        scale = max(size, 1e-12)
        noise = self._noise(wants, CANCELS * step * size)
        ours, theirs = ours / scale, max(theirs / scale, noise / scale, self._narrow_error(exact))
        if theirs > NOISE:
            return None if ours < 10 * theirs else f"error {ours:.2g}, without fusing {theirs:.2g}"
        parameter = any(i.name == self.name and i.parameter for i in self.runs.program.inputs)
        ratio = RATIO_OF_WEIGHTS if parameter and self.kind == "gradients" else RATIO
        if theirs > CANCELS * step or noise:
            ratio = RATIO_WHERE_IT_CANCELS
        slack = (SLACK_OF_FP64 if step < 1e-12 else SLACK) * step
        if ours <= ratio * theirs + slack:
            return None
        return f"error {ours / step:.1f} steps, without fusing {theirs / step:.1f}"

    def _step(self) -> float:
        return max(torch.finfo(d).eps for d in self.runs.program.dtypes()) / 2

    def _noise(self, wants: list, least: float) -> float:
        """How far roundings alone can move the tensor, 0 if that is not so far."""
        noisy = self._all(self.runs.noisy)
        if not noisy or noisy[0] is None or noisy[0].shape != wants[0].shape:
            return 0.0
        noise = _error_of(noisy, wants, wants)
        return noise if noise > least else 0.0

    def _narrow_error(self, exact: list) -> float:
        """For a program in fp64, whose error is not known: that of fp32, in steps of fp64."""
        narrow = self._all(self.runs.narrow)
        if not narrow or narrow[0] is None or narrow[0].shape != exact[0].shape:
            return 0.0
        size = max(_size(exact, narrow, narrow), 1e-12)
        return min(_error_of(narrow, exact, narrow) / size, 1.0) * 2.0**-29


def _equal(gots: list[Tensor], wants: list[Tensor]) -> float:
    """The share of equal elements. Two may always differ: those of few are no share."""
    differ = sum(int(((a != b) & ~(a.isnan() & b.isnan())).sum()) for a, b in zip(gots, wants))
    return 1.0 - max(differ - 2, 0) / sum(t.numel() for t in gots)


def _error_of(gots: list[Tensor], exact: list[Tensor], others: list[Tensor]) -> float:
    """The root of the mean square error where all three are finite."""
    pairs = [
        (got.double() - right.double())[got.isfinite() & right.isfinite() & other.isfinite()]
        for got, right, other in zip(gots, exact, others)
    ]
    return _rms(torch.cat(pairs))


def _size(exact: list[Tensor], wants: list[Tensor], gots: list[Tensor]) -> float:
    keep = [a.isfinite() & b.isfinite() & c.isfinite() for a, b, c in zip(exact, wants, gots)]
    sizes = [
        _rms(torch.cat([t.double()[k] for t, k in zip(all_of, keep)])) for all_of in (exact, wants)
    ]
    return max(sizes)


def _rms(errors: Tensor) -> float:
    return math.sqrt(errors.square().mean().item()) if errors.numel() else 0.0
