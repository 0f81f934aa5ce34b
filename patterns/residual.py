"""Whether the sum of two tensors can be a residual stream."""

from __future__ import annotations

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
    ours, theirs = (_parts(b, b.get(name)) for name in (one, other))
    if any(node.op == "placeholder" for node in ours | theirs):
        return None
    if _leads(ours, theirs) or _leads(theirs, ours):
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


def _parts(b: Bound, operand: object) -> set[fx.Node]:
    """What an operand is the sum of, also behind factors that are the same for all rows."""
    found: set[fx.Node] = set()
    waiting = [operand]
    while waiting:
        part = waiting.pop()
        if isinstance(part, fx.Node) and part not in found:
            found.add(part)
            term = b.view.see(part)
            if term is not None and term.word in _LINEAR:
                waiting += term.args
            elif term is not None and term.word in ("mul", "div"):
                pairs = zip(term.args, term.args[::-1])
                waiting += [a for a, factor in pairs if _is_factor(b, factor)]
    return found


def _is_factor(b: Bound, operand: object) -> bool:
    shape = b.facts.shape(operand)
    return not isinstance(operand, (fx.Node, Term)) or (shape is not None and len(shape) < 2)


def _leads(sources: set[fx.Node], targets: set[fx.Node]) -> bool:
    """Whether one of `targets` is computed from one of `sources`, at whatever distance."""
    first = min(sources)
    found, waiting = set(targets), list(targets)
    while waiting:
        for node in waiting.pop().all_input_nodes:
            if node in sources:
                return True
            if node not in found and first < node:
                found.add(node)
                waiting.append(node)
    return False
