"""What must not be fused: side effects, regions, values needed elsewhere, no place for the op.

Each guard looks at one matched site and returns the reason to leave it alone, or None.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import fx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fxfuse.facts import Facts
from fxfuse.view import View

aten = torch.ops.aten

_WRITING_OPERATORS = {
    operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv,
    operator.imod, operator.ipow, operator.iand, operator.ior, operator.ixor, operator.imatmul,
    operator.ilshift, operator.irshift, operator.setitem,
}  # fmt: skip
_REGIONS = {
    "_set_grad_enabled", "_enter_autocast", "_exit_autocast", "_enter_inference_mode",
    "_exit_inference_mode", "_saved_tensors_hooks_disable", "_saved_tensors_hooks_enable",
}  # fmt: skip
_CHECKS = {aten._assert_tensor_metadata.default}
_VIEWS_OF_TRACERS = {aten.detach.default, aten.alias.default}
_COMPUTING_WORDS = {"add", "mul", "div", "cast", "square", "mean", "sum", "rsqrt", "sqrt"}


@dataclass(frozen=True)
class Site:
    """One matched site.

    nodes: what the op replaces, in graph order; they can be erased. inputs: what the op reads.
    outputs: the nodes whose values the op returns; the root, the last node, is the first of them.
    """

    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]

    @property
    def root(self) -> fx.Node:
        return self.outputs[0]


def site(view: View, matched: Iterable[fx.Node], inputs: tuple, outputs: tuple) -> Site:
    """The site of a match: casts needed elsewhere stay, helpers of the match go with it."""
    covered = set(matched)
    alive = set(inputs) | set(outputs[1:])
    while stay := {n for n in covered if n not in outputs and _can_stay(view, n, alive, covered)}:
        covered -= stay
        alive |= stay
    helpers = {u for n in (*covered, *alive) for u in n.users if _is_helper(u, covered)}
    return Site(tuple(sorted(covered | helpers)), inputs, outputs)


def _can_stay(view: View, node: fx.Node, alive: set[fx.Node], covered: set[fx.Node]) -> bool:
    """A cast of a value that stays alive, with users outside of the match."""
    term = view.term(node)
    if term.word not in ("cast", "same") or term.args[0] not in alive:
        return False
    return any(u not in covered and not _is_helper(u, covered) for u in node.users)


def _is_helper(node: fx.Node, covered: set[fx.Node]) -> bool:
    """What reads a match without using a value: a metadata check, a dead view that autograd saved
    while it was traced, or `x.dtype` in a symbolic trace that only the match uses.
    """
    if node.op != "call_function":
        return False
    if node.target in _VIEWS_OF_TRACERS and not node.users:
        return node.args[0] in covered
    if node.target in _CHECKS:
        return node.args[0] in covered
    return node.target is getattr and node.args[1:] == ("dtype",) and covered.issuperset(node.users)


@dataclass
class Guards:
    """The guards of one graph, with what they need to know about it as a whole."""

    view: View
    _region: dict[fx.Node, tuple[int, int]] = field(init=False)
    _writes: list[tuple[fx.Node, fx.Node]] = field(init=False)

    def __post_init__(self) -> None:
        graph = self.view.graph_module.graph
        self._region = _regions(graph)
        self._writes = [(n, w) for n in graph.nodes for w in written(n)]

    @property
    def facts(self) -> Facts:
        return self.view.facts

    def refuse(self, site: Site) -> str | None:
        """The first reason to leave the site alone, or None if it may be fused."""
        return (
            self._subclass(site)
            or self._regions_differ(site)
            or self._escapes(site)
            or self._written(site)
            or self._no_place(site)
        )

    def _subclass(self, site: Site) -> str | None:
        for node in (*site.inputs, *site.outputs):
            value = self.facts.value(node)
            if value is not None and is_traceable_wrapper_subclass(value):
                return (
                    f"{node.name} is a {type(value).__name__}, which the fused op has no rule for"
                )
        return None

    def _regions_differ(self, site: Site) -> str | None:
        regions = {self._region[n] for n in site.nodes}
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
                        return f"the value {node.name} inside it is also used by {user.name}"
        return None

    def _written(self, site: Site) -> str | None:
        """In-place writes to what the op reads (before it is done) or saves (ever after)."""
        covered = set(site.nodes)
        later = [(n, w) for n, w in self._writes if n not in covered and site.nodes[0] < n]
        if not later:
            return None
        read = frozenset(covered - {site.root})
        read = read.union(*(self.facts.roots(n) for n in (*site.inputs, *site.outputs[1:])))
        external = any(_is_external(n) for n in read)
        for node, target in later:
            roots = self.facts.roots(target)
            between = node < site.root
            if roots & read or (between and external and any(_is_external(r) for r in roots)):
                return f"{target.name}, which it reads or aliases, is written by {node.name}"
        return None

    def _no_place(self, site: Site) -> str | None:
        place = place_for(site)
        covered = set(site.nodes)
        for source in site.inputs:
            if self.unmovable(source, place, covered):
                return f"its input {source.name} is computed too late: a result is used before it"
        return None

    def unmovable(self, node: fx.Node, place: fx.Node, covered: set[fx.Node]) -> fx.Node | None:
        """The node that keeps `node` from being computed before `place`, or None."""
        if node < place and node not in covered:
            return None
        if node.op == "get_attr":
            return None
        if node in covered or self.view.term(node).word not in _COMPUTING_WORDS or written(node):
            return node
        blocked = (self.unmovable(i, place, covered) for i in node.all_input_nodes)
        return next((b for b in blocked if b is not None), None)


def place_for(site: Site) -> fx.Node:
    """The node that the op has to stand before: the root, or an earlier user of a result."""
    covered = set(site.nodes)
    users = [u for n in site.outputs for u in n.users if u not in covered]
    return min([site.root, *users])


def written(node: fx.Node) -> Iterable[fx.Node]:
    """The nodes whose memory a node writes to."""
    return [a for a in _written_arguments(node) if isinstance(a, fx.Node)]


def _written_arguments(node: fx.Node) -> list:
    if node.op == "call_method":
        name = node.target
        return [node.args[0]] if name.endswith("_") and not name.endswith("__") else []
    if node.op != "call_function":
        return []
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return _written_by_schema(node, target._schema) if target._schema.is_mutable else []
    out = node.kwargs.get("out")
    found = list(out) if isinstance(out, (tuple, list)) else [out]
    name = getattr(target, "__name__", "")
    in_place = target in _WRITING_OPERATORS or (name.endswith("_") and not name.endswith("__"))
    if in_place or node.kwargs.get("inplace") is True:
        found += node.args[:1]
    return found


def _written_by_schema(node: fx.Node, schema: torch.FunctionSchema) -> list:
    found = []
    for index, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
            found += value if isinstance(value, (tuple, list)) else [value]
    return found


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


def _is_external(node: fx.Node) -> bool:
    """Memory that comes from outside of the graph, where two names may mean one buffer."""
    if node.op == "get_attr" or node.op == "placeholder":
        value = node.meta.get("example_value", node.meta.get("val"))
        return not isinstance(value, torch.nn.Parameter)
    return False
