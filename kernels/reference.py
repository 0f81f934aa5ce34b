"""The meaning of the norm ops: plain ATen formulas with every rounding written out.

Each function is what the op of the same name computes, on any device and dtype. The "inline" forms
of the ops trace these lines into the caller's graph, so they are also written for Inductor: one
pass over a row, reductions over the last dim, one cast at the end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fxfuse.kernels.rounding import as_stored, product, readings, rounded

HALVES = (torch.float16, torch.bfloat16)
# Rows that are added up in the compute dtype before their sums are added in fp64: the first of
# these that makes whole runs. In longer runs the error grows, in shorter ones what is kept of them.
RUNS = (128, 64, 32)
# Rows of so many columns are added up in runs of columns.
WIDE, RUN = 1 << 15, 1 << 10


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
    """`eps`, or for None what `torch.nn.functional.rms_norm` takes: fp32's epsilon for halves."""
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
    rstd_dtype: torch.dtype | None = None,
    scale_dtype: torch.dtype | None = None,
    unit_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    keepdim: bool = False,
    summed: bool = False,
    inner: bool = False,
) -> tuple[Tensor, Tensor]:
    """RMSNorm of the last dim of `h` [..., N].

    `compute_dtype` is the dtype of the statistics, `rstd_dtype` the dtype that rstd is rounded to
    before it scales, `scale_dtype` what rstd times the weight is rounded to where both scale as
    one, `unit_dtype` the dtype that the normalised value is rounded to before the weight,
    `out_dtype` that of y; None leaves what promotion gives.
    summed: whether h is a sum that was made just before, so that its rounding must be kept.
    inner: whether the caller computes on with y, so that its own rounding must be kept as well.
    Returns y [..., N] and rstd [...], with `keepdim` [..., 1], in `compute_dtype`: a compiler then
    sees that `norm_gradient` begins with a product that is there already, and what to save for it.
    Source: https://arxiv.org/abs/1910.07467
    """
    s = (as_stored(h) if summed else h).to(compute_dtype)
    rstd = inverse_rms(s, eps)
    if scale_dtype is not None and weight is not None:
        factor = rounded(rstd * scale(weight, weight_offset, s.dtype), scale_dtype, bounded=True)
        y = rounded(s * factor.to(s.dtype), out_dtype, bounded=True)
        return y, rstd if keepdim else rstd.squeeze(-1)
    y = rounded(s * rounded(rstd, rstd_dtype).to(s.dtype), unit_dtype, bounded=True)
    if weight is not None:
        factor = weight if weight_offset == 0 else weight_offset + weight.to(compute_dtype)
        last = not inner and out_dtype in (None, torch.promote_types(y.dtype, factor.dtype))
        y = y * factor if last else product(y, factor, bounded=True)
    if inner:
        y = rounded(y, out_dtype, bounded=True)
    elif out_dtype is not None:
        y = y.to(out_dtype)
    return y, rstd if keepdim else rstd.squeeze(-1)


