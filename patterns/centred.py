"""A tensor less its mean: what a LayerNorm normalises."""

from __future__ import annotations

from fxfuse.match import View, behind_casts

CENTRED = "what it normalises has its mean taken away: that is a LayerNorm"


def is_centred(view: View, operand: object) -> bool:
    """Whether a tensor is another one less its mean."""
    term = view.see(behind_casts(view, operand))
    if term is None or term.word != "sub":
        return False
    mean = view.see(behind_casts(view, term.args[1]))
    if mean is None or mean.word != "mean":
        return False
    return behind_casts(view, mean.args[0]) is behind_casts(view, term.args[0])
