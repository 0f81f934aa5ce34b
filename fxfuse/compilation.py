"""What is told about one compilation, whenever its graphs are compiled and whatever a cache holds.

A backward graph is often compiled at its first call, in another thread; and where Inductor finds a
graph in its caches no hook is called at all.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from fxfuse import stored
from fxfuse.report import Report

# Beside the op's name in the metadata of our nodes, which autograd hands on to the backward graph.
KEY = "fxfuse_graph"


class Compilation:
    """The reports of one graph before autograd and of the graphs that are made of it.

    publish: makes a report known to those who asked for it when the compilation began. cached:
    whether the compiler has caches behind which it calls no hook.
    """

    def __init__(self, key: str, publish: Callable[[Report], None], cached: bool = True) -> None:
        self.key, self.publish, self.cached = key, publish, cached
        self._kept: list[Report] = []
        self._waiting: list[Report] | None = []
        self._hooked = self._told = False

    def first(self, report: Report) -> None:
        """The compiler is done. Not before: it may ask Dynamo to begin again."""
        self.publish(report)
        found = stored.load(self.key) if self.cached and not self._hooked else None
        if found is not None:
            self._told = True
            self.publish(found)
        waiting, self._waiting = self._waiting, None
        for later in waiting or ():
            self.publish(later)

    def later(self, report: Report) -> None:
        """A graph behind the first one went through the hook."""
        self._hooked = True
        if not (report.matches or report.misses):
            return
        self._kept.append(report)
        if self.cached:
            stored.save(self.key, self._kept)
        if self._waiting is not None:
            self._waiting.append(report)
        elif not self._told:
            self.publish(report)


def mark(gm: fx.GraphModule, key: str) -> None:
    """Write the key into the metadata of our nodes."""
    for module in gm.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            custom = node.meta.get("custom") or {}
            if "fxfuse" in custom:
                custom[KEY] = key


def key_in(graph: fx.Graph) -> str | None:
    """The key that `mark` wrote into the graph before autograd."""
    found = ((n.meta.get("custom") or {}).get(KEY) for n in graph.nodes)
    return next((key for key in found if key), None)
