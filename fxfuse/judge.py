"""Whether two results of one computation agree: against the truth in fp64, or by tolerances.

The error of a tensor is measured twice, as root mean square and as largest value, each relative to
that of the reference. With fp64 as reference the fused error may be

    rms: 2 x eager's error + 4 steps        largest: 4 x eager's error + 16 steps        in fp32
    rms: 2 x eager's error + 1 step         largest: 4 x eager's error + 4 steps         in 16 bits

(a step: `torch.finfo(dtype).eps` of the tensor's dtype). Without it eager is the reference, and the
bounds are `TOLERANCES`, ten times as much for the largest value. fp64 is taken for the truth where
it has the values that eager has up to `SANE`: a model may do other things in fp64.

A tensor beyond its bound is measured once more, against what the model does by itself when its
weights and inputs are moved by one step: twice (four times) as much as that is allowed too. Small
differences of large numbers need this, as do tensors of few elements.

NaN, inf and -inf have to be in the same places; integers and booleans have to be the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

FACTORS = {"rms": 2.0, "largest": 4.0}  # of eager's error
STEPS = {torch.float32: 4, torch.float16: 1, torch.bfloat16: 1}  # four times for the largest
TOLERANCES = {
    torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2,
}  # fmt: skip
SANE = {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.1}

Values = Mapping[str, object]


@dataclass(frozen=True)
class Comparison:
    """One tensor, fused against eager.

    by: what judged it: "fp64" (the truth), "tolerance", "moved" (how far the model moves by itself)
    or "equal". eager_error, fused_error: relative error to the truth, or, without it, 0 and the
    difference to eager; of integers the share that differs. allowed: the most that fused_error may
    be. measure: whether these three are root mean squares or largest values, whichever is nearer
    to its bound. problem: what is wrong instead of that, "" if nothing is. norms: of eager's and
    the fused error and of the reference, for errors of many tensors together.
    """

    name: str
    ok: bool
    dtype: str = ""
    shape: tuple[int, ...] = ()
    by: str = "equal"
    eager_error: float = 0.0
    fused_error: float = 0.0
    allowed: float = 0.0
    measure: str = "rms"
    problem: str = ""
    norms: tuple[float, float, float] = (0.0, 0.0, 0.0)


def compare(
    eager: Values, fused: Values, truth: Values | None = None, moved: Sequence[Values] = ()
) -> list[Comparison]:
    """A `Comparison` for each value by name; values are tensors, numbers, or anything with `==`.

    truth: the same in fp64, or None. moved: the values of runs that were moved by one step.
    """
    found = [_one(n, eager, fused, truth) for n in dict.fromkeys((*eager, *fused))]
    return [
        one if one.ok or one.problem else _by_moving(one, eager, fused, truth, moved)
        for one in found
    ]


def together(found: Sequence[Comparison]) -> tuple[float, float]:
    """(eager's, the fused) relative error of all tensors as one."""
    eager, fused, whole = (math.hypot(*(one.norms[i] for one in found)) for i in range(3))
    return eager / (whole or 1.0), fused / (whole or 1.0)


def _one(name: str, eager: Values, fused: Values, truth: Values | None) -> Comparison:
    if name not in eager or name not in fused:
        missing = "fused" if name in eager else "eager"
        return Comparison(name, False, problem=f"it is missing in the {missing} run")
    ours, theirs = fused[name], eager[name]
    if not (_is_value(ours) and _is_value(theirs)):
        return _plain(name, theirs, ours)
    ours, theirs = torch.as_tensor(ours), torch.as_tensor(theirs)
    about = {"dtype": str(theirs.dtype).removeprefix("torch."), "shape": tuple(theirs.shape)}
    if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
        problem = f"fused it is {_kind(ours)}, eager {_kind(theirs)}"
        return Comparison(name, False, **about, problem=problem)
    if not (theirs.is_floating_point() or theirs.is_complex()):
        share = (ours != theirs).double().mean().item() if ours.numel() else 0.0
        return Comparison(name, share == 0, **about, fused_error=share)
    problem = _other_places(theirs, ours)
    if problem:
        return Comparison(name, False, **about, problem=problem)
    right = _usable(theirs, truth and truth.get(name))
    by, reference = ("tolerance", theirs) if right is None else ("fp64", right)
    errors = _Errors(reference, theirs)
    return errors.judged(Comparison(name, False, **about, by=by), ours, errors.limits(by))


def _by_moving(
    one: Comparison, eager: Values, fused: Values, truth: Values | None, runs: Sequence[Values]
) -> Comparison:
    ours, theirs = torch.as_tensor(fused[one.name]), torch.as_tensor(eager[one.name])
    others = [torch.as_tensor(run[one.name]) for run in runs if _is_value(run.get(one.name))]
    others = [t for t in others if (t.dtype, t.shape) == (theirs.dtype, theirs.shape)]
    if not others:
        return one
    if one.by == "equal":
        share = max((t != theirs).double().mean().item() for t in others)
        allowed = FACTORS["rms"] * share
        return replace(one, ok=one.fused_error <= allowed, by="moved", allowed=allowed)
    right = _usable(theirs, truth and truth.get(one.name)) if one.by == "fp64" else None
    errors = _Errors(theirs if right is None else right, theirs)
    limits = errors.limits(one.by)
    for norm, factor in FACTORS.items():
        limits[norm] = max(limits[norm], factor * max(errors.of(t)[norm] for t in others))
    return errors.judged(replace(one, by="moved"), ours, limits)


class _Errors:
    """Errors relative to a reference, at the places where it and eager are finite."""

    def __init__(self, reference: torch.Tensor, eager: torch.Tensor) -> None:
        self.dtype = eager.dtype if not eager.is_complex() else _real(eager).dtype
        self.places = torch.isfinite(_real(eager)) & torch.isfinite(_real(reference))
        self.right = _real(reference)[self.places].double()
        self.eager = eager
        self.sizes = {k: v or torch.finfo(self.dtype).tiny for k, v in _norms(self.right).items()}

    def judged(self, one: Comparison, fused: torch.Tensor, limits: dict[str, float]) -> Comparison:
        own, got, root = self.of(self.eager), self.of(fused), math.sqrt(self.right.numel())
        measure = max(FACTORS, key=lambda norm: got[norm] / limits[norm])
        lengths = (e["rms"] * self.sizes["rms"] * root for e in (own, got, {"rms": 1.0}))
        return replace(
            one, ok=got[measure] <= limits[measure], measure=measure, eager_error=own[measure],
            fused_error=got[measure], allowed=limits[measure], norms=tuple(lengths),
        )  # fmt: skip

    def of(self, value: torch.Tensor) -> dict[str, float]:
        apart = (_real(value)[self.places].double() - self.right).nan_to_num(torch.inf)
        return {k: v / self.sizes[k] for k, v in _norms(apart).items()}

    def limits(self, by: str) -> dict[str, float]:
        if by == "tolerance":
            rms = TOLERANCES.get(self.dtype, TOLERANCES[torch.bfloat16])
            return {"rms": rms, "largest": 10 * rms}
        own, more = self.of(self.eager), STEPS[self.dtype] * torch.finfo(self.dtype).eps
        limits = {"rms": more, "largest": 4 * more}
        return {n: factor * own[n] + limits[n] for n, factor in FACTORS.items()}


def _norms(values: torch.Tensor) -> dict[str, float]:
    if not values.numel():
        return {"rms": 0.0, "largest": 0.0}
    return {"rms": values.square().mean().sqrt().item(), "largest": values.abs().max().item()}


def _usable(eager: torch.Tensor, truth: object) -> torch.Tensor | None:
    """The value in fp64, if it is that of the same function."""
    bound = SANE.get(_real(eager).dtype)
    if bound is None or not torch.is_tensor(truth) or truth.shape != eager.shape:
        return None
    if truth.dtype not in (torch.float64, torch.complex128):
        return None
    errors = _Errors(truth, eager)
    same = torch.equal(torch.isfinite(_real(eager)), errors.places)
    return truth if same and errors.of(eager)["rms"] <= bound else None


def _other_places(eager: torch.Tensor, fused: torch.Tensor) -> str:
    eager, fused = _real(eager), _real(fused)
    kinds = {"NaN": torch.isnan, "inf": torch.isposinf, "-inf": torch.isneginf}
    counts = {
        kind: (int(among(eager).sum()), int(among(fused).sum()))
        for kind, among in kinds.items()
        if not torch.equal(among(eager), among(fused))
    }
    wrong = [f"{kind} in {n} places eager, in {m} fused" for kind, (n, m) in counts.items()]
    if any(n == m for n, m in counts.values()):
        wrong.append("not the same ones")
    return ", ".join(wrong)


def _real(value: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(value) if value.is_complex() else value


def _is_value(value: object) -> bool:
    return torch.is_tensor(value) or isinstance(value, (bool, int, float, complex))


def _plain(name: str, eager: object, fused: object) -> Comparison:
    same = type(eager) is type(fused) and (_is_opaque(eager) or eager == fused)
    problem = "" if same else f"it is {fused!r:.40} fused, {eager!r:.40} eager"
    return Comparison(name, same, problem=problem)


def _is_opaque(value: object) -> bool:
    """An object without an `==` of its own, of which nothing is known."""
    return type(value).__eq__ is object.__eq__


def _kind(value: torch.Tensor) -> str:
    return f"{'x'.join(map(str, value.shape)) or 'one'} {str(value.dtype).removeprefix('torch.')}"
