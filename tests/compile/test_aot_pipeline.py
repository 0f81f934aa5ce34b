"""`fxfuse.apply` in both compilers of an AOTAutograd pipeline: its graphs come after autograd."""

from __future__ import annotations

import operator

import pytest
import torch
from functorch.compile import (
    aot_module,
    default_partition,
    make_boxed_func,
    min_cut_rematerialization_partition,
)
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fxfuse
from tests.spellings import (
    WIDTH,
    CastThenWeight,
    CastToWeight,
    DividedByRoot,
    LeafModule,
    PowerOfMinusHalf,
    Weightless,
    WeightlessSquare,
    WideWeight,
    ZeroCentred,
)

aten = torch.ops.aten
PARTITIONS = {"min_cut": min_cut_rematerialization_partition, "default": default_partition}
DTYPES = (torch.float32, torch.bfloat16)


class Block(nn.Module):
    """norm, q k v, add, norm, gate and up, add."""

    def __init__(self, norm: type[nn.Module], dtype: torch.dtype) -> None:
        super().__init__()
        self.first, self.second = norm(dtype), norm(dtype)
        names = ("q", "k", "v", "o", "gate", "up", "down")
        linear = {n: nn.Linear(WIDTH, WIDTH, bias=False, dtype=dtype) for n in names}
        self.linear = nn.ModuleDict(linear)

    def forward(self, x):
        lin = self.linear
        a = self.first(x)
        h = x + lin["o"](lin["q"](a) * lin["k"](a).tanh() * lin["v"](a))
        b = self.second(h)
        return h + lin["down"](F.gelu(lin["gate"](b)) * lin["up"](b))


class Compilers:
    """A forward and a backward compiler that apply fxfuse, and what they found."""

    def __init__(self) -> None:
        self.counts: dict[str, dict[str, int]] = {}
        self.reasons: set[str] = set()
        self.graphs: dict[str, fx.GraphModule] = {}

    def settings(self, partition: str) -> dict:
        return {
            "fw_compiler": self._compiler("forward"),
            "bw_compiler": self._compiler("backward"),
            "partition_fn": PARTITIONS[partition],
        }

    def _compiler(self, side: str):
        def compile(gm, example_inputs):
            report = fxfuse.apply(gm).meta["fxfuse"]
            self.counts[side], self.graphs[side] = report.counts, gm
            self.reasons |= {miss.reason for miss in report.misses}
            assert not fxfuse.apply(gm).meta["fxfuse"].modified
            return make_boxed_func(gm)

        return compile


def run(call, model, x) -> list[torch.Tensor]:
    """The output, and the gradients of x and of the parameters."""
    model.zero_grad(set_to_none=True)
    leaf = x.clone().requires_grad_()
    y = call(leaf)
    y.double().square().sum().backward()
    return [y.detach(), leaf.grad, *(p.grad for p in model.parameters() if p.grad is not None)]


def inputs(dtype: torch.dtype, count: int = 6) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 20, WIDTH, generator=generator).to(dtype) for _ in range(count)]


def block(norm: type[nn.Module], dtype: torch.dtype) -> Block:
    torch.manual_seed(0)
    return Block(norm, dtype)


def check(call, model, norm: type[nn.Module], dtype: torch.dtype) -> None:
    """Compare with eager: fp32 at once, half precision by the error against fp64."""
    errors = []
    for x in inputs(dtype):
        eager, got = run(model, model, x), run(call, model, x)
        assert [t.dtype for t in got] == [t.dtype for t in eager]
        assert [t.stride() for t in got] == [t.stride() for t in eager]
        if dtype == torch.float32:
            torch.testing.assert_close(got, eager, rtol=1e-5, atol=1e-5)
            return
        exact = block(norm, torch.float64)
        exact.load_state_dict(model.state_dict())
        right = run(exact, exact, x.double())
        pairs = zip(got, eager, right)
        errors.append([[(t.double() - r).norm() for t in (g, e)] for g, e, r in pairs])
    for ours, theirs in torch.tensor(errors).sum(0).tolist():
        assert ours <= 1.1 * theirs


