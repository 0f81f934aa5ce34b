"""The meaning of the norm ops: plain ATen formulas with every rounding written out.

Each function is what the op of the same name computes, on any device and dtype. The "inline" forms of
the ops trace these lines into the caller's graph, so they are also written for Inductor: one pass over
a row, reductions over the last dim, one cast at the end.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

HALVES = (torch.float16, torch.bfloat16)


def resolve_dtype(name: str, input_dtype: torch.dtype) -> torch.dtype | None:
    """The dtype that an op's attribute names: "" is None, "input" is `input_dtype`.

    Raises ValueError when `name` is none of these and no torch dtype either.
    """
    if not name:
        return None
    if name == "input":
        return input_dtype
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(
            f'dtype {name!r} is not known: give "", "input" or a torch dtype such as "bfloat16"'
        )
    return dtype


def resolve_eps(eps: float | None, compute_dtype: torch.dtype) -> float:
    """`eps`, or what `torch.nn.functional.rms_norm` takes for None: fp32's epsilon for halves too."""
    if eps is not None:
        return eps
    wide = compute_dtype if compute_dtype not in HALVES else torch.float32
    return torch.finfo(wide).eps


def rms_norm(
    h: Tensor,
    weight: Tensor | None,
    *,
    eps: float | None,
    weight_offset: float = 0.0,
    compute_dtype: torch.dtype = torch.float32,
    unit_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """RMSNorm of the last dim of `h` [..., N].

    `compute_dtype` is the dtype of the statistics, `unit_dtype` the dtype that the normalised value is
    rounded to before the weight, `out_dtype` that of y; None leaves what promotion gives.
    Returns y [..., N] and rstd [...] in `compute_dtype`. Source: https://arxiv.org/abs/1910.07467
    """
    s = h.to(compute_dtype)
    mean_square = s.pow(2).mean(-1, keepdim=True)
    rstd = torch.rsqrt(mean_square + resolve_eps(eps, compute_dtype))
    y = s * rstd
    if unit_dtype is not None:
        y = y.to(unit_dtype)
    if weight is not None:
        y = y * (weight if weight_offset == 0 else weight_offset + weight.to(compute_dtype))
    if out_dtype is not None:
        y = y.to(out_dtype)
    return y, rstd.squeeze(-1)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, **attributes
) -> tuple[Tensor, Tensor, Tensor]:
    """`rms_norm` of h = x + residual, with h rounded to its own (promoted) dtype first.

    Takes the keyword arguments of `rms_norm`. Returns y [..., N], h [..., N], rstd [...].
    """
    h = x + residual
    y, rstd = rms_norm(h, weight, **attributes)
    return y, h, rstd


def rms_norm_bwd(
    dys: Sequence[Tensor],
    h: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    dres: Tensor | None,
    *,
    weight_offset: float = 0.0,
    need_dweight: bool,
) -> tuple[Tensor, Tensor | None]:
    """The gradient of `rms_norm` at `h` [..., N], plus `dres`, the gradient that h gets elsewhere.

    `dys` are gradients of y [..., N] that are still to be summed; the sum is rounded to their dtype after
    each add, as autograd does. All else is computed in the dtype of `rstd` [...], at least in fp32.
    Returns dh in h's dtype, and dweight [N] in the weight's dtype, or None where it is not needed.
    """
    wide = torch.promote_types(rstd.dtype, torch.float32)
    dy = sum_gradients(dys).to(wide)
    rstd = rstd.to(wide).unsqueeze(-1)
    x_hat = h.to(wide) * rstd
    g = dy if weight is None else dy * scale(weight, weight_offset, wide)
    dh = (g - x_hat * (x_hat * g).mean(-1, keepdim=True)) * rstd
    if dres is not None:
        dh = dh + dres.to(wide)
    dweight = None
    if need_dweight and weight is not None:
        dweight = (dy * x_hat).flatten(0, -2).sum(0).to(weight.dtype)
    return dh.to(h.dtype), dweight


def sum_gradients(dys: Sequence[Tensor]) -> Tensor:
    """The sum of `dys` from left to right, rounded to their dtype after each add."""
    total = dys[0]
    for dy in dys[1:]:
        total = total + dy
    return total


def scale(weight: Tensor, weight_offset: float, dtype: torch.dtype) -> Tensor:
    """What a normalised row is multiplied by: the weight plus its offset, added in `dtype`."""
    weight = weight.to(dtype)
    return weight if weight_offset == 0 else weight + weight_offset
