"""dy = dq + dk + dv: the gradients of a norm that feeds several layers are added in its kernel."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import fx

from fxfuse.match import Bound, Call, Derived, same_shape
from fxfuse.patterns.norm_backward import MOST_GRADIENTS, norm_backward, read
from fxfuse.registry import pattern

aten = torch.ops.aten
_VIEWS = {aten.view.default, aten._unsafe_view.default, aten.reshape.default}
Operand = fx.Node | Derived


@pattern("backward_sum_rms_norm", norm_backward, size=1, backward=True)
def build(b: Bound) -> Call | None:
    """Two or three gradients of a norm's output, added inside the norm's backward kernel."""
    backward = read(b.root)
    if backward is None:
        return None
    first, *others = backward.dys
    total = _sum(b, first, MOST_GRADIENTS - len(others))
    if not total.nodes:
        return None
    b.nodes.extend(total.nodes)
    return backward.call((), dys=[*total.terms, *others])


@dataclass(frozen=True)
class _Sum:
    """terms: in an order in which adding from left to right is the same; nodes: what adds them."""

    terms: list[Operand]
    nodes: list[fx.Node] = field(default_factory=list)


def _sum(b: Bound, node: fx.Node, room: int) -> _Sum:
    """The sum that a node is, of at most `room` terms, or the node itself."""
    if room < 2 or len(node.users) > 1:
        return _Sum([node])
    if node.target in _VIEWS:
        inner = _sum(b, node.args[0], room)
        viewed = [_view(b, term, node) for term in inner.terms]
        return _Sum(viewed, [node, *inner.nodes]) if inner.nodes else _Sum([node])
    term = b.view.term(node)
    if (
        term.word != "add"
        or term.flaw
        or not all(_is_like(b, operand, node) for operand in term.args)
    ):
        return _Sum([node])
    sums = []
    for one, other in (term.args, term.args[::-1]):
        inner = _sum(b, one, room - 1)
        sums.append(_Sum([*inner.terms, other], [node, *inner.nodes]))
    return max(sums, key=lambda found: len(found.terms))


def _is_like(b: Bound, operand: object, node: fx.Node) -> bool:
    """Whether an operand of an add has the dtype and the shape of the sum."""
    shapes = b.facts.shape(operand), b.facts.shape(node)
    return (
        isinstance(operand, fx.Node)
        and None not in shapes
        and same_shape(*shapes)
        and b.facts.dtype(operand) == b.facts.dtype(node)
    )


def _view(b: Bound, term: Operand, view: fx.Node) -> Derived:
    """A term of a sum, seen as the view of the sum; its strides may be others than the sum's."""
    value = term.value if isinstance(term, Derived) else b.facts.value(term)
    shape = b.facts.shape(view)
    return Derived(aten.reshape.default, (term, *view.args[1:]), value.reshape(shape))
