"""Which ops Inductor generates, told by their names in every dialect."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

import fxfuse.kernels.ops  # noqa: F401  (defines the ops)
from fxfuse.fusable import CALLED, GENERATED, VIEW, kind, name_of

aten, prims = torch.ops.aten, torch.ops.prims


class Modules(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout, self.norm = nn.Linear(2, 2), nn.Dropout(), nn.RMSNorm(2)
        self.table, self.gelu, self.own = nn.Embedding(2, 2), nn.GELU(), Own()


class Own(nn.Module):
    pass


def node(op: str, target: object) -> fx.Node:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.create_node(op, target, (x, x)))
    return list(fx.GraphModule(Modules(), graph).graph.nodes)[1]


@pytest.mark.parametrize(
    ("target", "expected", "name"),
    [
        (torch.mul, GENERATED, "mul"),
        (operator.iadd, GENERATED, "add"),
        (operator.truediv, GENERATED, "div"),
        (F.dropout, GENERATED, "dropout"),
        (F.embedding, GENERATED, "embedding"),
        (torch.softmax, GENERATED, "softmax"),
        (torch.rms_norm, GENERATED, "rms_norm"),
        (aten.mul.Tensor, GENERATED, "mul"),
        (aten.add_.Tensor, GENERATED, "add"),
        (aten._to_copy.default, GENERATED, "cast"),
        (prims.convert_element_type.default, GENERATED, "cast"),
        (operator.getitem, VIEW, "getitem"),
        (aten.view.default, VIEW, "view"),
        (torch.transpose, VIEW, "transpose"),
        (F.linear, CALLED, "linear"),
        (operator.matmul, CALLED, "matmul"),
        (torch.einsum, CALLED, "einsum"),
        (F.scaled_dot_product_attention, CALLED, "scaled_dot_product_attention"),
        (aten.mm.default, CALLED, "mm"),
        (aten.convolution.default, CALLED, "convolution"),
        (torch.ops.fxfuse.rms_norm.default, CALLED, None),
        (torch.ops.higher_order.cond, CALLED, None),
    ],
)
def test_functions(target, expected, name):
    one = node("call_function", target)
    assert kind(one) == expected
    assert name_of(one) == (name or one.name)


@pytest.mark.parametrize(
    ("target", "expected", "name"),
    [
        ("mul", GENERATED, "mul"),
        ("add_", GENERATED, "add"),
        ("float", GENERATED, "cast"),
        ("contiguous", GENERATED, "contiguous"),
        ("chunk", VIEW, "chunk"),
        ("matmul", CALLED, "matmul"),
        ("of_ours", CALLED, "of_ours"),
    ],
)
def test_methods(target, expected, name):
    one = node("call_method", target)
    assert (kind(one), name_of(one)) == (expected, name)


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("linear", CALLED), ("dropout", GENERATED), ("norm", GENERATED), ("table", GENERATED),
        ("gelu", GENERATED), ("own", CALLED),
    ],
)  # fmt: skip
def test_leaf_modules(target, expected):
    assert kind(node("call_module", target)) == expected


def test_inputs_are_neither():
    x = fx.Graph().placeholder("x")
    assert kind(x) == CALLED
