"""What the backward patterns know about the backward ops that they make larger."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

import fxfuse.kernels.ops  # noqa: F401  (defines the ops)
from fxfuse.match import Call, Derived, call_of

aten = torch.ops.aten
_OURS = torch.ops.fxfuse

# Their first result may take a residual gradient along. Not so that of the sandwich: what
# is added to its dh belongs to the residual alone, and would go on into dx.
ADDS = (_OURS.rms_norm_bwd.default, _OURS.rms_norm_silu_gate_bwd.default)
SUMS = (
    *ADDS,
    _OURS.rms_norm_add_rms_norm_bwd.default,
    _OURS.silu_gate_bwd.default,
    _OURS.silu_gate_rms_norm_bwd.default,
)
ATEN = aten._fused_rms_norm_backward.default
MOST_GRADIENTS = 3

norm_backward = call_of("norm_backward", *SUMS, ATEN)


@dataclass(frozen=True)
class Backward:
    """A backward call in the terms of one of our ops.

    dys: the gradients of the norm's output. dres: that of its input from elsewhere, or None.
    """

    op: torch._ops.OpOverload
    args: dict[str, object]
    kwargs: dict[str, object]
    node: fx.Node

    @property
    def dys(self) -> list[fx.Node]:
        return self.args["dys"]

    def call(self, outputs: tuple[str, ...], root: int | None = None, **changed: object) -> Call:
        """The same call with other gradients."""
        args = {**self.args, **changed}
        return Call(self.op, tuple(args.values()), dict(self.kwargs), outputs, root, self.node)


def read(node: fx.Node) -> Backward | None:
    """The backward call at a node; None for a form of ATen's that our op does not compute."""
    if node.target is ATEN:
        return _read_aten(node)
    schema = node.target._schema.arguments
    given = dict(zip((a.name for a in schema), node.args)) | node.kwargs
    args = {a.name: given.get(a.name) for a in schema if not a.kwarg_only}
    kwargs = {a.name: given[a.name] for a in schema if a.kwarg_only and a.name in given}
    return Backward(node.target, args, kwargs, node)


def _read_aten(node: fx.Node) -> Backward | None:
    dy, h, shape, rstd, weight, mask = node.args
    value = rstd.meta.get("val")
    if len(shape) != 1 or value is None:
        return None
    squeezed = Derived(aten.squeeze.dim, (rstd, -1), value.squeeze(-1))
    args = {"dys": [dy], "h": h, "weight": weight, "rstd": squeezed, "dres": None}
    return Backward(_OURS.rms_norm_bwd.default, args, {"need_dweight": bool(mask[1])}, node)
