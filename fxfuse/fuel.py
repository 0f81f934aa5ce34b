"""FXFUSE_FUEL=n lets only the first n rewrites of the process through, to bisect a wrong result.

A graph is rewritten from its outputs to its inputs, so its last site counts first.
"""

from __future__ import annotations

import os

from fxfuse.errors import BadOption

_text: str | None = None
_left: int | None = None


def spend() -> bool:
    """Use up one unit; False when none is left. Raises BadOption if the variable is no number."""
    global _text, _left
    text = os.environ.get("FXFUSE_FUEL")
    if text != _text:
        if text and not text.isdecimal():
            raise BadOption(option="FXFUSE_FUEL", value=text, expected="give a whole number")
        _text, _left = text, int(text) if text else None
    if _left is None:
        return True
    _left -= 1
    return _left >= 0
