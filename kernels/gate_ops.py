"""silu_gate, rms_norm_silu_gate and silu_gate_rms_norm, with their inner ops and their gradient."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from fxfuse.kernels import compiled, gate_reference, layout, reference
from fxfuse.kernels.registration import (
    SIDES,
    check_sides,
    define_inner,
    define_outer,
    differentiable_backward,
    fresh,
    interpreted,
    must_be_plain,
    needs_grad,
    one_value_per_column,
    or_empty,
)

_NORM = (
    'float? eps, float weight_offset=0.0, str compute_dtype="float32", str unit_dtype="", '
    "bool contiguous=False"
)
_GATE = 'str sigmoid_dtype="", str silu_dtype=""'
_ORDER = "bool swapped=False"
_PRODUCT = ("sigmoid_dtype", "silu_dtype", "gated_dtype")
_Weights = tuple[Tensor | None, ...]  # (weight,) of an op with a norm, () of silu_gate


@dataclass(frozen=True)
class _Op:
    """One gated op.

    attributes: its part of the schema. normed: whether it has a norm, and so weight and rstd;
    gate_first: whether the norm comes after the gate.
    """

    name: str
    attributes: str
    normed: bool = True
    gate_first: bool = False

    # ---- by formula ----

    def formula(
        self,
        x: Tensor,
        gate: Tensor,
        weights: _Weights,
        attributes: dict,
        formulas: ModuleType = gate_reference,
    ) -> tuple[Tensor, Tensor | None]:
        """y and rstd by one of the `formulas` for this op; rstd is None of an op without norm."""
        contiguous = attributes.get("contiguous", False)
        if contiguous and not self.gate_first:
            x = x.contiguous()
        compute = getattr(formulas, self.name)
        found = compute(x, gate, *weights, **self.resolve(x.dtype, gate.dtype, attributes))
        y, rstd = found if self.normed else (found, None)
        return (y.contiguous() if contiguous and self.gate_first else y), rstd

    def resolve(self, x_dtype: torch.dtype, gate_dtype: torch.dtype, attributes: dict) -> dict:
        """The keyword arguments of the formula for operands of these dtypes."""
        found = {**_defaults(self), **attributes}
        found.pop("contiguous", None)
        for name in [k for k in found if k.endswith("_dtype")]:
            found[name] = _dtype(found[name], x_dtype, gate_dtype)
        if "compute_dtype" in found and found["compute_dtype"] is None:
            normed = torch.promote_types(x_dtype, gate_dtype) if self.gate_first else x_dtype
            found["compute_dtype"] = torch.promote_types(normed, torch.float32)
        return found

    def may_be_derived(self, x: Tensor, gate: Tensor, weights: _Weights) -> bool:
        """Whether a compiler's own derivative of the formula is as exact as ours, and as fast.

        On a CPU roundings to a half are arithmetic, which autograd should not see; and there a
        compiler adds up the gradient of a weight row by row.
        """
        half = x.dtype in reference.HALVES or gate.dtype in reference.HALVES
        ours = half or needs_grad(*weights)
        return not (self.gate_first or (ours and x.device.type == "cpu"))

    # ---- inner ops ----

    def call_forward(self, x, gate, weights, attributes) -> tuple[Tensor, Tensor | None]:
        op = getattr(torch.ops.fxfuse, f"{self.name}_fwd").default
        found = op(x, gate, *weights, **attributes)
        return found if self.normed else (found, None)

    def call_backward(self, dys, x, gate, weights, rstd, dres, attributes) -> tuple[Tensor, ...]:
        op = getattr(torch.ops.fxfuse, f"{self.name}_bwd").default
        return op(dys, x, gate, *self.more(weights, rstd, dres), **attributes)

    def formula_backward(self, dys, x, gate, weights, rstd, dres, attributes, formulas=None):
        gradient = getattr(formulas or gate_reference, f"{self.name}_bwd")
        resolved = self.resolve_backward(x, gate, attributes)
        return gradient(dys, x, gate, *self.more(weights, rstd, dres), **resolved)

    def resolve_backward(self, x: Tensor, gate: Tensor, attributes: dict) -> dict:
        """The keyword arguments of the gradient's formula, every one."""
        defaults = dict.fromkeys(_PRODUCT, "") | {"group": 0} if self.gate_first else {}
        found = {**defaults, **({"weight_offset": 0.0} if self.normed else {}), **attributes}
        for name in [k for k in found if k.endswith("_dtype")]:
            found[name] = _dtype(found[name], x.dtype, gate.dtype)
        return found

    @property
    def one_group(self) -> dict:
        return {"group": 0} if self.gate_first else {}

    def more(self, weights: _Weights, rstd: Tensor | None, dres: Tensor | None) -> tuple:
        if not self.normed:
            return ()
        return (*weights, rstd) if self.gate_first else (*weights, rstd, dres)

    def backward_attributes(self, attributes: dict, inline: bool) -> dict:
        names = ("weight_offset",) if self.normed else ()
        names += ("group", *_PRODUCT) if self.gate_first else ()
        # The kernels keep the norm's gradient in registers and do not round it.
        names += ("norm_dtype",) if inline else ()
        return {k: attributes[k] for k in names if k in attributes}


