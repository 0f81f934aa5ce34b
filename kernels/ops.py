"""The ops of namespace `fxfuse`, and the one place that talks to torch.library.

The outer ops `rms_norm` and `add_rms_norm` own their gradient: they call an `autograd.Function`
over the inner ops `*_fwd` and `rms_norm_bwd`, which are opaque to compilers and run a Triton kernel
on a GPU. The attributes `forward` and `backward` choose for each side between that inner op
("kernel") and the plain ATen formula ("inline"), which a compiler fuses with the code around it.

Attributes of all of them: `eps` (None: the machine epsilon), `weight_offset` (1 for a zero-centred
weight), and where the graph rounds: `compute_dtype`, `unit_dtype` (the normalised value, before the
weight) and `out_dtype`, each "" (what promotion gives), "input" (the dtype of x, or of
x + residual) or the name of a torch dtype. y lies in memory as an elementwise op on h would put it,
or contiguously where `contiguous` says so; h lies where x + residual does.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fxfuse.kernels import compiled, layout, reference

_LIBRARY = torch.library.Library("fxfuse", "DEF")
# Inductor may choose the inputs' strides, but not their order: the last dim stays contiguous.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
_ROUNDING = (
    "float? eps, float weight_offset=0.0, "
    'str compute_dtype="float32", str unit_dtype="", str out_dtype="", '
    "bool contiguous=False"
)
_SIDES = 'str forward="kernel", str backward="kernel"'


@dataclass(frozen=True)
class Rounding:
    """The attributes that say what a norm computes; see the module's docstring."""

    eps: float | None
    weight_offset: float = 0.0
    compute_dtype: str = "float32"
    unit_dtype: str = ""
    out_dtype: str = ""
    contiguous: bool = False

    def resolve(self, h_dtype: torch.dtype) -> dict:
        """The keyword arguments of `reference.rms_norm` for an input of `h_dtype`."""
        return {
            "eps": self.eps,
            "weight_offset": self.weight_offset,
            "compute_dtype": reference.resolve_dtype(self.compute_dtype, h_dtype)
            or (torch.float64 if h_dtype == torch.float64 else torch.float32),
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
    **rounding,
) -> Tensor:
    """RMSNorm of the last dim of x [..., N] with weight [N] or None; returns y [..., N].

    Gradients come in the dtypes of x and weight. Raises ValueError for an unknown attribute value.
    Source: https://arxiv.org/abs/1910.07467
    """
    sides = _check_sides("rms_norm", forward, backward)
    attributes = Rounding(**rounding)
    if _must_be_plain((x, weight)) or not _one_value_per_column(weight, x.shape):
        return _plain_norm(x, weight, attributes)[0]
    if _needs_grad(x, weight):
        return _RMSNorm.apply(x, weight, attributes, *sides)
    return _forward(x, None, weight, attributes, forward)[0]


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
    sides = _check_sides("add_rms_norm", forward, backward)
    attributes = Rounding(**rounding)
    columns = (x if x.dim() >= residual.dim() else residual).shape[-1:]
    if _must_be_plain((x, residual, weight)) or not _one_value_per_column(weight, columns):
        h = x + residual
        return _plain_norm(h, weight, attributes)[0], h
    if _needs_grad(x, residual, weight):
        return _AddRMSNorm.apply(x, residual, weight, attributes, *sides)
    return _forward(x, residual, weight, attributes, forward)[:2]


def _check_sides(op: str, forward: str, backward: str) -> tuple[str, str]:
    for name, value in (("forward", forward), ("backward", backward)):
        if value not in ("kernel", "inline"):
            raise ValueError(f'fxfuse::{op}: {name} is {value!r}: give "kernel" or "inline"')
    return forward, backward


def _needs_grad(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _must_be_plain(tensors: Sequence[Tensor | None]) -> bool:
    """Whether something is at work that our Functions have no rule for, and ATen's ops have.

    That is vmap, jvp and torch.func.grad, dual tensors, tensor subclasses, and dtypes without a
    real gradient.
    """
    if torch._C._are_functorch_transforms_active():
        return True
    return any(t is not None and _is_special(t) for t in tensors)


def _is_special(t: Tensor) -> bool:
    return (
        not t.is_floating_point()
        or is_traceable_wrapper_subclass(t)
        or unpack_dual(t).tangent is not None
    )


def _one_value_per_column(weight: Tensor | None, shape: Sequence[int]) -> bool:
    return weight is None or (weight.dim() == 1 and weight.shape[0] == shape[-1])


# ------------------------------------------------------------ the gradient


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, attributes, forward, backward):
        y, _, rstd = _forward(x, None, weight, attributes, forward)
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


