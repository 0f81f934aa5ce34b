"""How many rewrites are let through, to bisect a wrong result.

FXFUSE_FUEL=n lets only the first n of the process through; `limit(n)` those inside a `with`. A graph
is rewritten from its outputs to its inputs, so its last site counts first.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from fxfuse.errors import BadOption

_text: str | None = None
_left: int | None = None
# Not a context variable: autograd compiles backward graphs in threads of its own.
_limits: list[int] = []


@contextlib.contextmanager
def limit(rewrites: int) -> Iterator[None]:
    """Let only the first `rewrites` inside the `with` through, whatever FXFUSE_FUEL says."""
    _limits.append(rewrites)
    try:
        yield
    finally:
        _limits.pop()


def left() -> int | None:
    """How many more rewrites are let through; None for all.

    Raises BadOption if FXFUSE_FUEL is no number.
    """
    if _limits:
        return max(_limits[-1], 0)
    _read()
    return None if _left is None else max(_left, 0)


def spend() -> bool:
    """Use up one unit; False when none is left. Raises BadOption if FXFUSE_FUEL is no number."""
    global _left
    if left() is None:
        return True
    if _limits:
        _limits[-1] -= 1
        return _limits[-1] >= 0
    _left -= 1
    return _left >= 0


def _read() -> None:
    global _text, _left
    text = os.environ.get("FXFUSE_FUEL")
    if text != _text:
        if text and not text.isdecimal():
            raise BadOption(option="FXFUSE_FUEL", value=text, expected="give a whole number")
        _text, _left = text, int(text) if text else None