def _dtype(name: str, x_dtype: torch.dtype, gate_dtype: torch.dtype) -> torch.dtype | None:
    if name == "gate":  # of integers sigmoid and silu are floats
        return gate_dtype if gate_dtype.is_floating_point else torch.get_default_dtype()
    return reference.resolve_dtype(name, x_dtype)


SILU_GATE = _Op("silu_gate", f'{_GATE}, str out_dtype="input", {_ORDER}', normed=False)
RMS_NORM_SILU_GATE = _Op(
    "rms_norm_silu_gate",
    f'{_NORM}, str norm_dtype="", {_GATE}, str out_dtype="input", {_ORDER}',
)
SILU_GATE_RMS_NORM = _Op(
    "silu_gate_rms_norm",
    f'int group=0, {_NORM}, {_GATE}, str gated_dtype="", str out_dtype="", {_ORDER}',
    gate_first=True,
)


# ------------------------------------------------------------ outer ops


def silu_gate(
    x: Tensor, gate: Tensor, *, forward: str = "kernel", backward: str = "kernel", **attributes
) -> Tensor:
    """x * silu(gate) for x and gate [..., N]; returns y [..., N], by default in x's dtype.

    Gradients come in the dtypes of x and gate. Raises ValueError for an unknown attribute value.
    Source: https://arxiv.org/abs/2002.05202
    """
    return _outer(SILU_GATE, x, gate, (), attributes, forward, backward)


def rms_norm_silu_gate(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    *,
    forward: str = "kernel",
    backward: str = "kernel",
    **attributes,
) -> Tensor:
    """rms_norm(x) * silu(gate) for x and gate [..., N], weight [N] or None; returns y [..., N].

    `norm_dtype` is what the norm is rounded to before the gate. Gradients come in the dtypes of x,
    gate and weight. Raises ValueError for an unknown attribute value.
    """
    return _outer(RMS_NORM_SILU_GATE, x, gate, (weight,), attributes, forward, backward)


def silu_gate_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    *,
    forward: str = "kernel",
    backward: str = "kernel",
    **attributes,
) -> Tensor:
    """rms_norm(x * silu(gate)) over runs of `group` columns, or all of them; returns y [..., N].

    x, gate: [..., N]; weight: [N] or None, one value for each of all the columns. `gated_dtype` is
    what the product is rounded to before the norm. Gradients come in the dtypes of x, gate and
    weight. Raises ValueError for an unknown attribute value. Source: https://arxiv.org/abs/2405.21060
    """
    return _outer(SILU_GATE_RMS_NORM, x, gate, (weight,), attributes, forward, backward)


def _outer(op: _Op, x, gate, weights, attributes, forward, backward) -> Tensor:
    check_sides(op.name, forward, backward)
    fits = x.shape == gate.shape and all(one_value_per_column(w, x.shape) for w in weights)
    derived = forward == backward == "inline" and op.may_be_derived(x, gate, weights)
    if derived or not fits or must_be_plain(x, gate, *weights):
        return op.formula(x, gate, weights, attributes)[0]
    if needs_grad(x, gate, *weights):
        return _Gated.apply(op, attributes, forward, backward, x, gate, *weights)
    return _forward(op, x, gate, weights, attributes, forward)[0]


def _forward(op, x, gate, weights, attributes, side, keepdim=False) -> tuple[Tensor, Tensor | None]:
    if side != "inline":
        y, rstd = op.call_forward(x, gate, weights, attributes)
    else:
        shape = {"keepdim": keepdim} if op.normed else {}
        y, rstd = op.formula(x, gate, weights, attributes | shape)
    return fresh(y), rstd


