"""Why sites were left alone: refusals in order, and what only looks like a pattern."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import fx

from fxfuse import origin
from fxfuse.match import Fusion
from fxfuse.report import Miss
from fxfuse.view import View


@dataclass(frozen=True)
class Refusal:
    """A pattern fitted at `root` and covered `nodes`, and was refused for `reason`.

    by_guard: it would have been fused, were it not for what stands around it.
    """

    fusion: Fusion
    root: fx.Node
    nodes: tuple[fx.Node, ...]
    reason: str
    by_guard: bool

    @property
    def rank(self) -> tuple[bool, int]:
        """Of the refusals of one site the reader wants the closest, and of the largest."""
        return not self.by_guard, -self.fusion.size


@dataclass
class Refusals:
    """The refusals of one graph."""

    view: View
    fusions: tuple[Fusion, ...]
    _all: list[Refusal] = field(default_factory=list)

    def add(
        self, fusion: Fusion, root: fx.Node, nodes: Iterable[fx.Node], reason: str, by_guard: bool
    ) -> None:
        self._all.append(Refusal(fusion, root, tuple(nodes), reason, by_guard))

    def misses(self, fused: dict[fx.Node, int]) -> list[Miss]:
        """One miss for each site that got nothing, or less than the largest pattern that fitted.

        fused: the nodes that were rewritten, with the size of the pattern that took them.
        """
        found, told = {}, set()
        for refusal in sorted(self._all, key=lambda refusal: refusal.rank):
            got = max((fused.get(n, -1) for n in refusal.nodes), default=-1)
            if got < refusal.fusion.size and told.isdisjoint(refusal.nodes):
                anchor = self._anchor(refusal)
                found[anchor] = _miss(refusal.fusion.name, anchor, refusal.reason)
                told.update(refusal.nodes)
        for node in self.view.graph_module.graph.nodes:
            if node not in fused and node not in told:
                for fusion, reason in self._near(node):
                    found[node] = _miss(fusion.name, node, reason)
        return [found[node] for node in sorted(found)]

    def _anchor(self, refusal: Refusal) -> fx.Node:
        """The node that a reader would call the site: what is special in it, or its last node."""
        inner = (n for n in refusal.nodes if any(True for _ in self._near(n)))
        return next(inner, refusal.root)

    def _near(self, node: fx.Node) -> Iterable[tuple[Fusion, str]]:
        if node.op in ("placeholder", "output", "get_attr"):
            return
        for fusion in self.fusions:
            reason = fusion.looks_like(self.view, node)
            if reason:
                yield fusion, reason


def _miss(name: str, node: fx.Node, reason: str) -> Miss:
    return Miss(name, node.name, origin.module_path(node), origin.code_line(node), reason)
