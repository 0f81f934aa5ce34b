"""How many rewrites are let through, to bisect a wrong result.

FXFUSE_FUEL=n lets only the first n of the process through, `limit(n)` the first n inside a `with`.
A graph is rewritten from its outputs to its inputs, so its last site counts first.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from fxfuse.errors import BadOption
from fxfuse.report import Match


@dataclass
class Limit:
    """At most `most` rewrites; through: the sites that were let through, in order."""

    most: int
    through: list[Sequence[Match]] = field(default_factory=list)

    @property
    def left(self) -> int:
        return self.most - len(self.through)


_text: str | None = None
_left: int | None = None
# Not a context variable: autograd compiles backward graphs in threads of its own.
_limits: list[Limit] = []


@contextlib.contextmanager
def limit(most: int) -> Iterator[Limit]:
    """Let only the first `most` rewrites inside the `with` through, whatever FXFUSE_FUEL says."""
    _limits.append(Limit(most))
    try:
        yield _limits[-1]
    finally:
        _limits.pop()


def left() -> int | None:
    """How many more rewrites are let through; None for all.

    Raises BadOption if FXFUSE_FUEL is no number.
    """
    if _limits:
        return _limits[-1].left
    _read()
    return None if _left is None else max(_left, 0)


def spend(site: Sequence[Match]) -> bool:
    """Use up one unit; False when none is left. Raises BadOption if FXFUSE_FUEL is no number."""
    global _left
    rest = left()
    if rest == 0:
        return False
    if _limits:
        _limits[-1].through.append(site)
    elif rest is not None:
        _left -= 1
    return True


def _read() -> None:
    global _text, _left
    text = os.environ.get("FXFUSE_FUEL")
    if text != _text:
        if text and not text.isdecimal():
            raise BadOption(option="FXFUSE_FUEL", value=text, expected="give a whole number")
        _text, _left = text, int(text) if text else None
