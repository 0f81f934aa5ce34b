"""Half-precision steps whose roundings a compiler keeps.

Inductor's CPU code computes bf16 steps in fp32 and drops the casts between them. So in formulas
that it is to see a value is rounded to bf16 by fp32 arithmetic, which nothing drops, and which
takes a vector unit a third of what a cast to bf16 and back does. Everywhere else it is cast.
"""

from __future__ import annotations

import torch
from torch import Tensor

# fp32 has 24 bits of significand, bf16 has 8.
_SPLIT = float((1 << 16) + 1)


def rounded(t: Tensor, dtype: torch.dtype | None, *, bounded: bool = False) -> Tensor:
    """`t.to(dtype)`, or t where dtype is None.

    bounded: whether finite values of t stay below 2 ** 112, and infinite ones need not be told from
    NaN.
    """
    if dtype is None:
        return t
    if dtype is torch.bfloat16 and t.dtype is torch.float32 and is_traced(t):
        t = _nearest_bf16(t, bounded)
    return t.to(dtype)


def product(a: Tensor, b: Tensor, *, bounded: bool = False) -> Tensor:
    """a * b, `rounded` to what they promote to."""
    if not (a.dtype == b.dtype == torch.bfloat16 and is_traced(a) and is_traced(b)):
        return a * b
    return rounded(a.to(torch.float32) * b.to(torch.float32), torch.bfloat16, bounded=bounded)


def as_stored(t: Tensor) -> Tensor:
    """t, which was computed just before, with its rounding even where it is read unstored.

    In fp32 if it is bf16; infinite values may become NaN.
    """
    if t.dtype is torch.bfloat16 and is_traced(t):
        return _nearest_bf16(t.to(torch.float32), bounded=True)
    return t


def readings(t: Tensor, dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    """t for two readers that compute on in t's dtype, where an op chain stored it in `dtype`.

    So that a compiler for CPUs may store it so as well, it is rounded there. It would drop a cast
    and its inverse, but not on either side of a view; and it stores what two views are made of.
    """
    if dtype is None or dtype.itemsize >= t.dtype.itemsize or t.device.type != "cpu":
        return t, t
    stored = t.to(dtype)
    return (
        stored.unsqueeze(0).to(t.dtype).squeeze(0),
        stored.unsqueeze(-1).to(t.dtype).squeeze(-1),
    )


def is_traced(t: Tensor) -> bool:
    """Whether a compiler for CPUs is to see what is done with t, and autograd is not."""
    if t.device.type != "cpu" or (torch.is_grad_enabled() and t.requires_grad):
        return False
    return torch.compiler.is_compiling() or torch._guards.TracingContext.try_get() is not None


def _nearest_bf16(t: Tensor, bounded: bool) -> Tensor:
    """The bf16 value that is nearest to t, ties to even, in fp32.

    Veltkamp's splitting of a float, https://doi.org/10.1007/BF01397083 (Dekker, 1971). It overflows
    above 2 ** 112: unless bounded, what is as large (infinities too) stays as it is.
    """
    far = t * _SPLIT
    near = far + (t - far)
    return near if bounded else torch.where(near == near, near, t)
