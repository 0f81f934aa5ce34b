"""When Inductor makes one pass over the rows of a norm's backward, and when two.

The gradients of the rows and the sum for the weight's gradient go in different directions. Inductor
folds them into one kernel (`MixOrderReduction.can_fuse`) behind gates that are read in the sources
of torch 2.10 to 2.14, where they are the same. It does not fold with a C++ wrapper either. Later
versions may fold without the gates on the ratio of rows and columns (pull requests 188660, 186370).
"""

from __future__ import annotations

WIDEST = 16384
GATES = (
    (lambda rows, columns: rows < 4096, "fewer than 4096 rows"),
    (lambda rows, columns: rows == columns, "as many rows as columns"),
    (lambda rows, columns: rows < 2 * columns, "fewer rows than 2 x columns"),
    (lambda rows, columns: rows * columns < 5 << 20, "fewer than 5 Mi elements"),
)


def gates(rows: int | None, columns: int | None) -> list[str | None]:
    """What may keep Inductor from one pass, in words; None is the case that nothing does.

    Where the rows are not known there are two cases; a width that is not known is never folded.
    """
    if columns is None:
        return ["a width that is not known"]
    if columns > WIDEST:
        return [f"rows wider than {WIDEST}"]
    if rows is None:
        return [None, "where the rows are few"]
    return [next((text for stops, text in GATES if stops(rows, columns)), None)]
