"""The meaning of `rms_norm_add_rms_norm`: a norm, a residual add, and the norm of the sum."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fxfuse.kernels import reference


def rms_norm_add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight1: Tensor | None,
    weight2: Tensor | None,
    *,
    eps1: float | None,
    weight_offset1: float = 0.0,
    compute_dtype1: torch.dtype = torch.float32,
    unit_dtype1: torch.dtype | None = None,
    norm_dtype1: torch.dtype | None = None,
    eps2: float | None,
    weight_offset2: float = 0.0,
    compute_dtype2: torch.dtype = torch.float32,
    unit_dtype2: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    swapped: bool = False,
    keepdim: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """h = residual + rms_norm(x; weight1), y = rms_norm(h; weight2); all [..., N].

    swapped: the norm is the first operand of the add, and so decides how h lies.
    The other attributes are those of `reference.rms_norm`, for each of the two norms.
    Returns y, h, and the rstd [...] of x and of h.
    """
    normed, rstd1 = reference.rms_norm(
        x,
        weight1,
        eps=eps1,
        weight_offset=weight_offset1,
        compute_dtype=compute_dtype1,
        unit_dtype=unit_dtype1,
        out_dtype=norm_dtype1,
        inner=True,
        keepdim=keepdim,
    )
    h = normed + residual if swapped else residual + normed
    y, rstd2 = reference.rms_norm(
        h,
        weight2,
        eps=eps2,
        weight_offset=weight_offset2,
        compute_dtype=compute_dtype2,
        unit_dtype=unit_dtype2,
        out_dtype=out_dtype,
        summed=True,
        keepdim=keepdim,
    )
    return y, h, rstd1, rstd2


def rms_norm_add_rms_norm_bwd(
    dys: Sequence[Tensor],
    x: Tensor,
    h: Tensor,
    weight1: Tensor | None,
    weight2: Tensor | None,
    rstd1: Tensor,
    rstd2: Tensor,
    dres: Tensor | None,
    *,
    weight_offset1: float = 0.0,
    weight_offset2: float = 0.0,
    need_dweight1: bool,
    need_dweight2: bool,
    by_steps: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """dx in x's dtype, dh in h's (the gradient of the residual too), dweight1 and dweight2 [N].

    `dys` are gradients of y, `dres` the one that h gets elsewhere. dh goes into the first norm's
    backward as it is, before it is rounded; by_steps: as a compiler may store it (see
    `rounding.readings`).
    """
    dh, dweight2 = reference.norm_gradient(
        dys, h, weight2, rstd2, dres, weight_offset=weight_offset2, need_dweight=need_dweight2
    )
    dx, dweight1 = reference.norm_gradient(
        [dh],
        x,
        weight1,
        rstd1,
        None,
        weight_offset=weight_offset1,
        need_dweight=need_dweight1,
        dy_dtype=h.dtype if by_steps else None,
    )
    return dx.to(x.dtype), dh.to(h.dtype), dweight1, dweight2
