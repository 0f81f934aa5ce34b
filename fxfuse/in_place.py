"""Reads of a tensor that was written in place, as reads of what the writing op returns.

`v.add_(eps)` and then `torch.rsqrt(v)` is the same as `torch.rsqrt(v.add_(eps))`, and only the
second says in the graph what the root is of.
"""

from __future__ import annotations

import torch
from torch import fx

aten = torch.ops.aten

_RETURN_THEIR_OPERAND = {
    "add_", "mul_", "div_", "pow_", "rsqrt_", "sqrt_", "reciprocal_", "square_",
    aten.add_.Tensor, aten.add_.Scalar, aten.mul_.Tensor, aten.mul_.Scalar, aten.div_.Tensor,
    aten.div_.Scalar, aten.pow_.Scalar, aten.rsqrt_.default, aten.sqrt_.default,
    aten.reciprocal_.default, aten.square_.default,
}  # fmt: skip

Change = tuple[fx.Node, tuple, dict]


def follow(graph: fx.Graph) -> list[Change]:
    """Let those who read a tensor after a write read the write; returns what `undo` needs."""
    changes: list[Change] = []
    for write in graph.nodes:
        target = _written(write)
        for reader in [u for u in target.users if write < u] if target is not None else ():
            changes.append((reader, reader.args, reader.kwargs))
            reader.replace_input_with(target, write)
    return changes


def undo(changes: list[Change]) -> None:
    for reader, args, kwargs in reversed(changes):
        reader.args, reader.kwargs = args, kwargs


def _written(node: fx.Node) -> fx.Node | None:
    """What a method or an ATen op writes to and returns, None for all other nodes."""
    operand = node.args[0] if node.target in _RETURN_THEIR_OPERAND and node.args else None
    return operand if isinstance(operand, fx.Node) else None