@functools.cache
def _defaults(op: _Op) -> dict:
    """The values that the schema has for attributes that are not given."""
    schema = getattr(torch.ops.fxfuse, op.name).default._schema
    ours = [a for a in schema.arguments if a.kwarg_only and a.name not in ("forward", "backward")]
    return {a.name: a.default_value for a in ours if a.name != "eps"}


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, op, attributes, forward, backward, x, gate, *weights):
        y, rstd = _forward(op, x, gate, weights, attributes, forward, backward == "inline")
        ctx.save_for_backward(x, gate, rstd, *weights)
        ctx.op, ctx.attributes, ctx.side = op, attributes, backward
        return y

    @staticmethod
    def backward(ctx, dy):
        x, gate, rstd, *weights = ctx.saved_tensors
        needed = ctx.needs_input_grad[4:]
        if torch.is_grad_enabled():
            # The gradient will be differentiated again: let autograd see how it depends on x.
            def formula(x, gate, *weights):
                return [ctx.op.formula(x, gate, weights, ctx.attributes)[0]]

            found = differentiable_backward(formula, (x, gate, *weights), [dy])
        else:
            found = _backward(ctx, dy, x, gate, tuple(weights), rstd, needed)
        return None, None, None, None, *(t if need else None for t, need in zip(found, needed))


def _backward(ctx, dy, x, gate, weights, rstd, needed) -> tuple[Tensor | None, ...]:
    inline = ctx.side == "inline"
    attributes = ctx.op.backward_attributes(ctx.attributes, inline)
    if ctx.op.normed:
        attributes["need_dweight"] = needed[2]
    operands = ([dy], x, gate, weights, rstd, None, attributes)
    if inline:
        return ctx.op.formula_backward(*operands)
    return ctx.op.call_backward(*operands)


# ------------------------------------------------------------ inner ops


def _define(op: _Op) -> None:
    weight = ", Tensor? weight" if op.normed else ""
    returns = "Tensor"
    define_outer(
        f"{op.name}(Tensor x, Tensor gate{weight}, *, {op.attributes}, {SIDES}) -> {returns}",
        globals()[op.name],
    )
    define_inner(
        f"{op.name}_fwd(Tensor x, Tensor gate{weight}, *, {op.attributes}) -> "
        + ("(Tensor, Tensor)" if op.normed else "Tensor"),
        **{kind: _forward_by(op, run) for kind, run in _FORWARD.items()},
    )
    more, returns = "", "(Tensor, Tensor)"
    if op.normed:
        more = ", Tensor? weight, Tensor rstd" + ("" if op.gate_first else ", Tensor? dres")
        product = f'int group=0, {_GATE}, str gated_dtype="", ' if op.gate_first else ""
        more += f", *, {product}float weight_offset=0.0, bool need_dweight"
        returns = "(Tensor, Tensor, Tensor)"
    define_inner(
        f"{op.name}_bwd(Tensor[] dys, Tensor x, Tensor gate{more}) -> {returns}",
        **{kind: _backward_by(op, run) for kind, run in _BACKWARD.items()},
    )


def _forward_by(op: _Op, run):
    """The inner forward op over `run(op, x, gate, weights, attributes) -> y, rstd`."""

    def forward(x, gate, *weights, **attributes):
        y, rstd = run(op, x, gate, weights, attributes)
        return (y, rstd) if op.normed else y

    return forward


def _formula_forward(op, x, gate, weights, attributes):
    return op.formula(x, gate, weights, attributes)


def _plain_forward(op, x, gate, weights, attributes, formulas=gate_reference):
    y, rstd = op.formula(x, gate, weights, attributes, formulas)
    y = layout.fit_to(y.contiguous(), _layout_formula(op, attributes), x, gate)
    return y, None if rstd is None else layout.contiguous(rstd)


@functools.cache
def _layout_of(op: _Op, contiguous: bool, swapped: bool):
    """A formula whose result lies where y does; it is told apart by identity in a cache."""
    attributes = {"swapped": swapped}
    if op.normed:
        attributes |= {"eps": 0.0, "contiguous": contiguous}

    def formula(x: Tensor, gate: Tensor) -> Tensor:
        weights = (None,) if op.normed else ()
        return op.formula(x, gate, weights, attributes)[0]

    return formula


def _layout_formula(op: _Op, attributes: dict):
    return _layout_of(op, *(attributes.get(name, False) for name in ("contiguous", "swapped")))


def _fake_forward(op, x, gate, weights, attributes):
    y, rstd = op.formula(x, gate, weights, attributes)
    return y, None if rstd is None else rstd.new_empty(rstd.shape)


def _cpu_forward(op, x, gate, weights, attributes):
    if interpreted():
        return _triton_forward(op, x, gate, weights, attributes)
    return _plain_forward(op, x, gate, weights, attributes, compiled)