# The norms' own gradients, and what they take in. In fp32 autograd adds the residual gradient in
# the middle of the norm's own. With default_partition the normalised value is an input of the
# backward graph, so dweight stays there and reads the sum of the gradients as well.
@pytest.mark.parametrize(
    "partition, dtype, backward",
    [
        ("min_cut", torch.float32, {"backward_rms_norm": 2, "backward_sum_rms_norm": 2}),
        ("default", torch.float32, {"backward_rms_norm": 2}),
        (
            "min_cut",
            torch.bfloat16,
            {"backward_add_rms_norm": 2, "backward_rms_norm": 2, "backward_sum_rms_norm": 2},
        ),
        ("default", torch.bfloat16, {"backward_rms_norm": 2}),
    ],
)
@pytest.mark.parametrize("norm", [LeafModule, CastThenWeight, ZeroCentred])
def test_a_block_fuses_in_both_graphs(norm, partition, dtype, backward):
    model, compilers = block(norm, dtype), Compilers()
    check(aot_module(model, **compilers.settings(partition)), model, norm, dtype)
    assert compilers.counts == {
        "forward": {"add_rms_norm": 1, "rms_norm": 1},
        "backward": backward,
    }
    assert not compilers.reasons
    for target in (aten.rsqrt.default, aten.mean.dim, aten.pow.Tensor_Scalar):
        assert not any(calls_of(gm, target) for gm in compilers.graphs.values())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm", [Weightless, WeightlessSquare, CastToWeight, WideWeight])
def test_other_spellings(norm, dtype):
    model, compilers = block(norm, dtype), Compilers()
    check(aot_module(model, **compilers.settings("min_cut")), model, norm, dtype)
    assert compilers.counts["forward"] == {"add_rms_norm": 1, "rms_norm": 1}
    assert compilers.counts["backward"]["backward_rms_norm"] == 2


@pytest.mark.parametrize("partition", PARTITIONS)
@pytest.mark.parametrize("norm", [DividedByRoot, PowerOfMinusHalf])
def test_a_norm_whose_saved_value_is_not_rstd_is_left_alone(norm, partition):
    model, compilers = block(norm, torch.float32), Compilers()
    check(aot_module(model, **compilers.settings(partition)), model, norm, torch.float32)
    assert compilers.counts == {"forward": {}, "backward": {}}
    assert any("inside it is also used by" in reason for reason in compilers.reasons)


@pytest.mark.parametrize("partition", PARTITIONS)
def test_a_frozen_weight_gets_no_gradient(partition):
    model, compilers = block(CastThenWeight, torch.float32), Compilers()
    model.first.weight.requires_grad_(False), model.second.weight.requires_grad_(False)
    call = aot_module(model, **compilers.settings(partition))
    check(call, model, CastThenWeight, torch.float32)
    assert compilers.counts["backward"] == {"backward_rms_norm": 2, "backward_sum_rms_norm": 2}
    assert all(
        not call.kwargs["need_dweight"] for call in backward_calls(*compilers.graphs.values())
    )


class TwoNorms(nn.Module):
    """Two norms of one tensor, which is read elsewhere too: in fp32 one chain of adds."""

    def __init__(self, norm: type[nn.Module], dtype: torch.dtype) -> None:
        super().__init__()
        self.first, self.second = norm(dtype), norm(dtype)

    def forward(self, x):
        h = x * 1.5
        return self.first(h) * self.second(h).sin() + h * h


@pytest.mark.parametrize("partition", PARTITIONS)
@pytest.mark.parametrize("norm", [CastThenWeight, ZeroCentred])
def test_two_norms_of_one_tensor(norm, partition):
    model, compilers = TwoNorms(norm, torch.float32), Compilers()
    check(aot_module(model, **compilers.settings(partition)), model, norm, torch.float32)
    forward = 1 if partition == "min_cut" else 2  # which merges what the norms have in common
    assert compilers.counts == {
        "forward": {"rms_norm": forward},
        "backward": {"backward_rms_norm": 2},
    }


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_backend_made_of_aot_autograd(dynamic):
    torch._dynamo.reset()
    model, compilers = block(LeafModule, torch.float32), Compilers()
    backend = aot_autograd(**compilers.settings("min_cut"))
    call = torch.compile(model, backend=backend, dynamic=dynamic)
    check(call, model, LeafModule, torch.float32)
    assert compilers.counts == {
        "forward": {"add_rms_norm": 1, "rms_norm": 1},
        "backward": {"backward_rms_norm": 2, "backward_sum_rms_norm": 2},
    }


def test_norms_that_the_backward_graph_computes_again():
    torch._dynamo.reset()
    model, compilers = block(CastThenWeight, torch.bfloat16), Compilers()
    backend = aot_autograd(**compilers.settings("min_cut"))

    def checkpointed(x):
        return checkpoint(model, x, use_reentrant=False)

    call = torch.compile(checkpointed, backend=backend)
    check(call, model, CastThenWeight, torch.bfloat16)
    counts = {"add_rms_norm": 1, "rms_norm": 1}
    assert compilers.counts["forward"] == counts
    assert compilers.counts["backward"] == counts | {
        "backward_add_rms_norm": 2, "backward_rms_norm": 2, "backward_sum_rms_norm": 2,
    }  # fmt: skip


