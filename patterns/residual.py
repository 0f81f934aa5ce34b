"""Whether the sum of two tensors can be a residual stream."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from fxfuse.match import Bound, Term

# What hands a sum on, part by part.
_LINEAR = ("add", "cast", "detach", "same", "view")


def residual_problem(b: Bound, one: str, other: str) -> str | None:
    """Why h is known to be no residual stream, or None.

    A stream is added to again or returned, comes from outside, or leads to the branch that is added
    to it. Rotated queries and the experts of a layer are added up for the norm alone.
    """
    others = [u for u in b.readers_outside(b.h) if not _asks_for_dtype(b, u)]
    if others and all(b.view.term(reader).word == "sub" for reader in others):
        return "this sum is only compared with another tensor after it: it is no residual stream"
    if others:
        return None
    ours, theirs = (tuple(_parts(b, b.get(name))) for name in (one, other))
    if any(node.op == "placeholder" for node in ours + theirs):
        return None
    if any(_leads(a, z) or _leads(z, a) for a in ours for z in theirs):
        return None
    return (
        "only the norm reads this sum, and neither part of it leads to the other: it is no "
        "residual stream"
    )


def _asks_for_dtype(b: Bound, reader: fx.Node) -> bool:
    """Whether a node only asks for the dtype or a size of h, as `y.type_as(h)` does."""
    if reader.target is getattr or reader.target in ("size", "dim", "numel"):
        return True
    term = b.view.term(reader)
    return term.word == "cast" and term.args[0] is not b.h


def _parts(b: Bound, operand: object) -> Iterator[fx.Node]:
    """What an operand is the sum of, also behind factors that are the same for all rows."""
    if not isinstance(operand, fx.Node):
        return
    yield operand
    term = b.view.see(operand)
    inner = term.args if term is not None and term.word in _LINEAR else ()
    if term is not None and term.word in ("mul", "div"):
        inner = [a for a, factor in zip(term.args, term.args[::-1]) if _is_factor(b, factor)]
    for part in inner:
        yield from _parts(b, part)


def _is_factor(b: Bound, operand: object) -> bool:
    shape = b.facts.shape(operand)
    return not isinstance(operand, (fx.Node, Term)) or (shape is not None and len(shape) < 2)


def _leads(source: fx.Node, target: fx.Node) -> bool:
    """Whether `target` is computed from `source`, at whatever distance."""
    found, waiting = {target}, [target]
    while waiting:
        for node in waiting.pop().all_input_nodes:
            if node is source:
                return True
            if node not in found and source < node:
                found.add(node)
                waiting.append(node)
    return False
