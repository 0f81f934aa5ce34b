"""rms_norm_add_rms_norm, with its inner ops and its gradient."""

from __future__ import annotations

import functools
from types import ModuleType

import torch
from torch import Tensor

from fxfuse.kernels import compiled, layout, reference, sandwich_reference
from fxfuse.kernels.norm_ops import Rounding, y_dtype
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

_ATTRIBUTES = (
    'float? eps1, float weight_offset1=0.0, str compute_dtype1="float32", str unit_dtype1="", '
    'str norm_dtype1="", float? eps2, float weight_offset2=0.0, str compute_dtype2="float32", '
    'str unit_dtype2="", str out_dtype="", bool contiguous1=False, bool contiguous=False, '
    "bool swapped=False"
)
_PLACES = ("contiguous1", "contiguous", "swapped")


# ------------------------------------------------------------ outer op


def rms_norm_add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight1: Tensor | None,
    weight2: Tensor | None,
    *,
    forward: str = "kernel",
    backward: str = "kernel",
    **attributes,
) -> tuple[Tensor, Tensor]:
    """h = residual + rms_norm(x), y = rms_norm(h); returns y and h [..., N].

    x and residual: [..., N]; weight1 and weight2, of the norm of x and of h: [N] or None.
    Attributes end in 1 or 2 for the norm that they are of; `norm_dtype1` is what the first is
    rounded to.
    Gradients come in the dtypes of the operands. Raises ValueError for an unknown attribute value.
    """
    check_sides("rms_norm_add_rms_norm", forward, backward)
    weights = (weight1, weight2)
    fits = x.shape == residual.shape and all(one_value_per_column(w, x.shape) for w in weights)
    if not fits or must_be_plain(x, residual, *weights):
        return _formula(x, residual, *weights, attributes)[:2]
    if needs_grad(x, residual, *weights):
        return _Sandwich.apply(attributes, forward, backward, x, residual, *weights)
    return _forward(x, residual, *weights, attributes, forward)[:2]


def _forward(x, residual, weight1, weight2, attributes, side, keepdim=False) -> tuple[Tensor, ...]:
    if side == "inline":
        return _formula(x, residual, weight1, weight2, attributes, keepdim=keepdim)
    op = torch.ops.fxfuse.rms_norm_add_rms_norm_fwd.default
    y, h, *rstds = op(x, residual, weight1, weight2, **attributes)
    return fresh(y), fresh(h), *rstds


class _Sandwich(torch.autograd.Function):
    @staticmethod
    def forward(ctx, attributes, forward, backward, x, residual, weight1, weight2):
        operands, keepdim = (x, residual, weight1, weight2), backward == "inline"
        y, h, rstd1, rstd2 = _forward(*operands, attributes, forward, keepdim)
        if not any(ctx.needs_input_grad[3:6]):  # only of the second weight
            ctx.mark_non_differentiable(h)
        ctx.save_for_backward(x, h, weight1, weight2, rstd1, rstd2)
        ctx.attributes, ctx.side, ctx.residual_dtype = attributes, backward, residual.dtype
        ctx.set_materialize_grads(False)
        return y, h

    @staticmethod
    def backward(ctx, dy, dres):
        needed = ctx.needs_input_grad[3:]
        if dy is None and dres is None:
            return (None,) * 7
        dx, dh, *dweights = _backward(ctx, dy, dres, *needed[2:])
        dh = dh.to(ctx.residual_dtype)
        found = (dx, dh, *dweights)
        return None, None, None, *(t if need else None for t, need in zip(found, needed))


def _backward(ctx, dy, dres, need_dweight1, need_dweight2) -> tuple[Tensor | None, ...]:
    x, h, weight1, weight2, rstd1, rstd2 = ctx.saved_tensors
    offsets = [ctx.attributes.get(f"weight_offset{i}", 0.0) for i in (1, 2)]
    again = torch.is_grad_enabled()
    if again:
        # The gradient will be differentiated again: let autograd see how it depends on x and h.
        rstd1, rstd2 = (
            reference.inverse_rms(t.to(norm.resolve(t.dtype)["compute_dtype"]), norm.eps).squeeze(
                -1
            )
            for t, norm in zip((x, h), _norms(ctx.attributes))
        )
    inline = again or ctx.side == "inline"
    if dy is None:  # the second norm is not used: what is left is the backward of the first
        backward = reference.rms_norm_bwd if inline else torch.ops.fxfuse.rms_norm_bwd.default
        first = {"weight_offset": offsets[0], "need_dweight": need_dweight1}
        dx, dweight1 = backward([dres], x, weight1, rstd1, None, **first)
        return dx, dres, dweight1, None
    backward = torch.ops.fxfuse.rms_norm_add_rms_norm_bwd.default
    if inline:
        backward = functools.partial(_gradient, by_steps=not again)
    return backward(
        [dy], x, h, weight1, weight2, rstd1, rstd2, dres,
        weight_offset1=offsets[0], weight_offset2=offsets[1],
        need_dweight1=need_dweight1, need_dweight2=need_dweight2,
    )  # fmt: skip


