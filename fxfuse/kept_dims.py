"""A dimension that a reduction drops, and that is put back later."""

from __future__ import annotations

from torch import fx

from fxfuse.facts import same_shape
from fxfuse.powers import STEPS
from fxfuse.term import Term, ViewLike

DROPPED = "it drops the dimension that it reduces (keepdim=False)"


def put_back(view: ViewLike, node: fx.Node, x: object, dim: int | None = None) -> Term | None:
    """x in another shape as the same with the dimension kept, if that is what `node` makes of it.

    dim: where `node` says that it adds one, for graphs without shapes.
    """
    own, wanted = view.facts.shape(x), view.facts.shape(node)
    if own is None or wanted is None:
        return kept(view, node, x) if dim == -1 == view.facts.dim else None
    column = list(own)
    column.insert(view.facts.dim % (len(own) + 1), 1)
    return kept(view, node, x) if same_shape(tuple(column), wanted) else None


def kept(view: ViewLike, node: fx.Node, x: object) -> Term | None:
    """A reduction without keepdim, or a root of one, whose dimension is put back."""
    term = view.see(x)
    if term is None:
        return None
    if term.flaw == DROPPED:
        return Term(term.word, term.args, (node, *term.nodes))
    if term.flaw is None and term.word in STEPS:
        tensors = [a is not None and not view.facts.is_number(a) for a in term.args]
        if tensors.count(True) == 1:
            at = tensors.index(True)
            inner = kept(view, node, term.args[at])
            args = (*term.args[:at], inner, *term.args[at + 1 :])
            return inner and Term(term.word, args, term.nodes)
    return None