# ---- near misses ---------------------------------------------------------------------------------


def backward_of(partition: str) -> fx.GraphModule:
    """The backward graph of one norm, before anything is fused in it."""
    kept = []

    def keep(gm, example_inputs):
        kept.append(gm)
        return make_boxed_func(gm)

    model = CastThenWeight(torch.float32)
    call = aot_module(
        model,
        fw_compiler=lambda gm, _: make_boxed_func(gm),
        bw_compiler=keep,
        partition_fn=PARTITIONS[partition],
    )
    run(call, model, inputs(torch.float32)[0])
    return kept[0]


@pytest.fixture(scope="module")
def backward_graph() -> fx.GraphModule:
    return backward_of("min_cut")


def copied(gm: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    return fx.GraphModule(gm, graph)


def set_argument(target, index: int, old: object, new: object):
    """Change one argument of the only call of `target` that has `old` there."""

    def change(gm: fx.GraphModule) -> None:
        (node,) = (n for n in calls_of(gm, target) if n.args[index] == old)
        node.update_arg(index, new)

    return change


def negate_below(exponent: float):
    """Raise the negative of a tensor to a power."""

    def change(gm: fx.GraphModule) -> None:
        (power,) = (n for n in calls_of(gm, aten.pow.Tensor_Scalar) if n.args[1] == exponent)
        with gm.graph.inserting_before(power):
            negative = gm.graph.call_function(aten.neg.default, (power.args[0],))
        negative.meta = dict(power.args[0].meta)
        power.update_arg(0, negative)

    return change


def drop_dim(gm: fx.GraphModule) -> None:
    (row_sum,) = (n for n in calls_of(gm, aten.sum.dim_IntList) if n.args[1] == [2])
    row_sum.update_arg(2, False)


def calls_of(gm: fx.GraphModule, target) -> list[fx.Node]:
    return list(gm.graph.find_nodes(op="call_function", target=target))


def backward_calls(*graphs: fx.GraphModule) -> list[fx.Node]:
    return [n for gm in graphs for n in calls_of(gm, torch.ops.fxfuse.rms_norm_bwd.default)]


NEAR_MISSES = {
    "another coefficient": set_argument(aten.mul.Scalar, 1, -0.5, -0.25),
    "another factor of h": set_argument(aten.mul.Scalar, 1, 2.0, 3.0),
    "another width": set_argument(aten.div.Scalar, 1, WIDTH, WIDTH - 1),
    "another power of rstd": set_argument(aten.pow.Tensor_Scalar, 1, 3, 2),
    "another power of h": set_argument(aten.pow.Tensor_Scalar, 1, 1.0, 3),
    "another dim": set_argument(aten.sum.dim_IntList, 1, [2], [1]),
    "a sum that drops its dim": drop_dim,
    "another h": negate_below(1.0),
    "another rstd": negate_below(3),
}


def test_the_gradient_of_one_norm(backward_graph):
    gm = copied(backward_graph)
    assert fxfuse.apply(gm).meta["fxfuse"].counts == {"backward_rms_norm": 1}
    assert backward_calls(gm)[0].kwargs["need_dweight"]


@pytest.mark.parametrize("change", NEAR_MISSES.values(), ids=NEAR_MISSES)
def test_what_only_looks_like_the_gradient_of_a_norm(backward_graph, change):
    gm = copied(backward_graph)
    change(gm)
    before = gm.graph.python_code("self").src
    assert not fxfuse.apply(gm).meta["fxfuse"].modified
    assert gm.graph.python_code("self").src == before


def test_a_dweight_that_is_summed_otherwise_stays(backward_graph):
    gm = copied(backward_graph)
    set_argument(aten.sum.dim_IntList, 1, [0, 1], [0])(gm)
    assert fxfuse.apply(gm).meta["fxfuse"].counts == {"backward_rms_norm": 1}
    assert not backward_calls(gm)[0].kwargs["need_dweight"]
    assert len(calls_of(gm, aten.sum.dim_IntList)) == 1


@pytest.mark.parametrize("same", [True, False])
def test_two_inputs_are_one_rstd_only_where_they_share_memory(same):
    """default_partition saves rstd and an alias of it."""
    gm = backward_of("default")
    (alias,) = (n for n in gm.graph.nodes if n.op == "placeholder" and n.name.startswith("detach"))
    if not same:
        alias.meta["val"] = alias.meta["val"].clone()
    assert fxfuse.apply(gm).meta["fxfuse"].modified == same


def test_a_graph_that_autograd_will_see_keeps_ops_with_gradients():
    class Returns(nn.Module):
        def forward(self, x):
            rstd = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
            return x * rstd, rstd

    program = torch.export.export(Returns(), (torch.randn(2, 8, requires_grad=True),))
    report = fxfuse.apply(program).graph_module.meta["fxfuse"]
    assert not report.modified
    assert ["also used by" in miss.reason for miss in report.misses] == [True]


# ---- the norm in one piece that PyTorch has on a GPU ---------------------------------------------


class Builder:
    """A graph after autograd, built call by call; its values are fake ones on a GPU."""

    def __init__(self) -> None:
        self.graph, self.mode = fx.Graph(), FakeTensorMode()

    def node(self, made: fx.Node, value: object) -> fx.Node:
        made.meta = {"val": value, "partitioner_tag": "is_forward"}
        return made

    def fake(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        with self.mode:
            return torch.empty(shape, dtype=dtype, device="cuda")

    def input(self, name: str, *shape: int, dtype: torch.dtype = torch.bfloat16) -> fx.Node:
        return self.node(self.graph.placeholder(name), self.fake(*shape, dtype=dtype))

    def call(self, target, *args, value: object) -> fx.Node:
        return self.node(self.graph.call_function(target, args), value)

    def apply(self, *outputs: fx.Node) -> fx.GraphModule:
        self.graph.output(outputs)
        return fxfuse.apply(fx.GraphModule({}, self.graph))


@pytest.mark.parametrize("with_add", [False, True])
def test_the_forward_of_a_norm_in_one_piece(with_add):
    g, shape = Builder(), (2, 5, WIDTH)
    x, residual, weight = g.input("x", *shape), g.input("residual", *shape), g.input("w", WIDTH)
    h = g.call(aten.add.Tensor, x, residual, value=g.fake(*shape)) if with_add else x
    values = g.fake(*shape), g.fake(2, 5, 1, dtype=torch.float32)
    norm = g.call(aten._fused_rms_norm.default, h, [WIDTH], weight, 1e-6, value=values)
    y, rstd = (g.call(operator.getitem, norm, i, value=values[i]) for i in range(2))
    gm = g.apply(y, rstd, h)
    assert gm.meta["fxfuse"].counts == {"add_rms_norm" if with_add else "rms_norm": 1}
    assert [tuple(n.meta["val"].shape) for n in gm.graph.output_node().args[0]] == [
        shape, (2, 5, 1), shape,
    ]  # fmt: skip

    a, b = inputs(torch.bfloat16, 2)
    w = torch.linspace(0.5, 1.5, WIDTH).bfloat16()
    got_y, got_rstd, got_h = gm(a, b, w)
    right_h = a + b if with_add else a
    wide = right_h.float()
    right = torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
    torch.testing.assert_close(got_rstd, right)
    torch.testing.assert_close(got_h, right_h, rtol=0, atol=0)
    torch.testing.assert_close(got_y, (wide * right * w).bfloat16())


def test_the_backward_of_a_norm_in_one_piece():
    g, shape = Builder(), (2, 5, WIDTH)
    one, two, dres, h = (g.input(name, *shape) for name in ("one", "two", "dres", "h"))
    rstd, weight = g.input("rstd", 2, 5, 1, dtype=torch.float32), g.input("w", WIDTH)
    dy = g.call(aten.add.Tensor, one, two, value=g.fake(*shape))
    values, mask = (g.fake(*shape), g.fake(WIDTH)), [True, True]
    op = aten._fused_rms_norm_backward.default
    norm = g.call(op, dy, h, [WIDTH], rstd, weight, mask, value=values)
    dx, dw = (g.call(operator.getitem, norm, i, value=values[i]) for i in range(2))
    total = g.call(aten.add.Tensor, dres, dx, value=g.fake(*shape))
    gm = g.apply(total, dw)
    assert gm.meta["fxfuse"].counts == {"backward_add_rms_norm": 1, "backward_sum_rms_norm": 1}

    a, b, c, x = (t.float() for t in inputs(torch.bfloat16, 4))
    w = torch.linspace(0.5, 1.5, WIDTH).requires_grad_()
    leaf = x.clone().requires_grad_()
    y = F.rms_norm(leaf, (WIDTH,), w, 1e-6)
    right = torch.autograd.grad((y, leaf), (leaf, w), (a + b, c))
    saved = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
    torch.testing.assert_close(gm(a, b, c, x, saved, w.detach()), right)
