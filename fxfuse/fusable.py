"""Which ops Inductor makes part of a kernel that it generates, and which it calls as they are.

It looks at names only, and an op that it does not know is taken to be called, as a matrix product
is: then nothing is lost where a fused op stands beside it.
"""

from __future__ import annotations

import functools

import torch
from torch import fx

CALLED, GENERATED, VIEW = "called", "generated", "view"

# What only says how the memory of an operand is looked at.
_VIEWS = {
    "alias", "chunk", "detach", "expand", "expand_as", "flatten", "getitem", "identity", "movedim",
    "narrow", "permute", "reshape", "select", "slice", "split", "split_with_sizes", "squeeze",
    "swapaxes", "t", "transpose", "unbind", "unflatten", "unsqueeze", "view", "view_as",
    "_unsafe_view",
}  # fmt: skip
_CASTS = {
    "bfloat16", "convert_element_type", "double", "float", "half", "to", "type", "type_as",
    "_to_copy",
}  # fmt: skip
# Beside these and what ATen tags as pointwise: reductions, gathers and copies.
_GENERATED = {
    "amax", "amin", "cat", "concat", "contiguous", "dropout", "embedding", "gather", "glu", "index",
    "index_select", "layer_norm", "layernorm", "log_softmax", "mean", "native_dropout",
    "native_layer_norm", "norm", "pad", "repeat", "rms_norm", "rmsnorm", "roll", "softmax", "stack",
    "std", "sum", "var", "var_mean", "_fused_rms_norm", "_softmax",
}  # fmt: skip
_OPERATORS = {
    "iadd": "add", "imul": "mul", "ipow": "pow", "isub": "sub", "itruediv": "div", "truediv": "div",
}  # fmt: skip


def kind(node: fx.Node) -> str:
    """VIEW, GENERATED for what goes into a kernel together with its neighbours, or CALLED."""
    return _kind(_name(node))


def name_of(node: fx.Node) -> str:
    """What the report calls the op of a node: "mul", "dropout", "cast"."""
    name = _name(node)
    return "cast" if name in _CASTS else name or node.name


def _name(node: fx.Node) -> str | None:
    if node.op == "call_module":
        module = node.graph.owning_module.get_submodule(node.target)
        return type(module).__name__.lower()
    if node.op == "call_method":
        return node.target.removesuffix("_")
    return _name_of_function(node.target) if node.op == "call_function" else None


@functools.cache
def _name_of_function(target: object) -> str | None:
    """The name of a function in ATen; None for what is no op of PyTorch's."""
    if isinstance(target, torch._ops.HigherOrderOperator):
        return None
    if isinstance(target, torch._ops.OpOverload):
        namespace, _, name = target._schema.name.partition("::")
        return name.removesuffix("_") if namespace in ("aten", "prims") else None
    name = getattr(target, "__name__", None)
    return _OPERATORS.get(name, name)


@functools.cache
def _kind(name: str | None) -> str:
    if name is None:
        return CALLED
    if name in _VIEWS:
        return VIEW
    if name in _GENERATED or name in _CASTS:
        return GENERATED
    packet = getattr(torch.ops.aten, name, None)
    overloads = [getattr(packet, one) for one in packet.overloads()] if packet else []
    return GENERATED if any(torch.Tag.pointwise in one.tags for one in overloads) else CALLED
