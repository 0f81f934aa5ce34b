"""The meaning of the gated ops: plain ATen formulas with every rounding written out.

As in `reference`, each function is what the op of the same name computes, and the "inline" forms of
the ops trace these lines. silu is computed in fp32 (fp64 for an fp64 gate) whatever the gate is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fxfuse.kernels import reference
from fxfuse.kernels.rounding import is_traced, product, rounded


def silu_gate(
    x: Tensor,
    gate: Tensor,
    *,
    sigmoid_dtype: torch.dtype | None = None,
    silu_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    swapped: bool = False,
    inner: bool = False,
) -> Tensor:
    """x * silu(gate), which broadcast and promote, or swapped: the first one decides how y lies.

    `sigmoid_dtype` and `silu_dtype` are dtypes that sigmoid(gate) and silu(gate) are rounded to,
    `out_dtype` that of y; None leaves fp32 and what promotion gives. inner: as of
    `reference.rms_norm`. Source: https://arxiv.org/abs/2002.05202
    """
    factor = silu(gate, sigmoid_dtype, silu_dtype, often=inner)
    first, second = (factor, x) if swapped else (x, factor)
    if inner:
        return rounded(product(first, second), out_dtype)
    y = first * second
    return y if out_dtype is None else y.to(out_dtype)


def silu_gate_bwd(dys: Sequence[Tensor], x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `silu_gate` for operands of one shape: dx in x's dtype, dgate in the gate's.

    `dys` are summed as in `reference.rms_norm_bwd`.
    """
    dy = reference.sum_gradients(dys)
    wide = _wide(dy, x, gate)
    dy = dy.to(wide)
    value, slope = silu_and_slope(gate, wide, often=False)
    return (dy * value).to(x.dtype), (dy * x.to(wide) * slope).to(gate.dtype)


def rms_norm_silu_gate(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    *,
    norm_dtype: torch.dtype | None = None,
    sigmoid_dtype: torch.dtype | None = None,
    silu_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    swapped: bool = False,
    **norm,
) -> tuple[Tensor, Tensor]:
    """`reference.rms_norm` of x [..., N], rounded to `norm_dtype`, times silu(gate) [..., N].

    Returns y [..., N] and rstd [...].
    """
    normed, rstd = reference.rms_norm(x, weight, out_dtype=norm_dtype, inner=True, **norm)
    y = silu_gate(
        normed,
        gate,
        sigmoid_dtype=sigmoid_dtype,
        silu_dtype=silu_dtype,
        out_dtype=out_dtype,
        swapped=swapped,
    )
    return y, rstd


def rms_norm_silu_gate_bwd(
    dys: Sequence[Tensor],
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    dres: Tensor | None,
    *,
    weight_offset: float = 0.0,
    need_dweight: bool,
    norm_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """dx [..., N] in x's dtype, plus `dres`; dgate in the gate's; dweight [N], or None.

    norm_dtype: the dtype that a compiler may store the norm's gradient in; see `rounding.readings`.
    """
    dy = reference.sum_gradients(dys)
    wide = _wide(dy, x, gate, rstd)
    dy = dy.to(wide)
    # Not the value that comes with the slope: Inductor keeps a product with an exp of its own.
    value, (_, slope) = silu(gate, None, None, often=True).to(wide), silu_and_slope(gate, wide)
    normed = x.to(wide) * reference.per_row(rstd, x).to(wide)
    if weight is not None:
        normed = normed * reference.scale(weight, weight_offset, wide)
    dx, dweight = reference.rms_norm_bwd(
        [dy * value],
        x,
        weight,
        rstd,
        dres,
        weight_offset=weight_offset,
        need_dweight=need_dweight,
        dy_dtype=norm_dtype,
    )
    return dx, (dy * normed * slope).to(gate.dtype), dweight


def silu_gate_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    *,
    group: int = 0,
    sigmoid_dtype: torch.dtype | None = None,
    silu_dtype: torch.dtype | None = None,
    gated_dtype: torch.dtype | None = None,
    swapped: bool = False,
    **norm,
) -> tuple[Tensor, Tensor]:
    """`reference.rms_norm` of x * silu(gate) [..., N], rounded to `gated_dtype`.

    Each run of `group` columns is a row of its own for the norm; 0 stands for all N. The weight has
    all N. Returns y [..., N] and rstd [..., N / group].
    """
    gated = silu_gate(
        x,
        gate,
        sigmoid_dtype=sigmoid_dtype,
        silu_dtype=silu_dtype,
        out_dtype=gated_dtype,
        swapped=swapped,
        inner=True,
    )
    y, rstd = reference.rms_norm(grouped(gated, group), grouped(weight, group), **norm)
    return y.reshape(gated.shape), rstd