class _AddRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, weight, attributes, forward, backward):
        y, h, rstd = _forward(x, residual, weight, attributes, forward)
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
    x: Tensor, residual: Tensor | None, weight: Tensor | None, attributes: Rounding, side: str
) -> tuple[Tensor, Tensor, Tensor]:
    """y, h and rstd by the inner op or by the plain formula; h is x where there is no residual."""
    if side == "inline":
        h = x if residual is None else x + residual
        y, rstd = _plain_norm(h, weight, attributes)
        return y, h, rstd
    if residual is None:
        y, rstd = torch.ops.fxfuse.rms_norm_fwd.default(x, weight, **vars(attributes))
        return y, x, rstd
    return torch.ops.fxfuse.add_rms_norm_fwd.default(x, residual, weight, **vars(attributes))


def _plain_norm(h: Tensor, weight: Tensor | None, attributes: Rounding) -> tuple[Tensor, Tensor]:
    """y and rstd by the plain formula."""
    y, rstd = reference.rms_norm(h, weight, **attributes.resolve(h.dtype))
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
    if _interpreted():
        return _triton_forward(x, residual, weight, attributes)
    return _plain_forward(x, residual, weight, attributes, compiled)


def _triton_forward(x, residual, weight, attributes):
    launch = _launch()
    h_dtype = x.dtype if residual is None else torch.result_type(x, residual)
    resolved = attributes.resolve(h_dtype)
    compute_dtype = resolved.pop("compute_dtype")
    resolved["out_dtype"] = _y_dtype(h_dtype, weight, attributes)
    resolved["eps"] = reference.resolve_eps(attributes.eps, compute_dtype)
    unit_dtype = resolved["unit_dtype"]
    if resolved["out_dtype"] not in launch.DTYPES or launch.unfit(
        x, residual, weight, compute_dtype=compute_dtype, unit_dtype=unit_dtype
    ):
        return _plain_forward(x, residual, weight, attributes)
    return launch.forward(x, residual, weight, **resolved)


def _fake_forward(x, residual, weight, attributes):
    h = x if residual is None else x + residual
    compute_dtype = attributes.resolve(h.dtype)["compute_dtype"]
    y_dtype = _y_dtype(h.dtype, weight, attributes)
    y = h.new_empty(h.shape, dtype=y_dtype) if attributes.contiguous else layout.like(h, y_dtype)
    return y, h, layout.like_rows(h, compute_dtype)


def _y_dtype(h_dtype: torch.dtype, weight: Tensor | None, attributes: Rounding) -> torch.dtype:
    """The dtype of y, by the promotion that the formula goes through."""
    resolved = attributes.resolve(h_dtype)
    dtype = resolved["unit_dtype"] or resolved["compute_dtype"]
    if weight is not None:
        other = weight.dtype if attributes.weight_offset == 0 else resolved["compute_dtype"]
        dtype = torch.promote_types(dtype, other)
    return resolved["out_dtype"] or dtype


def _formula_backward(dys, h, weight, rstd, dres, *, formulas=reference, **attributes):
    dh, dweight = formulas.rms_norm_bwd(dys, h, weight, rstd, dres, **attributes)
    return dh, _or_empty(dweight, h, weight)


def _plain_backward(*operands, **attributes):
    dh, dweight = _formula_backward(*operands, **attributes)
    return layout.contiguous(dh), dweight


def _cpu_backward(dys, h, weight, rstd, dres, **attributes):
    if _interpreted():
        return _triton_backward(dys, h, weight, rstd, dres, **attributes)
    return _plain_backward(dys, h, weight, rstd, dres, **attributes, formulas=compiled)


