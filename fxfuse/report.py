"""What a rewrite did and did not do: `Match`, `Miss`, and the `Report` that holds them."""

from __future__ import annotations

import json
import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field

from torch import fx


@dataclass(frozen=True)
class Match:
    """One site that was rewritten.

    nodes: names of the nodes that the op replaced. module: path of the module they come from, and
    where: file:line of the user's code, both "" where the graph does not tell. shapes and dtypes:
    by operand. policy: which side is a kernel and which plain PyTorch, and why. bytes_saved:
    memory traffic that eager execution of the replaced nodes has over the fused op, both
    directions, or None.
    """

    pattern: str
    op: str
    nodes: tuple[str, ...]
    module: str
    where: str
    shapes: dict[str, tuple]
    dtypes: dict[str, str]
    attributes: dict[str, object]
    policy: str
    bytes_saved: int | None = None


@dataclass(frozen=True)
class Miss:
    """One site that looked like a pattern and was left alone, with the reason."""

    pattern: str
    node: str
    module: str
    where: str
    reason: str


@dataclass
class Report:
    """The outcome of one rewrite.

    graph_module: what was rewritten (held weakly; None once it is gone). modified: whether it
    changed. counts: sites rewritten, by pattern.
    """

    matches: list[Match] = field(default_factory=list)
    misses: list[Miss] = field(default_factory=list)
    seconds: float = 0.0
    modified: bool = False
    _graph_module: weakref.ref | None = field(default=None, repr=False, compare=False)

    @property
    def graph_module(self) -> fx.GraphModule | None:
        return self._graph_module() if self._graph_module else None

    @graph_module.setter
    def graph_module(self, value: fx.GraphModule | None) -> None:
        self._graph_module = weakref.ref(value) if value is not None else None

    @property
    def counts(self) -> dict[str, int]:
        return dict(sorted(Counter(m.pattern for m in self.matches).items()))

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_graph_module": None}

    @classmethod
    def merge(cls, reports: Iterable[Report]) -> Report:
        """One report of several graphs, without a graph module of its own."""
        total = cls()
        for report in reports:
            total.matches += report.matches
            total.misses += report.misses
            total.seconds += report.seconds
            total.modified |= report.modified
        return total

    def __str__(self) -> str:
        return self.to_table()

    def to_json(self) -> str:
        """A JSON object with `counts`, `matches`, `misses`, `seconds` and `modified`."""
        return json.dumps(
            {
                "counts": self.counts,
                "modified": self.modified,
                "seconds": round(self.seconds, 6),
                "matches": [asdict(m) for m in self.matches],
                "misses": [asdict(m) for m in self.misses],
            },
            indent=2,
            default=str,
        )

    @classmethod
    def from_json(cls, text: str) -> Report:
        """The report that `to_json` wrote, without its graph module; or a ValueError, KeyError."""
        found = json.loads(text)
        matches = [{**m, "nodes": tuple(m["nodes"])} for m in found["matches"]]
        for m in matches:
            m["shapes"] = {name: tuple(shape) for name, shape in m["shapes"].items()}
        return cls(
            [Match(**m) for m in matches],
            [Miss(**m) for m in found["misses"]],
            found["seconds"],
            found["modified"],
        )

    def to_table(self) -> str:
        """The matches, then the misses with their reasons, as text tables."""
        from tabulate import tabulate

        parts = []
        if self.matches:
            rows = [
                (
                    m.pattern,
                    m.module or m.nodes[-1],
                    m.where,
                    _shapes(m),
                    _dtypes(m),
                    m.op,
                    m.policy,
                )
                for m in self.matches
            ]
            heads = ("pattern", "module", "where", "shapes", "dtypes", "op", "policy")
            parts.append(tabulate(rows, heads))
        if self.misses:
            rows = [(m.pattern, m.module or m.node, m.where, m.reason) for m in self.misses]
            parts.append(tabulate(rows, ("not fused", "module", "where", "reason")))
        totals = ", ".join(f"{n} {name}" for name, n in self.counts.items()) or "nothing"
        parts.append(f"fused: {totals}; left alone: {len(self.misses)}")
        return "\n\n".join(parts)


def _site(m: Match) -> str:
    return m.module or m.nodes[-1]


def _shapes(m: Match) -> str:
    return ", ".join(f"{name} {'x'.join(map(str, s))}" for name, s in m.shapes.items())


def _dtypes(m: Match) -> str:
    kinds = dict.fromkeys(m.dtypes.values())
    if len(kinds) <= 1:
        return ", ".join(kinds)
    return ", ".join(f"{name} {d}" for name, d in m.dtypes.items())
