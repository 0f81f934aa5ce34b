"""`Site`: the nodes that one op replaces, and where the op can stand."""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import fx

from fxfuse.match import Bound, Call, Viewed
from fxfuse.term import Attr
from fxfuse.view import View

aten = torch.ops.aten

_CHECKS = {aten._assert_tensor_metadata.default}
_ON_SIZES = {operator.getitem, operator.floordiv, operator.mul}
_VIEWS_OF_TRACERS = {aten.detach.default, aten.alias.default}
# What is plain to compute again from its operands, next to an op that returns none of it.
_PLAIN_WORDS = {"add", "cast", "detach", "mul", "power", "same", "view"}
_MOVABLE_WORDS = {"add", "mul", "div", "cast", "square", "mean", "sum", "rsqrt", "sqrt"}


@dataclass(frozen=True)
class Site:
    """One matched site.

    nodes: what the op replaces, in graph order; they can be erased. inputs: the nodes that the op
    reads, and parameters what it reads of leaf modules. outputs: the nodes whose values it returns;
    the root, the last node, is the first of them. repeated: what stays in the graph for others and
    the op computes again. saved: what it keeps for its backward. results:
    which result of the op each output is, or None where the op has one result or is to stand for
    the root as a whole. views: how results come back, by their number, where not as they are.
    """

    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    parameters: tuple[Attr, ...]
    outputs: tuple[fx.Node, ...]
    repeated: tuple[fx.Node, ...]
    saved: tuple[fx.Node, ...]
    results: tuple[int, ...] | None
    views: dict[int, Viewed]

    @property
    def root(self) -> fx.Node:
        return self.outputs[0]

    def place(self) -> fx.Node:
        """The node that the op has to stand before: the root, or an earlier user of a result."""
        covered = set(self.nodes)
        users = [u for n in self.outputs for u in n.users if u not in covered]
        return min([self.root, *users])


def site(b: Bound, call: Call) -> Site:
    """The site of a match: plain steps needed elsewhere stay, helpers of the match go with it."""
    view, operands = b.view, call.operands
    inputs = tuple(a for a in operands if isinstance(a, fx.Node))
    outputs, results = _outputs(b, call)
    views = {i: one for i, one in enumerate(call.outputs) if isinstance(one, Viewed)}
    covered = set(b.nodes)
    alive = set(inputs) | set(outputs[1:])
    while stay := {n for n in covered if n not in outputs and _can_stay(view, n, alive, covered)}:
        covered -= stay
        alive |= stay
    helpers = {h for n in (*covered, *alive) for u in n.users for h in _helpers(u, alive, covered)}
    parameters = tuple(a for a in operands if isinstance(a, Attr))
    saved = inputs if call.saves is None else [a for a in call.saves if isinstance(a, fx.Node)]
    return Site(
        nodes=tuple(sorted(covered | helpers)),
        inputs=inputs,
        parameters=parameters,
        outputs=outputs,
        repeated=tuple(n for n in b.nodes if n not in covered),
        saved=(*saved, *outputs[1:]),
        results=results,
        views=views,
    )


def _outputs(b: Bound, call: Call) -> tuple[tuple[fx.Node, ...], tuple[int, ...] | None]:
    if call.root is None or len(call.op._schema.returns) == 1:
        return (b.root,), None
    found = {call.root: b.root}
    for index, output in enumerate(call.outputs):
        name = output.name if isinstance(output, Viewed) else output
        if index != call.root and b.has(name):
            found[index] = b.get(name)
    return tuple(found.values()), tuple(found)


def _can_stay(view: View, node: fx.Node, alive: set[fx.Node], covered: set[fx.Node]) -> bool:
    """A cast, or another plain step, of values that stay alive, with users outside of the match."""
    outside = any(u not in covered and not _helpers(u, alive, covered) for u in node.users)
    return outside and _is_plain(view, node, alive, covered)


def _is_plain(view: View, node: fx.Node, alive: set[fx.Node], covered: set[fx.Node]) -> bool:
    if node in alive:
        return True
    term = view.term(node)
    if node not in covered or term.word not in _PLAIN_WORDS:
        return False
    # a cast may read another tensor for its dtype alone
    sources = term.args if term.word in ("cast", "same") else node.all_input_nodes
    return all(_is_plain(view, source, alive, covered) for source in sources)


def _helpers(node: fx.Node, alive: set[fx.Node], covered: set[fx.Node]) -> set[fx.Node]:
    """What reads a match without using a value: a metadata check, a dead view that autograd saved
    while it was traced, or in a symbolic trace `x.dtype` or a size, with what is computed from it,
    that only the match uses. Empty if the node is none of these.
    """
    checks = node.target in _CHECKS or (node.target in _VIEWS_OF_TRACERS and not node.users)
    if not checks and not _asks(node):
        return set()
    reads = not covered.isdisjoint(node.all_input_nodes)
    if checks:
        return {node} if reads else set()
    # without users it may as well belong to another match of the same input
    return _asking(node, alive, covered) if reads or node.users else set()


def _asks(node: fx.Node) -> bool:
    """Whether a node asks a tensor for its dtype or its sizes."""
    if node.op == "call_method":
        return node.target in ("size", "dim", "numel")
    return node.target is getattr and node.args[1] in ("dtype", "shape", "ndim")


def _asking(node: fx.Node, alive: set[fx.Node], covered: set[fx.Node]) -> set[fx.Node]:
    """The node and what is computed from it, if all of that ends in the match; else nothing."""
    if node in alive:
        return set()
    found = {node}
    for user in node.users:
        if user not in covered:
            inner = _asking(user, alive, covered) if user.target in _ON_SIZES else set()
            if not inner:
                return set()
            found |= inner
    return found


def moved(view: View, site: Site) -> set[fx.Node] | None:
    """The nodes that have to move before the op's place, for its inputs; None if one cannot."""
    place, covered = site.place(), set(site.nodes)
    found: set[fx.Node] = set()
    waiting = list(site.inputs)
    while waiting:
        node = waiting.pop()
        if node in covered:
            return None
        if node < place or node in found:
            continue
        pure = view.term(node).word in _MOVABLE_WORDS and not view.memory.writes_of(node)
        if node.op != "get_attr" and not pure:
            return None
        found.add(node)
        waiting.extend(node.all_input_nodes)
    return found