def _triton_backward(dys, h, weight, rstd, dres, *, weight_offset=0.0, need_dweight):
    launch = _launch()
    need_dweight = need_dweight and weight is not None
    attributes = {"weight_offset": weight_offset, "need_dweight": need_dweight}
    gradients = dys if dres is None else [*dys, dres]
    if any(t.dtype not in launch.DTYPES for t in gradients) or launch.unfit(
        h, None, weight, compute_dtype=rstd.dtype, unit_dtype=None
    ):
        return _plain_backward(dys, h, weight, rstd, dres, **attributes)
    spare = len(dys) - launch.MAX_GRADIENTS
    if spare > 0:
        dys = [reference.sum_gradients(dys[: spare + 1]), *dys[spare + 1 :]]
    dh, dweight = launch.backward(dys, h, weight, rstd, dres, **attributes)
    return dh, _or_empty(dweight, h, weight)


def _fake_backward(dys, h, weight, rstd, dres, *, weight_offset=0.0, need_dweight):
    dweight = None
    if need_dweight and weight is not None:
        dweight = weight.new_empty(weight.shape)
    return layout.like(h, h.dtype), _or_empty(dweight, h, weight)


def _or_empty(dweight: Tensor | None, h: Tensor, weight: Tensor | None) -> Tensor:
    """`dweight`, or the empty tensor that stands for none: an op cannot return None."""
    if dweight is not None:
        return dweight
    return h.new_empty((0,), dtype=h.dtype if weight is None else weight.dtype)


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def _launch() -> ModuleType:
    # Triton is imported with it, so not before a kernel is wanted.
    from fxfuse.kernels import rms_norm_launch

    return rms_norm_launch


# ------------------------------------------------------------ registration


def _define_outer(name: str, inputs: str, returns: str, function) -> None:
    _LIBRARY.define(
        f"{name}({inputs}, *, {_ROUNDING}, {_SIDES}) -> {returns}",
        tags=torch.Tag.pt2_compliant_tag,
    )
    # Implicit: tracers see through to the inner op or the formula, with autograd off as well.
    _LIBRARY.impl(name, function, "CompositeImplicitAutograd")
    _LIBRARY.impl(name, function, "FuncTorchBatched")


def _define_inner(name: str, signature: str, cuda, cpu, plain, batched, fake) -> None:
    _LIBRARY.define(f"{name}{signature}", tags=_TAGS)
    _LIBRARY.impl(name, cuda, "CUDA")
    _LIBRARY.impl(name, cpu, "CPU")
    _LIBRARY.impl(name, plain, "CompositeExplicitAutograd")
    # torch.autograd.grad(is_grads_batched=True) runs under the older vmap, of key Batched.
    _LIBRARY.impl(name, batched, "Batched")
    _LIBRARY.impl(name, batched, "FuncTorchBatched")
    torch.library.register_fake(f"fxfuse::{name}", fake, lib=_LIBRARY)


def _define_forward(name: str, signature: str) -> None:
    laid_out = (
        functools.partial(layout.forward, run)
        for run in (_triton_forward, _cpu_forward, _plain_forward)
    )
    implementations = (*laid_out, _formula_forward, _fake_forward)
    _define_inner(name, signature, *(_forward_on(f)[name] for f in implementations))


_define_outer("rms_norm", "Tensor x, Tensor? weight", "Tensor", rms_norm)
_define_outer(
    "add_rms_norm",
    "Tensor x, Tensor residual, Tensor? weight",
    "(Tensor, Tensor)",
    add_rms_norm,
)
_define_forward("rms_norm_fwd", f"(Tensor x, Tensor? weight, *, {_ROUNDING}) -> (Tensor, Tensor)")
_define_forward(
    "add_rms_norm_fwd",
    f"(Tensor x, Tensor residual, Tensor? weight, *, {_ROUNDING}) -> (Tensor, Tensor, Tensor)",
)
_define_inner(
    "rms_norm_bwd",
    "(Tensor[] dys, Tensor h, Tensor? weight, Tensor rstd, Tensor? dres, *, "
    "float weight_offset=0.0, bool need_dweight) -> (Tensor, Tensor)",
    *(
        functools.partial(layout.backward, run)
        for run in (_triton_backward, _cpu_backward, _plain_backward)
    ),
    _formula_backward,
    _fake_backward,
)
