"""What the rewrite does to a graph, and what it leaves as it was."""

from __future__ import annotations

import copy
import operator
import pickle

import pytest
import torch
from torch import fx, nn
from torch.fx.passes.infra.pass_manager import PassManager

import fxfuse
from fxfuse import fuel
from fxfuse.errors import BadGraph, BadOption, UnknownPattern
from fxfuse.options import Settings
from tests.dialects import DIALECTS, dynamo, exported
from tests.spellings import WIDTH, AddThenNorm, CastThenWeight, LeafModule

ADD = torch.ops.fxfuse.add_rms_norm.default
NORM = torch.ops.fxfuse.rms_norm.default


class Block(nn.Module):
    """Two adds and three norms; another reader of h stands before the weight of its norm."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.norms = nn.ModuleList(CastThenWeight(torch.float32) for _ in range(depth + 1))
        self.mixers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))

    def forward(self, h):
        for norm, mixer in zip(self.norms, self.mixers):
            h = h + mixer(norm(h))
            side = h * 0.5
            h = h + side
        return self.norms[-1](h)


def x() -> torch.Tensor:
    return torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(1))


def calls(gm: fx.GraphModule, target: object) -> list[fx.Node]:
    return gm.graph.find_nodes(op="call_function", target=target)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_chain_of_matches(dialect):
    model = Block()
    gm = fxfuse.apply(DIALECTS[dialect](model, (x(),)))
    assert gm.meta["fxfuse"].counts == {
        "add_rms_norm": 2, "rms_norm": 1, "backward_add_rms_norm": 1
    }  # fmt: skip
    gm.graph.lint()
    torch.testing.assert_close(gm(x()), model(x()))


def test_one_sum_that_feeds_two_norms():
    class Parallel(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = LeafModule(torch.float32), LeafModule(torch.float32)

        def forward(self, a, b):
            h = a + b
            return self.one(h), self.two(h) + h

    model = Parallel()
    gm = fxfuse.apply(fx.symbolic_trace(model))
    counts = gm.meta["fxfuse"].counts
    assert counts == {"add_rms_norm": 1, "rms_norm": 1, "backward_add_rms_norm": 1}
    for got, want in zip(gm(x(), x()), model(x(), x())):
        torch.testing.assert_close(got, want)


def test_norm_of_a_norm_behind_casts_that_do_nothing():
    """In fp32 the second norm reads through the casts, at a node inside the first."""

    def norm(x):
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).type_as(x)

    gm = fxfuse.apply(dynamo(lambda x: norm(norm(x)), (x(),)))
    assert gm.meta["fxfuse"].counts == {"rms_norm": 2}
    torch.testing.assert_close(gm(x())[0], norm(norm(x())))


def test_a_pattern_without_a_norm_is_tried_in_any_graph():
    from fxfuse.match import Fusion, square, var

    fusion = Fusion("square", square(var("x")), lambda b: b.decline("squares are cheap"))
    report = fxfuse.apply(fx.symbolic_trace(lambda x: x * x), patterns=[fusion]).meta["fxfuse"]
    assert [(m.pattern, m.reason) for m in report.misses] == [("square", "squares are cheap")]


def test_the_op_is_an_overload_and_keeps_names_and_metadata():
    gm = dynamo(AddThenNorm(CastThenWeight(torch.float32)), (x(), x()))
    y, h = gm.graph.output_node().args[0]
    before = {n.name: dict(n.meta) for n in (y, h)}
    fxfuse.apply(gm)
    (op,) = calls(gm, ADD)
    new_y, new_h = gm.graph.output_node().args[0]
    assert [n.name for n in (new_y, new_h)] == [y.name, h.name] == list(before)
    assert new_y.target is new_h.target is operator.getitem
    for node in (new_y, new_h):
        assert node.meta["example_value"] is before[node.name]["example_value"]
        assert node.meta["stack_trace"] == before[node.name]["stack_trace"]
    assert [v.shape for v in op.meta["example_value"]] == [x().shape, x().shape]
    assert op.meta["nn_module_stack"] == before[y.name]["nn_module_stack"]


def test_the_report_tells_where():
    gm = dynamo(Block(), (x(),))
    matches = fxfuse.apply(gm).meta["fxfuse"].matches
    assert [m.module for m in matches] == ["norms.0", "norms.1", "norms.2"]
    assert all(m.where.startswith("tests/") and m.where.split(":")[1].isdigit() for m in matches)
    assert matches[1].shapes == {"x": (2, 5, WIDTH), "residual": (2, 5, WIDTH), "weight": (WIDTH,)}


def test_dead_code_of_others_stays():
    def model(a, b):
        unused = a.sin()  # noqa: F841
        return nn.functional.rms_norm(a + b, (WIDTH,))

    gm = fxfuse.apply(fx.symbolic_trace(model))
    assert "sin" in gm.code and "fxfuse.add_rms_norm" in gm.code


def test_twice_is_once():
    gm = fxfuse.apply(fx.symbolic_trace(Block()))
    code = gm.code
    again = fxfuse.apply(gm)
    assert again is gm and gm.code == code
    assert not gm.meta["fxfuse"].modified


def test_same_input_same_result():
    codes = {fxfuse.apply(exported(Block(), (x(),))).code for _ in range(3)}
    assert len(codes) == 1


def test_empty_graph():
    graph = fx.Graph()
    graph.output(())
    gm = fx.GraphModule(nn.Module(), graph)
    assert fxfuse.apply(gm) is gm
    report = gm.meta["fxfuse"]
    assert not report.modified and report.counts == {} and report.misses == []


def test_exported_program_stays_valid():
    model = AddThenNorm(LeafModule(torch.float32))
    program = torch.export.export(model, (x(), x()))
    assert fxfuse.apply(program) is program
    assert program.graph_module.meta["fxfuse"].counts == {"add_rms_norm": 1}
    program.validate()
    for got, want in zip(program.module()(x(), x()), model(x(), x())):
        torch.testing.assert_close(got, want)


def test_inside_a_pass_manager():
    manager = PassManager(passes=[fxfuse.FusePass(), fxfuse.FusePass(policy="never")])
    result = manager(fx.symbolic_trace(Block()))
    assert result.modified
    assert len(calls(result.graph_module, ADD)) == 2


def test_nested_graphs():
    model = Block()

    def checkpointed(h):
        return torch.utils.checkpoint.checkpoint(model, h, use_reentrant=False)

    torch._dynamo.reset()
    with fxfuse.record() as reports:
        got = torch.compile(checkpointed, backend=fxfuse.make_backend("aot_eager"))(x())
    assert reports[0].counts == {"add_rms_norm": 2, "rms_norm": 1}
    torch.testing.assert_close(got, model(x()))


def test_policy_never_is_a_reason():
    gm = fxfuse.apply(fx.symbolic_trace(Block()), policy="never")
    report = gm.meta["fxfuse"]
    assert report.counts == {} and len(report.misses) == 3
    assert all("policy" in m.reason for m in report.misses)


def test_patterns_can_be_chosen():
    gm = fxfuse.apply(fx.symbolic_trace(Block()), patterns=["rms_norm"])
    assert gm.meta["fxfuse"].counts == {"rms_norm": 3}


def test_fuel_stops_after_n(monkeypatch):
    monkeypatch.setenv("FXFUSE_FUEL", "2")
    counts = [fxfuse.apply(fx.symbolic_trace(Block())).meta["fxfuse"].counts for _ in range(2)]
    assert sum(sum(c.values()) for c in counts) == 2
    monkeypatch.setenv("FXFUSE_FUEL", "many")
    with pytest.raises(BadOption, match="FXFUSE_FUEL"):
        fxfuse.apply(fx.symbolic_trace(Block()))


def test_fuel_of_a_context():
    def counts():
        return sum(fxfuse.apply(fx.symbolic_trace(Block())).meta["fxfuse"].counts.values())

    everything = counts()
    with fuel.limit(2):
        assert Settings().identity.endswith(" fuel 2")
        assert [counts(), counts()] == [2, 0]
        with fuel.limit(1):
            assert counts() == 1
    assert counts() == everything and "fuel" not in Settings().identity


def test_bad_arguments_change_nothing():
    gm = fx.symbolic_trace(Block())
    code = gm.code
    with pytest.raises(UnknownPattern, match=r"'nrom'.*add_rms_norm, rms_norm"):
        fxfuse.apply(gm, patterns=["nrom"])
    with pytest.raises(BadOption, match=r"'sometimes'.*auto, always, never"):
        fxfuse.apply(gm, policy="sometimes")
    with pytest.raises(BadGraph, match="not Block"):
        fxfuse.apply(Block())
    assert gm.code == code and "fxfuse" not in gm.meta


def test_rewritten_modules_copy_and_pickle():
    gm = fxfuse.apply(fx.symbolic_trace(Block()))
    for twin in (copy.deepcopy(gm), pickle.loads(pickle.dumps(gm))):
        torch.testing.assert_close(twin(x()), gm(x()))
    assert copy.deepcopy(gm).meta["fxfuse"].counts == gm.meta["fxfuse"].counts


def test_report_formats():
    import json

    gm = fxfuse.apply(dynamo(Block(), (x(),)))
    report = gm.meta["fxfuse"]
    assert report.graph_module is gm and report.modified and report.seconds > 0
    table = report.to_table()
    assert "norms.1" in table and "fused: 2 add_rms_norm, 1 rms_norm" in table
    data = json.loads(report.to_json())
    assert data["counts"] == report.counts and len(data["matches"]) == 3
    assert fxfuse.Report.merge([report, report]).counts == {"add_rms_norm": 4, "rms_norm": 2}


def test_a_joint_graph_names_what_keeps_the_norm():
    """In a graph with its backward the inner values are used again, by the gradient."""
    from torch.fx.experimental.proxy_tensor import make_fx

    norm = CastThenWeight(torch.float32)

    def step(a):
        return torch.autograd.grad(norm(a).square().sum(), (a, norm.weight))

    gm = make_fx(step)(x().requires_grad_())
    report = fxfuse.apply(gm).meta["fxfuse"]
    assert report.counts == {}
    assert all("is also used by" in m.reason for m in report.misses) and report.misses
    for got, want in zip(gm(x()), step(x().requires_grad_())):
        torch.testing.assert_close(got, want)


def test_part_of_an_input_where_a_number_could_be():
    def model(a):
        first = a[:1]
        h = torch.rms_norm(first, (WIDTH,), eps=1e-5) + first
        return h * h.square()

    gm = fxfuse.apply(fx.symbolic_trace(model))
    torch.testing.assert_close(gm(x()), model(x()))
    assert gm.meta["fxfuse"].counts == {"rms_norm": 1, "backward_add_rms_norm": 1}
