"""The figures that decided between a kernel and Inductor's code, as a part of a sentence."""

from __future__ import annotations

from fxfuse.costs import Cost


def figures(kernel: Cost, forms: list[Cost]) -> str:
    """Bytes an element of both; forms: all that Inductor's code may be."""
    if not kernel.apart and all((f.bytes, f.cached) == (kernel.bytes, 0) for f in forms):
        return f"{kernel.bytes} bytes an element either way{_noted(forms[0].note)}"
    own = f"{kernel.bytes} bytes an element"
    if kernel.apart:
        own = f"{kernel.bytes} + {kernel.apart} bytes an element, {kernel.note},"
    return f"{own} against Inductor's {' or '.join(map(_form, forms))}"


def _form(form: Cost) -> str:
    again = f" and {form.cached} again from the cache" if form.cached else ""
    return f"{form.bytes}{again}{_noted(form.note)}"


def _noted(note: str) -> str:
    return f" {note}" if note else ""


def beyond_bytes(wins: bool, cheaper: bool, known: bool) -> str:
    """What else decided. cheaper: whether the kernel is by its bytes and share of the bandwidth;
    known: whether the number of elements is.
    """
    if wins and not cheaper and known:
        return ", and at this size the kernel's fewer launches count"
    if cheaper and not wins:
        return ", but at this size the call of an op costs more"
    return ""
