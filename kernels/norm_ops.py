"""rms_norm, rms_norm_fork and add_rms_norm, with their inner ops and their gradient."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from types import ModuleType

import torch
from torch import Tensor

from fxfuse.kernels import compiled, layout, reference
from fxfuse.kernels.registration import (
    SIDES,
    check_sides,
    define_inner,
    define_outer,
    fresh,
    interpreted,
    must_be_plain,
    needs_grad,
    one_value_per_column,
    or_empty,
)

_ROUNDING = (
    "float? eps, float weight_offset=0.0, "
    'str compute_dtype="float32", str rstd_dtype="", str scale_dtype="", '
    'str unit_dtype="", str out_dtype="", bool contiguous=False'
)


@dataclass(frozen=True)
class Rounding:
    """The attributes that say what a norm computes; `ops` explains them."""

    eps: float | None
    weight_offset: float = 0.0
    compute_dtype: str = "float32"
    rstd_dtype: str = ""
    scale_dtype: str = ""
    unit_dtype: str = ""
    out_dtype: str = ""
    contiguous: bool = False

    def resolve(self, h_dtype: torch.dtype) -> dict:
        """The keyword arguments of `reference.rms_norm` for an input of `h_dtype`."""
        return {
            "eps": self.eps,
            "weight_offset": self.weight_offset,
            "compute_dtype": reference.resolve_dtype(self.compute_dtype, h_dtype)
            or torch.promote_types(h_dtype, torch.float32),
            "rstd_dtype": reference.resolve_dtype(self.rstd_dtype, h_dtype),
            "scale_dtype": reference.resolve_dtype(self.scale_dtype, h_dtype),
            "unit_dtype": reference.resolve_dtype(self.unit_dtype, h_dtype),
            "out_dtype": reference.resolve_dtype(self.out_dtype, h_dtype),
        }


# ------------------------------------------------------------ outer ops


def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    *,
    forward: str = "kernel",
    backward: str = "kernel",
    dim: int = -1,
    **rounding,
) -> Tensor:
    """RMSNorm of the last dim of x [..., N] with weight [N] or None; returns y [..., N].

    dim: another dimension to normalise, of N values; the weight is then all along it, with sizes of
    1 behind, and perhaps before: [N, 1] for dim 1 of x [B, N, L].
    Gradients come in the dtypes of x and weight. Raises ValueError for an unknown attribute value.
    Source: https://arxiv.org/abs/1910.07467
    """
    sides = check_sides("rms_norm", forward, backward)
    if dim != -1:
        rows, vector = x.movedim(dim, -1), None if weight is None else weight.view(-1)
        y = rms_norm(rows, vector, forward=forward, backward=backward, **rounding)
        return fresh(y.movedim(-1, dim))
    attributes = Rounding(**rounding)
    if must_be_plain(x, weight) or not one_value_per_column(weight, x.shape):
        return _plain_norm(x, weight, attributes)[0]
    if needs_grad(x, weight):
        return _RMSNorm.apply(x, weight, attributes, *sides)
    return _forward(x, None, weight, attributes, forward)[0]


def rms_norm_fork(
    x: Tensor,
    weight: Tensor | None,
    *,
    forward: str = "kernel",
    backward: str = "kernel",
    **rounding,
) -> tuple[Tensor, Tensor]:
    """`rms_norm`, and x again: an alias for those who read x after the norm.

    The gradient of the alias is added inside the norm's backward kernel rather than after it.
    Returns y [..., N] and the alias, which must not be written to. Raises ValueError for an unknown
    attribute value.
    """
    sides = check_sides("rms_norm_fork", forward, backward)
    attributes = Rounding(**rounding)
    if must_be_plain(x, weight) or not one_value_per_column(weight, x.shape):
        return _plain_norm(x, weight, attributes)[0], x.view_as(x)
    if needs_grad(x):
        return _Fork.apply(x, weight, attributes, *sides)
    return rms_norm(x, weight, forward=forward, backward=backward, **rounding), x.view_as(x)


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    *,
    forward: str = "kernel",
    backward: str = "kernel",
    **rounding,
) -> tuple[Tensor, Tensor]:
    """RMSNorm of h = x + residual, which broadcast and promote; returns y and h [..., N].

    h is rounded to its own dtype before it is normalised. Gradients come in the dtypes and shapes
    of x, residual and weight [N]. Raises ValueError for an unknown attribute value.
    """
    sides = check_sides("add_rms_norm", forward, backward)
    attributes = Rounding(**rounding)
    columns = (x if x.dim() >= residual.dim() else residual).shape[-1:]
    if must_be_plain(x, residual, weight) or not one_value_per_column(weight, columns):
        h = x + residual
        return _plain_norm(h, weight, attributes)[0], h
    if needs_grad(x, residual, weight):
        return _AddRMSNorm.apply(x, residual, weight, attributes, *sides)
    return _forward(x, residual, weight, attributes, forward)[:2]


# ------------------------------------------------------------ the gradient


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, attributes, forward, backward):
        y, _, rstd = _forward(x, None, weight, attributes, forward, backward == "inline")
        ctx.save_for_backward(x, weight, rstd)
        ctx.attributes, ctx.side = attributes, backward
        ctx.set_materialize_grads(False)
        return y

    @staticmethod
    def backward(ctx, dy):
        need_dx, need_dweight, *_ = ctx.needs_input_grad
        if dy is None:
            return (None,) * 5
        dx, dweight = _backward(ctx, dy, None, need_dweight)
        return (dx if need_dx else None), dweight, None, None, None


class _Fork(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, attributes, forward, backward):
        return _RMSNorm.forward(ctx, x, weight, attributes, forward, backward), x.view_as(x)

    @staticmethod
    def backward(ctx, dy, dres):
        need_dx, need_dweight, *_ = ctx.needs_input_grad
        if dy is None:
            return dres, None, None, None, None
        dx, dweight = _backward(ctx, dy, dres, need_dweight)
        return (dx if need_dx else None), dweight, None, None, None


class _AddRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, weight, attributes, forward, backward):
        y, h, rstd = _forward(x, residual, weight, attributes, forward, backward == "inline")
        if not any(ctx.needs_input_grad[:2]):
            ctx.mark_non_differentiable(h)
        ctx.save_for_backward(h, weight, rstd)
        ctx.attributes, ctx.side = attributes, backward
        ctx.operands = [(t.shape, t.dtype) for t in (x, residual)]
        ctx.set_materialize_grads(False)
        return y, h

    @staticmethod
    def backward(ctx, dy, dres):
        *need_operands, need_dweight = ctx.needs_input_grad[:3]
        if dy is None:
            dh, dweight = dres, None
        else:
            dh, dweight = _backward(ctx, dy, dres, need_dweight)
        grads = [
            _reduce_to(dh, *operand) if need else None
            for operand, need in zip(ctx.operands, need_operands)
        ]
        return *grads, dweight, None, None, None


def _backward(
    ctx, dy: Tensor, dres: Tensor | None, need_dweight: bool
) -> tuple[Tensor, Tensor | None]:
    h, weight, rstd = ctx.saved_tensors
    settings = {"weight_offset": ctx.attributes.weight_offset, "need_dweight": need_dweight}
    if torch.is_grad_enabled():
        # The gradient will be differentiated again: let autograd see how it depends on h.
        compute_dtype = ctx.attributes.resolve(h.dtype)["compute_dtype"]
        rstd = reference.inverse_rms(h.to(compute_dtype), ctx.attributes.eps).squeeze(-1)
        return reference.rms_norm_bwd([dy], h, weight, rstd, dres, **settings)
    if ctx.side == "inline":
        return reference.rms_norm_bwd([dy], h, weight, rstd, dres, **settings)
    dh, dweight = torch.ops.fxfuse.rms_norm_bwd.default([dy], h, weight, rstd, dres, **settings)
    return dh, (dweight if need_dweight else None)


def _reduce_to(dh: Tensor | None, shape: torch.Size, dtype: torch.dtype) -> Tensor | None:
    """`dh` as the gradient of an operand of the add, undoing its broadcast and promotion."""
    if dh is None:
        return None
    return dh.sum_to_size(shape).to(dtype)


def _forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    attributes: Rounding,
    side: str,
    keepdim: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """y, h and rstd by the inner op or by the plain formula; h is x where there is no residual.

    keepdim: of rstd, where it comes from the formula and only a formula reads it.
    """
    if side == "inline":
        h = x if residual is None else x + residual
        summed = residual is not None
        y, rstd = _plain_norm(h, weight, attributes, keepdim=keepdim, summed=summed)
        return y, h, rstd
    if residual is None:
        y, rstd = torch.ops.fxfuse.rms_norm_fwd.default(x, weight, **vars(attributes))
        return fresh(y), x, rstd
    op = torch.ops.fxfuse.add_rms_norm_fwd.default
    y, h, rstd = op(x, residual, weight, **vars(attributes))
    return fresh(y), fresh(h), rstd


def _plain_norm(
    h: Tensor, weight: Tensor | None, attributes: Rounding, **form: bool
) -> tuple[Tensor, Tensor]:
    """y and rstd by the plain formula; form: more keyword arguments of `reference.rms_norm`."""
    y, rstd = reference.rms_norm(h, weight, **attributes.resolve(h.dtype), **form)
    return (y.contiguous() if attributes.contiguous else y), rstd


# ------------------------------------------------------------ inner ops


def _forward_on(implementation):
    """The two forward ops over `implementation(x, residual, weight, attributes) -> y, h, rstd`."""

    def rms_norm_fwd(x, weight, **rounding):
        y, _, rstd = implementation(x, None, weight, Rounding(**rounding))
        return y, rstd

    def add_rms_norm_fwd(x, residual, weight, **rounding):
        return implementation(x, residual, weight, Rounding(**rounding))

    return {"rms_norm_fwd": rms_norm_fwd, "add_rms_norm_fwd": add_rms_norm_fwd}


def _formula_forward(x, residual, weight, attributes, formulas=reference):
    if residual is None:
        y, rstd = formulas.rms_norm(x, weight, **attributes.resolve(x.dtype))
        return y, None, rstd
    resolved = attributes.resolve(torch.result_type(x, residual))
    return formulas.add_rms_norm(x, residual, weight, **resolved)


def _plain_forward(x, residual, weight, attributes, formulas=reference):
    y, h, rstd = _formula_forward(x, residual, weight, attributes, formulas)
    h = None if h is None else layout.contiguous(h)
    return layout.contiguous(y), h, layout.contiguous(rstd)


def _cpu_forward(x, residual, weight, attributes):
    if interpreted():
        return _triton_forward(x, residual, weight, attributes)
    return _plain_forward(x, residual, weight, attributes, compiled)


def _triton_forward(x, residual, weight, attributes):
    launch = _launch()
    h_dtype = x.dtype if residual is None else torch.result_type(x, residual)
    resolved = attributes.resolve(h_dtype)
    compute_dtype = resolved.pop("compute_dtype")
    resolved["out_dtype"] = y_dtype(h_dtype, weight, attributes)
    resolved["eps"] = reference.resolve_eps(attributes.eps, compute_dtype)
    dtypes = [resolved[name] for name in ("rstd_dtype", "scale_dtype", "unit_dtype")]
    product = y_dtype(h_dtype, weight, replace(attributes, out_dtype=""))
    # the kernel rounds the product once, to out_dtype
    twice = product in reference.HALVES and product != resolved["out_dtype"]
    if (
        twice
        or resolved["out_dtype"] not in launch.DTYPES
        or launch.unfit(x, residual, weight, compute_dtype=compute_dtype, dtypes=dtypes)
    ):
        return _plain_forward(x, residual, weight, attributes)
    return launch.forward(x, residual, weight, **resolved)


def _fake_forward(x, residual, weight, attributes):
    h = x if residual is None else x + residual
    compute_dtype = attributes.resolve(h.dtype)["compute_dtype"]
    dtype = y_dtype(h.dtype, weight, attributes)
    y = h.new_empty(h.shape, dtype=dtype) if attributes.contiguous else layout.like(h, dtype)
    return y, h, layout.like_rows(h, compute_dtype)


def y_dtype(h_dtype: torch.dtype, weight: Tensor | None, attributes: Rounding) -> torch.dtype:
    """The dtype of y, by the promotion that the formula goes through."""
    resolved = attributes.resolve(h_dtype)
    dtype = resolved["unit_dtype"] or resolved["compute_dtype"]
    if weight is not None:
        other = weight.dtype if attributes.weight_offset == 0 else resolved["compute_dtype"]
        dtype = torch.promote_types(dtype, other)
    return resolved["out_dtype"] or dtype


def _formula_backward(dys, h, weight, rstd, dres, *, formulas=reference, **attributes):
    dh, dweight = formulas.rms_norm_bwd(dys, h, weight, rstd, dres, **attributes)
    return dh, or_empty(dweight, h, weight)


def _plain_backward(*operands, **attributes):
    dh, dweight = _formula_backward(*operands, **attributes)
    return layout.contiguous(dh), dweight


def _cpu_backward(dys, h, weight, rstd, dres, **attributes):
    if interpreted():
        return _triton_backward(dys, h, weight, rstd, dres, **attributes)
    return _plain_backward(dys, h, weight, rstd, dres, **attributes, formulas=compiled)


def _triton_backward(dys, h, weight, rstd, dres, *, weight_offset=0.0, need_dweight):
    launch = _launch()
    need_dweight = need_dweight and weight is not None
    attributes = {"weight_offset": weight_offset, "need_dweight": need_dweight}
    gradients = dys if dres is None else [*dys, dres]
    if any(t.dtype not in launch.DTYPES for t in gradients) or launch.unfit(
        h, None, weight, compute_dtype=rstd.dtype
    ):
        return _plain_backward(dys, h, weight, rstd, dres, **attributes)
    dys = reference.at_most(launch.MAX_GRADIENTS, dys)
    dh, dweight = launch.backward(dys, h, weight, rstd, dres, **attributes)
    return dh, or_empty(dweight, h, weight)


def _fake_backward(dys, h, weight, rstd, dres, *, weight_offset=0.0, need_dweight):
    dweight = None
    if need_dweight and weight is not None:
        dweight = weight.new_empty(weight.shape)
    return layout.like(h, h.dtype), or_empty(dweight, h, weight)


def _launch() -> ModuleType:
    # Triton is imported with it, so not before a kernel is wanted.
    from fxfuse.kernels import rms_norm_launch

    return rms_norm_launch


# ------------------------------------------------------------ registration


def _define_forward(schema: str) -> None:
    name = schema.partition("(")[0]
    laid_out = (
        functools.partial(layout.forward, run)
        for run in (_triton_forward, _cpu_forward, _plain_forward)
    )
    cuda, cpu, plain = (_forward_on(run)[name] for run in laid_out)
    batched, fake = (_forward_on(run)[name] for run in (_formula_forward, _fake_forward))
    define_inner(schema, cuda=cuda, cpu=cpu, plain=plain, batched=batched, fake=fake)


define_outer(
    f"rms_norm(Tensor x, Tensor? weight, *, {_ROUNDING}, {SIDES}, int dim=-1) -> Tensor", rms_norm
)
define_outer(
    f"rms_norm_fork(Tensor(a) x, Tensor? weight, *, {_ROUNDING}, {SIDES}) -> (Tensor, Tensor(a))",
    rms_norm_fork,
)
define_outer(
    f"add_rms_norm(Tensor x, Tensor residual, Tensor? weight, *, {_ROUNDING}, {SIDES}) "
    "-> (Tensor, Tensor)",
    add_rms_norm,
)
_define_forward(f"rms_norm_fwd(Tensor x, Tensor? weight, *, {_ROUNDING}) -> (Tensor, Tensor)")
_define_forward(
    f"add_rms_norm_fwd(Tensor x, Tensor residual, Tensor? weight, *, {_ROUNDING}) "
    "-> (Tensor, Tensor, Tensor)",
)
define_inner(
    "rms_norm_bwd(Tensor[] dys, Tensor h, Tensor? weight, Tensor rstd, Tensor? dres, *, "
    "float weight_offset=0.0, bool need_dweight) -> (Tensor, Tensor)",
    cuda=functools.partial(layout.backward, _triton_backward),
    cpu=functools.partial(layout.backward, _cpu_backward),
    plain=functools.partial(layout.backward, _plain_backward),
    batched=_formula_backward,
    fake=_fake_backward,
)