def _triton_forward(op, x, gate, weights, attributes):
    launch = _launch()
    resolved = op.resolve(x.dtype, gate.dtype, attributes)
    resolved.pop("swapped")
    compute_dtype = resolved.pop("compute_dtype", torch.float32)
    resolved["out_dtype"] = _y_dtype(op, x, gate, weights, attributes)
    if op.normed:
        resolved["eps"] = reference.resolve_eps(resolved["eps"], compute_dtype)
    dtypes = [value for name, value in resolved.items() if name.endswith("_dtype")]
    group = resolved.get("group", 0)
    if _unfit(x, gate, weights, compute_dtype=compute_dtype, dtypes=dtypes, group=group):
        return _plain_forward(op, x, gate, weights, attributes)
    found = getattr(launch, op.name)(x, gate, *weights, **resolved)
    y, rstd = found if op.normed else (found, None)
    return layout.fit_to(y, _layout_formula(op, attributes), x, gate), rstd


def _unfit(x: Tensor, gate: Tensor, weights: _Weights, **more) -> str | None:
    return _launch().unfit({"input": x, "gate": gate}, dict(zip(["weight"], weights)), **more)


def _y_dtype(op, x, gate, weights, attributes) -> torch.dtype:
    """The dtype of y, by the promotion that the formula goes through."""
    dtypes = tuple(None if t is None else t.dtype for t in (x, gate, *weights))
    return _y_dtype_of(op, dtypes, tuple(attributes.items()))


@functools.lru_cache(1024)
def _y_dtype_of(op: _Op, dtypes: tuple, attributes: tuple) -> torch.dtype:
    one = [
        None if dtype is None else torch.empty(1, dtype=dtype, device="meta") for dtype in dtypes
    ]
    x, gate, *weights = one
    return op.formula(x, gate, tuple(weights), dict(attributes) | op.one_group)[0].dtype


def _launch() -> ModuleType:
    # Triton is imported with it, so not before a kernel is wanted.
    from fxfuse.kernels import gate_launch

    return gate_launch


def _backward_by(op: _Op, run):
    """The inner backward op over `run(op, dys, x, gate, weights, rstd, dres, attributes)`."""

    def backward(dys, x, gate, weight=None, rstd=None, dres=None, **attributes):
        weights = (weight,) if op.normed else ()
        found = run(op, dys, x, gate, weights, rstd, dres, attributes)
        dweights = [or_empty(t, x, weight) for t in found[2:]]
        return *found[:2], *dweights

    return backward


def _formula_backward(op, *operands, formulas=gate_reference):
    return op.formula_backward(*operands, formulas)


def _plain_backward(op, dys, x, gate, *more, formulas=gate_reference):
    dx, dgate, *dweights = op.formula_backward(dys, x, gate, *more, formulas)
    dx, dgate = (layout.fit(layout.contiguous(d), t) for d, t in ((dx, x), (dgate, gate)))
    return dx, dgate, *dweights


def _fake_backward(op, dys, x, gate, weights, rstd, dres, attributes):
    needed = attributes.get("need_dweight", False)
    dweights = [w.new_empty(w.shape) if needed and w is not None else None for w in weights]
    return layout.like(x, x.dtype), layout.like(gate, gate.dtype), *dweights


def _cpu_backward(op, *operands):
    if interpreted():
        return _triton_backward(op, *operands)
    return _plain_backward(op, *operands, formulas=compiled)


def _triton_backward(op, dys, x, gate, weights, rstd, dres, attributes):
    launch = _launch()
    resolved = op.resolve_backward(x, gate, attributes)
    compute_dtype = torch.float32 if rstd is None else rstd.dtype
    dtypes = [value for name, value in resolved.items() if name.endswith("_dtype")]
    more = {"compute_dtype": compute_dtype, "dtypes": dtypes, "group": resolved.get("group", 0)}
    gradients = dys if dres is None else [*dys, dres]
    if any(t.dtype not in launch.DTYPES for t in gradients) or _unfit(x, gate, weights, **more):
        return _plain_backward(op, dys, x, gate, weights, rstd, dres, attributes)
    dys = reference.at_most(launch.MAX_GRADIENTS, dys)
    backward = getattr(launch, f"{op.name}_backward")
    dx, dgate, *dweights = backward(dys, x, gate, *op.more(weights, rstd, dres), **resolved)
    return layout.fit(dx, x), layout.fit(dgate, gate), *dweights


_FORWARD = {
    "cuda": _triton_forward, "cpu": _cpu_forward, "plain": _plain_forward,
    "batched": _formula_forward, "fake": _fake_forward,
}  # fmt: skip
_BACKWARD = {
    "cuda": _triton_backward, "cpu": _cpu_backward, "plain": _plain_backward,
    "batched": _formula_backward, "fake": _fake_backward,
}  # fmt: skip
for _op in (SILU_GATE, RMS_NORM_SILU_GATE, SILU_GATE_RMS_NORM):
    _define(_op)