_gradient = sandwich_reference.rms_norm_add_rms_norm_bwd


# ------------------------------------------------------------ inner ops


def _norms(attributes: dict) -> tuple[Rounding, Rounding]:
    """What the two norms compute."""
    names = ("eps", "weight_offset", "compute_dtype", "unit_dtype")
    found = []
    for i, out in ((1, "norm_dtype1"), (2, "out_dtype")):
        given = {n: attributes[f"{n}{i}"] for n in names if f"{n}{i}" in attributes}
        found.append(Rounding(**given, out_dtype=attributes.get(out, "")))
    return tuple(found)


def _resolve(x, residual, weight1, attributes: dict) -> dict:
    """The keyword arguments of the formula for these operands."""
    first, second = _norms(attributes)
    h_dtype = torch.promote_types(residual.dtype, y_dtype(x.dtype, weight1, first))
    one, two = first.resolve(x.dtype), second.resolve(h_dtype)
    found = {"norm_dtype1": one.pop("out_dtype"), "out_dtype": two.pop("out_dtype")}
    found["swapped"] = attributes.get("swapped", False)
    for i, norm in ((1, one), (2, two)):
        norm.pop("rstd_dtype"), norm.pop("scale_dtype")  # these norms do not round them
        found |= {f"{name}{i}": value for name, value in norm.items()}
    return found


def _formula(
    x, residual, weight1, weight2, attributes, formulas: ModuleType = sandwich_reference, **shape
):
    """y, h, rstd1 and rstd2 by one of the `formulas`; shape: `keepdim` of both rstd."""
    resolved = _resolve(x, residual, weight1, attributes)
    if attributes.get("contiguous1"):
        x = x.contiguous()
    y, h, *rstds = formulas.rms_norm_add_rms_norm(
        x, residual, weight1, weight2, **resolved, **shape
    )
    return (y.contiguous() if attributes.get("contiguous") else y), h, *rstds


def _forward_by(run):
    def forward(x, residual, weight1, weight2, **attributes):
        return run(x, residual, weight1, weight2, attributes)

    return forward


def _plain_forward(x, residual, weight1, weight2, attributes, formulas=sandwich_reference):
    y, h, *rstds = _formula(x, residual, weight1, weight2, attributes, formulas)
    return *_fit(y, h, x, residual, attributes), *map(layout.contiguous, rstds)


def _fit(y: Tensor, h: Tensor, x: Tensor, residual: Tensor, attributes: dict) -> list[Tensor]:
    """y and h where the formula would put them."""
    places = (_layout_of(name, *(attributes.get(k, False) for k in _PLACES)) for name in "yh")
    return [
        layout.fit_to(layout.contiguous(t), place, x, residual) for t, place in zip((y, h), places)
    ]


@functools.cache
def _layout_of(name: str, *places: bool):
    """A formula whose result lies where y or h does; it is told apart by identity in a cache."""
    attributes = {"eps1": 0.0, "eps2": 0.0, **dict(zip(_PLACES, places))}

    def formula(x: Tensor, residual: Tensor) -> Tensor:
        return _formula(x, residual, None, None, attributes)["yh".index(name)]

    return formula


def _fake_forward(x, residual, weight1, weight2, attributes):
    y, h, *rstds = _formula(x, residual, weight1, weight2, attributes)
    return y, h, *(rstd.new_empty(rstd.shape) for rstd in rstds)


def _cpu_forward(x, residual, weight1, weight2, attributes):
    if interpreted():
        return _triton_forward(x, residual, weight1, weight2, attributes)
    return _plain_forward(x, residual, weight1, weight2, attributes, compiled)