def inverse_rms(s: Tensor, eps: float | None) -> Tensor:
    """rstd [..., 1] of the rows of `s` [..., N], in the dtype of `s`."""
    squares = s.pow(2)
    if s.device.type == "cpu" and _known(s.shape[-1] >= WIDE) and _known(s.shape[-1] % RUN == 0):
        # Inductor's CPU code adds up a row in one vector, which loses bits of long ones.
        squares = squares.view(*s.shape[:-1], s.shape[-1] // RUN, RUN).mean(-1)
    return torch.rsqrt(squares.mean(-1, keepdim=True) + resolve_eps(eps, s.dtype))


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, **attributes
) -> tuple[Tensor, Tensor, Tensor]:
    """`rms_norm` of h = x + residual, with h rounded to its own (promoted) dtype first.

    Takes the keyword arguments of `rms_norm`. Returns y [..., N], h [..., N], rstd [...].
    """
    h = x + residual
    y, rstd = rms_norm(h, weight, summed=True, **attributes)
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
    dy_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The gradient of `rms_norm` at `h` [..., N], plus `dres`, the gradient that h gets elsewhere.

    `dys` are gradients of y [..., N] that are still to be summed; the sum is rounded to their dtype
    after each add, as autograd does. All else is computed in the dtype of `rstd` [...], at least in
    fp32. rstd may also be [..., 1]. Returns dh in h's dtype, and dweight [N] in the weight's, or
    None where it is not needed.
    """
    dh, dweight = norm_gradient(
        dys,
        h,
        weight,
        rstd,
        dres,
        weight_offset=weight_offset,
        need_dweight=need_dweight,
        dy_dtype=dy_dtype,
    )
    return dh.to(h.dtype), dweight


def norm_gradient(
    dys: Sequence[Tensor],
    h: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    dres: Tensor | None,
    *,
    weight_offset: float,
    need_dweight: bool,
    dy_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`rms_norm_bwd` before dh is rounded to h's dtype.

    dy_dtype: what an op chain would round a single dy to that was computed just before.
    """
    wide = torch.promote_types(rstd.dtype, torch.float32)
    dy, dy_again = readings(sum_gradients(dys).to(wide), dy_dtype)
    rstd = per_row(rstd, h).to(wide)
    h = h.to(wide)
    x_hat = h * rstd
    # First, so that a compiler need not keep dy beyond dh, which may take its memory.
    dweight = None
    if need_dweight and weight is not None:
        dweight = sum_rows(dy * x_hat).to(weight.dtype)
    g = dy_again if weight is None else dy_again * scale(weight, weight_offset, wide)
    # h and not x_hat once more: then h is what a compiler saves, and all its readers read that.
    dh = (g - h * (rstd * (x_hat * g).mean(-1, keepdim=True))) * rstd
    if dres is not None:
        dh = dh + dres.to(wide)
    return dh, dweight


def per_row(rstd: Tensor, h: Tensor) -> Tensor:
    """rstd [...] or [..., 1] as [..., 1], for h [..., N]."""
    return rstd if rstd.dim() == h.dim() else rstd.unsqueeze(-1)


def sum_gradients(dys: Sequence[Tensor]) -> Tensor:
    """The sum of `dys` from left to right, rounded to their dtype after each add."""
    total = dys[0]
    for dy in dys[1:]:
        total = total + dy
    return total


def at_most(count: int, dys: Sequence[Tensor]) -> Sequence[Tensor]:
    """`dys` with the first of them added up, so that `count` are left."""
    spare = len(dys) - count
    return [sum_gradients(dys[: spare + 1]), *dys[spare + 1 :]] if spare > 0 else dys


def sum_rows(t: Tensor) -> Tensor:
    """The sum [N] of the rows of `t` [..., N], with the error of a tree of additions at most.

    Inductor's CPU code adds one row after the other, one strip of columns at a time. Short runs of
    rows suit the cache better, and their sums are few enough to be added in fp64. Where the rows
    are not known to make whole runs, all of them are. On a GPU Inductor makes a tree of its own.
    """
    count, columns = math.prod(t.shape[:-1]), t.shape[-1]
    rows = t.reshape(count, columns)
    if t.device.type != "cpu":
        return rows.sum(0)
    run = next((run for run in RUNS if _known(count % run == 0)), None)
    if run is not None:
        rows = rows.view(count // run, run, columns).sum(1)
    return rows.sum(0, dtype=torch.float64).to(t.dtype)


def _known(condition: bool | torch.SymBool) -> bool:
    """Whether a condition on sizes holds for all of them, without a new guard on any."""
    if isinstance(condition, bool) and not torch.compiler.is_compiling():
        return condition
    # Half a second of imports, which a compiler has made already.
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)


def scale(weight: Tensor, weight_offset: float, dtype: torch.dtype) -> Tensor:
    """What a normalised row is multiplied by: the weight plus its offset, added in `dtype`."""
    weight = weight.to(dtype)
    return weight if weight_offset == 0 else weight + weight_offset
