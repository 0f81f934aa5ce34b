"""Reads after a write in place are reads of what the write returns, and only these."""

import pytest
import torch
from torch import fx

from fxfuse import in_place, pipeline


def traced(function):
    return fx.symbolic_trace(function)


def of_aten(x):
    y = x * 2
    torch.ops.aten.add_.Tensor(y, x)
    return y, x


def before_and_after(x):
    y = x * 2
    early = y + 1
    y.add_(1)
    return early, y * 3, y


def chain(x):
    y = x.clone()
    y.add_(1)
    y.mul_(y)
    return y


def through_a_view(x):
    y = x * 2
    row = y[:1]
    y.mul_(3)
    return row + 1, y


FUNCTIONS = [before_and_after, chain, through_a_view, of_aten]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_the_program_is_the_same(function):
    gm, x = traced(function), torch.randn(3, 4)
    assert in_place.follow(gm.graph)
    gm.graph.lint()
    gm.recompile()
    for one, other in zip(gm(x), function(x)):
        assert torch.equal(one, other)


def test_what_is_read():
    gm = traced(before_and_after)
    in_place.follow(gm.graph)
    nodes = {node.name: node for node in gm.graph.nodes}
    assert list(nodes["mul"].users) == [nodes["add"], nodes["add_"]]
    assert nodes["mul_1"] in nodes["add_"].users


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_nothing_is_left_behind_where_nothing_is_fused(function):
    gm = traced(function)
    code = gm.code
    pipeline.apply(gm)
    gm.recompile()
    assert gm.code == code