def _triton_forward(x, residual, weight1, weight2, attributes):
    launch = _launch()
    resolved = _resolve(x, residual, weight1, attributes)
    resolved.pop("swapped")
    compute_dtypes = [resolved.pop(f"compute_dtype{i}") for i in (1, 2)]
    first, second = _norms(attributes)
    h_dtype = torch.promote_types(residual.dtype, y_dtype(x.dtype, weight1, first))
    resolved["out_dtype"] = y_dtype(h_dtype, weight2, second)
    for i, compute_dtype in enumerate(compute_dtypes, 1):
        resolved[f"eps{i}"] = reference.resolve_eps(resolved[f"eps{i}"], compute_dtype)
    reason = launch.unfit(
        {"input": x, "residual": residual},
        {"weight1": weight1, "weight2": weight2},
        compute_dtype=functools.reduce(torch.promote_types, compute_dtypes),
        dtypes=[h_dtype, *(v for name, v in resolved.items() if "_dtype" in name)],
    )
    if reason is not None:
        return _plain_forward(x, residual, weight1, weight2, attributes)
    y, h, *rstds = launch.rms_norm_add_rms_norm(
        x, residual, weight1, weight2, h_dtype=h_dtype, **resolved
    )
    return *_fit(y, h, x, residual, attributes), *rstds


def _launch() -> ModuleType:
    # Triton is imported with it, so not before a kernel is wanted.
    from fxfuse.kernels import sandwich_launch

    return sandwich_launch


def _backward_by(run):
    def backward(dys, x, h, weight1, weight2, rstd1, rstd2, dres, **attributes):
        found = run(dys, x, h, weight1, weight2, rstd1, rstd2, dres, **attributes)
        dx, dh, *dweights = found
        pairs = zip(dweights, (weight1, weight2))
        return dx, dh, *(or_empty(dweight, x, weight) for dweight, weight in pairs)

    return backward


def _plain_backward(dys, x, h, *more, formulas=sandwich_reference, **attributes):
    dx, dh, *dweights = formulas.rms_norm_add_rms_norm_bwd(dys, x, h, *more, **attributes)
    dx, dh = (layout.fit(layout.contiguous(d), t) for d, t in ((dx, x), (dh, h)))
    return dx, dh, *dweights


def _fake_backward(
    dys, x, h, weight1, weight2, rstd1, rstd2, dres, *, need_dweight1, need_dweight2, **offsets
):
    needed = zip((need_dweight1, need_dweight2), (weight1, weight2))
    dweights = [w.new_empty(w.shape) if need and w is not None else None for need, w in needed]
    return layout.like(x, x.dtype), layout.like(h, h.dtype), *dweights


def _cpu_backward(*operands, **attributes):
    if interpreted():
        return _triton_backward(*operands, **attributes)
    return _plain_backward(*operands, **attributes, formulas=compiled)


def _triton_backward(dys, x, h, weight1, weight2, rstd1, rstd2, dres, **attributes):
    launch = _launch()
    attributes = {"weight_offset1": 0.0, "weight_offset2": 0.0, **attributes}
    gradients = dys if dres is None else [*dys, dres]
    fits = all(t.dtype in launch.DTYPES for t in gradients) and not launch.unfit(
        {"input": x, "sum": h},
        {"weight1": weight1, "weight2": weight2},
        compute_dtype=torch.promote_types(rstd1.dtype, rstd2.dtype),
    )
    more = (x, h, weight1, weight2, rstd1, rstd2, dres)
    if not fits:
        return _plain_backward(dys, *more, **attributes)
    dys = reference.at_most(launch.MAX_GRADIENTS, dys)
    dx, dh, *dweights = launch.rms_norm_add_rms_norm_backward(dys, *more, **attributes)
    return layout.fit(dx, x), layout.fit(dh, h), *dweights


_OPERANDS = "Tensor x, Tensor residual, Tensor? weight1, Tensor? weight2"
define_outer(
    f"rms_norm_add_rms_norm({_OPERANDS}, *, {_ATTRIBUTES}, {SIDES}) -> (Tensor, Tensor)",
    rms_norm_add_rms_norm,
)
define_inner(
    f"rms_norm_add_rms_norm_fwd({_OPERANDS}, *, {_ATTRIBUTES}) -> (Tensor, Tensor, Tensor, Tensor)",
    cuda=_forward_by(_triton_forward),
    cpu=_forward_by(_cpu_forward),
    plain=_forward_by(_plain_forward),
    batched=_forward_by(_formula),
    fake=_forward_by(_fake_forward),
)
define_inner(
    "rms_norm_add_rms_norm_bwd(Tensor[] dys, Tensor x, Tensor h, Tensor? weight1, Tensor? weight2, "
    "Tensor rstd1, Tensor rstd2, Tensor? dres, *, float weight_offset1=0.0, "
    "float weight_offset2=0.0, bool need_dweight1, bool need_dweight2) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    cuda=_backward_by(_triton_backward),
    cpu=_backward_by(_cpu_backward),
    plain=_backward_by(_plain_backward),
    batched=_backward_by(_gradient),
    fake=_backward_by(_fake_backward),
)
