"""What the kernels shall reach, beside what they reached. A missed target is no failed check."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from gpu_speed import ELEMENTS, FUSED, OURS, THEIRS, Row

# Two timings of the same kernel differ by so much.
NOISE = 0.02


@dataclass(frozen=True)
class Target:
    """found: the value that decides, None where nothing was measured; where: at which shape."""

    name: str
    wanted: float
    found: float | None = None
    where: str = ""
    noise: float = 0.0

    @property
    def verdict(self) -> str:
        if self.found is None:
            return "not measured"
        return "met" if self.found >= self.wanted - self.noise else "missed"

    def as_json(self) -> dict[str, object]:
        return {
            "target": self.name, "at least": self.wanted, "found": self.found,
            "where": self.where, "": self.verdict,
        }  # fmt: skip


def targets(swept: Sequence[Row], compared: Sequence[Row]) -> Iterator[Target]:
    """Shares of the ceilings over all rows, times beside others over those that have both."""
    rows = [*swept, *compared]
    large = [r for r in rows if 2048 <= r.shape.N <= 16384 and elements(r) >= ELEMENTS]
    narrow = [r for r in rows if 64 <= r.shape.N <= 512 and elements(r) >= ELEMENTS]
    for where, of_them, wanted in (
        ("2048 to 16384 columns", large, (0.97, 0.92)),
        ("64 to 512 columns", narrow, (0.90, 0.88)),
    ):
        for pass_, least in zip(("forward", "backward"), wanted):
            taken = [r for r in of_them if bool(r.gradients) == (pass_ == "backward")]
            yield worst(f"{pass_}, share of the ceiling, {where}", least, taken, share)
    back = [r for r in compared if r.gradients]
    ratios = [r.faster(THEIRS) for r in back if r.faster(THEIRS)]
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else None
    where = f"geometric mean of {len(ratios)}"
    yield Target("backward, times as fast as torch.compile", 1.3, mean, where)
    for name, than, side in (
        ("fxfuse in torch.compile, times as fast as without", [THEIRS], FUSED),
        ("our kernels, times as fast as the best of the others", None, OURS),
    ):
        yield worst(name, 1.0, compared, lambda r, t=than, s=side: beside(r, t, s), NOISE)


def elements(row: Row) -> int:
    return row.shape.M * row.shape.N


def share(row: Row) -> float:
    return row.share


def beside(row: Row, than: list[str] | None, side: str) -> float | None:
    """How many times as fast a side is as the best of others."""
    others = [name for name in row.times if name not in (OURS, FUSED)] if than is None else than
    ratios = [ratio for name in others if (ratio := row.faster(name, side)) is not None]
    return min(ratios, default=None)


def worst(
    name: str,
    wanted: float,
    rows: Sequence[Row],
    value: Callable[[Row], float | None],
    noise: float = 0.0,
) -> Target:
    """The target as the row decides that is farthest from it."""
    found = [(v, f"{row.shape}, {row.pass_}") for row in rows if (v := value(row)) is not None]
    least, where = min(found, default=(None, ""))
    return Target(name, wanted, least, where, noise)
