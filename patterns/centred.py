"""A tensor less its mean: what a LayerNorm normalises."""

from __future__ import annotations

from fxfuse.match import View

CENTRED = "what it normalises has its mean taken away: that is a LayerNorm"


def is_centred(view: View, operand: object) -> bool:
    """Whether a tensor is another one less its mean."""
    term = view.see(stripped(view, operand))
    if term is None or term.word != "sub":
        return False
    mean = view.see(stripped(view, term.args[1]))
    if mean is None or mean.word != "mean":
        return False
    return stripped(view, mean.args[0]) is stripped(view, term.args[0])


def stripped(view: View, operand: object) -> object:
    """An operand without casts, and what else leaves values as they are."""
    term = view.see(operand)
    while term is not None and term.word in ("cast", "same"):
        operand = term.args[0]
        term = view.see(operand)
    return operand
