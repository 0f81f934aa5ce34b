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
    first: dict,
    second: dict,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """h = residual + rms_norm(x; weight1), y = rms_norm(h; weight2); all [..., N].

    `first` and `second` are keyword arguments of `reference.rms_norm` for the two norms.
    Returns y, h, and the rstd [...] of x and of h.
    """
    normed, rstd1 = reference.rms_norm(x, weight1, **first)
    h = residual + normed
    y, rstd2 = reference.rms_norm(h, weight2, **second)
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
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """dx in x's dtype, dh in h's (the gradient of the residual too), dweight1 and dweight2 [N].

    `dys` are gradients of y, `dres` the one that h gets elsewhere. dh goes into the first norm's
    backward as it is, before it is rounded.
    """
    dh, dweight2 = reference.norm_gradient(
        dys, h, weight2, rstd2, dres, weight_offset=weight_offset2, need_dweight=need_dweight2
    )
    dx, dweight1 = reference.norm_gradient(
        [dh], x, weight1, rstd1, None, weight_offset=weight_offset1, need_dweight=need_dweight1
    )
    return dx.to(x.dtype), dh.to(h.dtype), dweight1, dweight2
