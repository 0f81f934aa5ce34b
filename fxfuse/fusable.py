"""Which ops Inductor makes part of a kernel that it generates, and which it calls as they are.

It looks at names only, and an op that it does not know is taken to be called, as a matrix product
is: then nothing is lost where a fused op stands beside it.
"""

from __future__ import annotations

import functools

import torch
from torch import fx

from fxfuse.view import View

_MOVES = {"detach", "item", "same", "view"}  # words of values that lie where their operand lies
_VIEWS = {
    "alias", "chunk", "detach", "expand", "expand_as", "flatten", "getitem", "movedim", "narrow",
    "permute", "reshape", "select", "slice", "split", "split_with_sizes", "squeeze", "swapaxes",
    "t", "transpose", "unbind", "unflatten", "unsqueeze", "view", "view_as",
}  # fmt: skip
# Beside what ATen tags as pointwise: reductions, gathers, casts, and copies.
_GENERATED = {
    "amax", "amin", "bfloat16", "cat", "concat", "contiguous", "convert_element_type", "double",
    "dropout", "embedding", "float", "gather", "glu", "half", "index", "index_select", "layer_norm",
    "layernorm", "log_softmax", "mean", "native_dropout", "native_layer_norm", "norm", "pad",
    "repeat", "rms_norm", "roll", "softmax", "stack", "std", "sum", "to", "type", "type_as", "var",
    "var_mean", "_fused_rms_norm", "_fused_rms_norm_backward", "_softmax", "_to_copy",
}  # fmt: skip
_OPERATORS = {
    "iadd": "add", "imul": "mul", "ipow": "pow", "isub": "sub", "itruediv": "div", "truediv": "div",
}  # fmt: skip


def is_view(view: View, node: fx.Node) -> bool:
    """Whether a node only says how the memory of its operand is looked at."""
    if node.op not in ("call_function", "call_method"):
        return False
    return view.term(node).word in _MOVES or _name(view, node) in _VIEWS


def is_generated(view: View, node: fx.Node) -> bool:
    """Whether Inductor would write a node into a kernel, together with its neighbours."""
    name = _name(view, node)
    if name is None:
        return False
    return view.term(node).word not in ("opaque", "norm_backward") or _is_generated(name)


def name_of(view: View, node: fx.Node) -> str:
    """What a reader of the report calls the op of a node: "mul", "dropout"."""
    word = view.term(node).word
    return word if word != "opaque" else _name(view, node) or node.name


def _name(view: View, node: fx.Node) -> str | None:
    """The name of a node's op in ATen; None for what is no op of PyTorch's."""
    if node.op == "call_method":
        return node.target
    if node.op == "call_module":
        return type(view.graph_module.get_submodule(node.target)).__name__.lower()
    if node.op != "call_function" or isinstance(node.target, torch._ops.HigherOrderOperator):
        return None
    if isinstance(node.target, torch._ops.OpOverload):
        namespace, _, name = node.target._schema.name.partition("::")
        return name if namespace in ("aten", "prims") else None
    name = getattr(node.target, "__name__", None)
    return _OPERATORS.get(name, name)


@functools.cache
def _is_generated(name: str) -> bool:
    name = name.removesuffix("_")
    packet = getattr(torch.ops.aten, name, None)
    if name in _GENERATED or packet is None:
        return name in _GENERATED
    return any(torch.Tag.pointwise in getattr(packet, one).tags for one in packet.overloads())
