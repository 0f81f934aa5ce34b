"""What must not be fused: side effects, regions, values needed elsewhere, no place for the op.

Each guard looks at one matched site and returns the reason to leave it alone, or None.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import torch
from torch import fx, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fxfuse.memory import Write
from fxfuse.site import Site, moved
from fxfuse.view import View

_REGIONS = {
    "_set_grad_enabled", "_enter_autocast", "_exit_autocast", "_enter_inference_mode",
    "_exit_inference_mode", "_saved_tensors_hooks_disable", "_saved_tensors_hooks_enable",
}  # fmt: skip
# Who asks for the gradient of a tensor, which is that of this very tensor and of no alias.
_OBSERVERS = {
    "retain_grad", "register_hook", "register_post_accumulate_grad_hook", "backward",
    torch.autograd.grad, torch.autograd.backward,
}  # fmt: skip


@dataclass
class Guards:
    """The guards of one graph, with what they need to know about it as a whole."""

    view: View
    _region: dict[fx.Node, tuple[int, int]] = field(init=False)
    _writes: list[Write] = field(init=False)
    _reading: dict[fx.Node, bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._region = _regions(self.view.graph_module.graph)
        self._writes = self.view.memory.writes()

    def refuse(self, site: Site) -> str | None:
        """The first reason to leave the site alone, or None if it may be fused."""
        return (
            self._subclass(site)
            or self._regions_differ(site)
            or self._escapes(site)
            or self._observed(site)
            or self._parted(site)
            or self._moved_or_written(site)
        )

    def alias_readers(self, site: Site, source: fx.Node) -> frozenset[fx.Node]:
        """The later readers of `source` that can be given an alias which autograd made.

        Autograd lets nobody write to such an alias, so it must not leave the graph, reach code that
        we cannot see into, or be made where no gradient is recorded and used where one is.
        """
        covered, place, region = set(site.nodes), site.place(), self._region[site.root]
        readers = {u for n in self.twins(source) for u in n.users}
        return frozenset(
            u
            for u in readers - covered
            if place < u and self._region[u] == region and self._only_reads(u)
        )

    def twins(self, source: fx.Node) -> list[fx.Node]:
        """`source` and casts that return it as it is, which a tracer may have put in its place."""
        found = [source]
        for node in found:
            found += [u for u in node.users if self._returns(u, node)]
        return found

    def _returns(self, node: fx.Node, source: fx.Node) -> bool:
        """Whether a node is a cast that returns `source` itself: to its dtype, and no copy."""
        term, dtype = self.view.term(node), self.view.facts.dtype(node)
        return (
            term.word in ("cast", "same")
            and term.args[0] is source
            and dtype is not None
            and dtype == self.view.facts.dtype(source)
            and not self.view.memory.allocates(node)
            and len(node.args) <= 2
            and not node.kwargs.get("copy")
        )

    def _only_reads(self, node: fx.Node) -> bool:
        """Whether nobody can write to an operand of `node` through it or its results."""
        if not self._reading:
            for one in reversed(node.graph.nodes):  # so that users come before what they use
                self._reading[one] = self._is_reader(one)
        return self._reading[node]

    def _is_reader(self, node: fx.Node) -> bool:
        opaque = isinstance(node.target, torch._ops.HigherOrderOperator)
        if node.op not in ("call_function", "call_method") or opaque or node.target in _OBSERVERS:
            return False
        memory = self.view.memory
        if memory.writes_of(node):
            return False
        return memory.allocates(node) or all(self._reading[user] for user in node.users)

    def _subclass(self, site: Site) -> str | None:
        for operand in (*site.inputs, *site.parameters, *site.outputs):
            value = self.view.facts.value(operand)
            if value is not None and is_traceable_wrapper_subclass(value):
                name = getattr(operand, "name", None) or operand.target
                return f"{name} is a {type(value).__name__}, which the fused op has no rule for"
        return None

    def _regions_differ(self, site: Site) -> str | None:
        regions = {self._region[n] for n in (*site.nodes, *site.repeated)}
        if any(depth for _, depth in regions):
            return "it lies inside a functorch transform (vmap, grad or jvp)"
        if len(regions) > 1:
            return "an autocast, grad-mode or inference-mode region begins or ends inside it"
        return None

    def _escapes(self, site: Site) -> str | None:
        covered = set(site.nodes)
        for node in site.nodes:
            if node not in site.outputs:
                for user in node.users:
                    if user not in covered:
                        reason = f"the value {node.name} inside it is also used by {user.name}"
                        is_output = user.op == "output"
                        return reason + is_output * ": returned, or saved by an autograd.Function"
        return None

    def _observed(self, site: Site) -> str | None:
        """Outside of the op a value that it returns no longer gets the gradient from inside."""
        for node in site.outputs[1:]:
            for user in node.users:
                if user.target in _OBSERVERS:
                    return f"the gradient of {node.name} is watched by {user.name}"
        return None

    def _parted(self, site: Site) -> str | None:
        """What the op returns as new memory may be another's memory in the graph."""
        for node in site.outputs[1:]:
            for other in site.repeated:
                if other < node and not self._roots(node).isdisjoint(self._roots(other)):
                    return f"{node.name} may lie in the memory of {other.name}, which others read"
        return None

    def _moved_or_written(self, site: Site) -> str | None:
        """In-place writes to what the op reads (before it is done) or saves (ever after)."""
        first = moved(self.view, site)
        if first is None:
            return "one of its inputs is computed too late: a result is used before it"
        covered = set(site.nodes)
        end = max([site.root, *first])
        begin = min([site.nodes[0], *site.repeated])
        later = [w for w in self._writes if w.node not in covered and begin < w.node]
        if not later:
            return None
        # without gradients nothing is saved, but a result is still expected where it was
        saved = self._roots(*(site.saved if torch.is_grad_enabled() else site.outputs[1:]))
        saved |= {self.view.memory.root_of(p.target) for p in site.parameters}
        read = saved | self._roots(*site.inputs, *(i for n in first for i in n.all_input_nodes))
        read |= self._roots(*first, *site.repeated, *(covered - {site.root}))
        for write in later:
            if self._harms(write, read, saved, write.node < end):
                what, by = write.target.name, write.node.name
                return f"{what}, which it reads or aliases, is written by {by}"
        return None

    def _harms(self, write: Write, read: frozenset, saved: frozenset, between: bool) -> bool:
        roots = self.view.memory.roots(write.target)
        if not between:
            return write.sure and not roots.isdisjoint(saved)
        external = any(map(_is_external, roots)) and any(map(_is_external, read))
        return external or not roots.isdisjoint(read)

    def _roots(self, *nodes: fx.Node) -> frozenset[Hashable]:
        return frozenset().union(*(self.view.memory.roots(n) for n in nodes))


def _regions(graph: fx.Graph) -> dict[fx.Node, tuple[int, int]]:
    """For each node: how many region borders lie before it, and the depth of transforms."""
    region, borders, depth = {}, 0, 0
    for node in graph.nodes:
        name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
        borders += name in _REGIONS
        depth += name.endswith("_increment_nesting")
        depth -= name.endswith("_decrement_nesting")
        region[node] = (borders, depth)
    return region


def _is_external(root: Hashable) -> bool:
    """Memory that the caller hands in, where two names may mean one buffer."""
    if not isinstance(root, fx.Node) or root.op != "placeholder":
        return False
    value = root.meta.get("example_value", root.meta.get("val"))
    return not isinstance(value, nn.Parameter)