def silu_gate_rms_norm_bwd(
    dys: Sequence[Tensor],
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    *,
    group: int = 0,
    sigmoid_dtype: torch.dtype | None = None,
    silu_dtype: torch.dtype | None = None,
    gated_dtype: torch.dtype | None = None,
    weight_offset: float = 0.0,
    need_dweight: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """dx [..., N] in x's dtype, dgate in the gate's; dweight [N] in the weight's, or None.

    The dtypes are those of the forward: `rstd` is of the product as it was rounded there, and with
    another product the parts of dx would not cancel.
    """
    dy = reference.sum_gradients(dys)
    wide = _wide(dy, x, gate, rstd)
    dy = dy.to(wide)
    # As above; and `gated` is made of the same value.
    value, (_, slope) = silu(gate, None, None, often=True).to(wide), silu_and_slope(gate, wide)
    dtypes = {"sigmoid_dtype": sigmoid_dtype, "silu_dtype": silu_dtype, "out_dtype": gated_dtype}
    gated = silu_gate(x, gate, **dtypes, inner=True)
    gated = grouped(gated.to(wide), group)
    rstd = reference.per_row(rstd, gated).to(wide)
    x_hat = gated * rstd
    dweight = None  # first, as in `reference.norm_gradient`
    if need_dweight and weight is not None:
        dweight = reference.sum_rows(dy * x_hat.reshape(dy.shape)).to(weight.dtype)
    g = dy if weight is None else dy * reference.scale(weight, weight_offset, wide)
    g = grouped(g, group)
    dgated = g - x_hat * (x_hat * g).mean(-1, keepdim=True)
    dgated = (dgated * rstd).reshape(dy.shape)
    return (dgated * value).to(x.dtype), (dgated * x.to(wide) * slope).to(gate.dtype), dweight


def silu(
    gate: Tensor,
    sigmoid_dtype: torch.dtype | None,
    silu_dtype: torch.dtype | None,
    often: bool = False,
) -> Tensor:
    """silu(gate) in at least fp32, rounded where the dtypes say so.

    often: whether more than one loop reads what is made of it. Inductor then keeps a value with an
    exp in it, but computes one with a power of two again each time.
    """
    wide = gate.to(_wide(gate))
    if sigmoid_dtype is not None:
        share = rounded(torch.sigmoid(wide), sigmoid_dtype, bounded=True)
        value = wide * share.to(wide.dtype)
    elif often or not _takes_powers_of_two(gate):
        value = torch.nn.functional.silu(wide)
    else:
        value = wide / _one_plus_exp_of_minus(wide)
    return rounded(value, silu_dtype)


def silu_and_slope(gate: Tensor, dtype: torch.dtype, often: bool = True) -> tuple[Tensor, Tensor]:
    """silu(gate), as `silu` computes it, and its derivative, in `dtype`; often: as of `silu`."""
    wide = gate.to(_wide(gate))
    if often or not _takes_powers_of_two(gate):
        share = torch.sigmoid(wide)
    else:
        share = 1 / _one_plus_exp_of_minus(wide)
    # In fp64 a last bit of fp32 shows: there it has to be the very value of the forward.
    value = wide * share if dtype == wide.dtype else torch.nn.functional.silu(wide)
    return value.to(dtype), (share * (1 + wide * (1 - share))).to(dtype)


def _takes_powers_of_two(gate: Tensor) -> bool:
    return gate.dtype in reference.HALVES and is_traced(gate)


def _one_plus_exp_of_minus(t: Tensor) -> Tensor:
    """1 + exp(-t) by exp2: a quarter less work for a CPU, and exact enough for a half."""
    return 1 + torch.exp2(t * -math.log2(math.e))


def grouped(t: Tensor | None, group: int) -> Tensor | None:
    """`t` [..., N] as [..., N / group, group]; a group of 0 stands for all N."""
    if t is None:
        return None
    columns = t.shape[-1]
    # Not unflatten (nor flatten): torch.autograd.grad(is_grads_batched=True) has no rule for it.
    runs = (columns // group, group) if group else (1, columns)
    return t.view(*t.shape[:-1], *runs)


def _wide(*tensors: Tensor) -> torch.dtype:
    dtype = torch.float32
    for t in tensors:
        dtype = torch.promote_types(dtype, t.dtype)
    return dtype
