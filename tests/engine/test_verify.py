"""verify: right models are good, wrong rewrites are found and named, and nothing is changed."""

from __future__ import annotations

import copy
import dataclasses
import json
import random
import textwrap

import pytest
import torch
from torch import nn

import fxfuse
from fxfuse import errors, fuel, judge, registry
from fxfuse.match import Call

ROWS, WIDTH = 6, 16


class Block(nn.Module):
    """Adds and norms; with dropout, and with statistics that a forward changes."""

    def __init__(self, dropout: float = 0.0, statistics: bool = False) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH, 1e-6)
        self.mixer = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.statistics = nn.BatchNorm1d(WIDTH) if statistics else nn.Identity()
        self.calls = 0

    def forward(self, x, residual):
        self.calls += 1
        h = x + residual
        return self.statistics(self.dropout(self.mixer(self.norm(h)))), h


class Stack(nn.Module):
    def __init__(self, depth: int = 3, **options) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(**options) for _ in range(depth))
        for i, layer in enumerate(self.layers):
            nn.init.normal_(layer.norm.weight, 1 + i)

    def forward(self, x, residual):
        for layer in self.layers:
            x, residual = layer(x, residual)
        return x + residual


class Watched(nn.Module):
    """One norm, with something done to its result."""

    def __init__(self, then) -> None:
        super().__init__()
        self.norm, self.then = nn.RMSNorm(WIDTH), then

    def forward(self, x):
        return self.then(self.norm(x))


@dataclasses.dataclass
class Output:
    y: torch.Tensor
    others: dict


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def pair(dtype=torch.float32, **options):
    return [torch.randn(ROWS, WIDTH, dtype=dtype, **options) for _ in range(2)]


def changed(name, change, module="", pattern="add_rms_norm"):
    """The pattern of fxfuse, with another call at the sites of `module`."""
    right = registry.patterns()[pattern]

    def build(b):
        call = right.build(b)
        here = module in str(b.root.meta.get("nn_module_stack"))
        return change(call) if isinstance(call, Call) and here else call

    return dataclasses.replace(right, name=name, build=build)


def wrong_eps(call):
    return dataclasses.replace(call, kwargs={**call.kwargs, "eps": 0.05})


def names(found):
    return {one.name for one in found}


# ---- what is right ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "inner"), [(torch.float32, "aot_eager"), (torch.bfloat16, "eager")], ids=str
)
def test_a_model_with_dropout_and_statistics(dtype, inner):
    model = Stack(dropout=0.3, statistics=True).to(dtype)
    x, residual = pair(dtype)
    found = fxfuse.verify(model, x.requires_grad_(), residual, inner=inner)
    assert found and found.ok and found.first_bad is None and found.reason == ""
    assert found.report.counts == {"add_rms_norm": 3}
    assert [(s.module, s.ok) for s in found.sites] == [(f"layers.{i}.norm", True) for i in range(3)]
    assert all("test_verify.py:" in s.where and s.op == "fxfuse::add_rms_norm" for s in found.sites)
    assert {"output", "changed buffer layers.2.statistics.running_var"} <= names(found.outputs)
    assert "changed buffer layers.2.statistics.num_batches_tracked" in names(found.outputs)
    parameters = {name for name, _ in model.named_parameters()}
    assert names(found.gradients) == parameters | {"input[0]"}
    for one in (*found.outputs, *found.gradients):
        assert one.ok and one.by == ("equal" if one.dtype == "int64" else "fp64"), one
    site = found.sites[0]
    assert any(one.name.startswith("gradient of ") for one in site.compared)
    assert all(one.by == "fp64" for one in site.compared)


def test_with_inductor_dropout_agrees_too():
    model = Watched(nn.Dropout(0.5))
    found = fxfuse.verify(model, pair()[0], inner="inductor", policy="always")
    assert found.ok, found
    assert found.sites[0].policy.startswith("kernel: policy is always")


def test_nested_outputs_tied_weights_and_kwargs():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(20, WIDTH)
            self.head = nn.Linear(WIDTH, 20, bias=False)
            self.head.weight = self.embedding.weight
            self.norm = nn.RMSNorm(WIDTH)

        def forward(self, ids, *, scale):
            h = self.embedding(ids) * scale
            y = self.head(self.norm(h))
            return Output(y, {"best": y.argmax(-1), "h": [h, None, 3, "words"]})

    scale = torch.ones(WIDTH, requires_grad=True)
    found = fxfuse.verify(Tied(), torch.arange(ROWS), scale=scale)
    assert found.ok, found
    assert names(found.gradients) == {"embedding.weight", "norm.weight", "input.scale"}
    outputs = {one.name: one for one in found.outputs}
    assert {"output.y", "output.others.best", "output.others.h[0]"} <= set(outputs)
    assert outputs["output.others.best"].by == "equal"


def test_functions_and_what_they_capture():
    norm = nn.RMSNorm(WIDTH)
    shift = torch.zeros(WIDTH, requires_grad=True)

    def f(x):
        return norm(x + shift)

    found = fxfuse.verify(f, pair()[0])
    assert found.ok and names(found.gradients) == {"norm.weight", "shift"}
    assert norm.weight.grad is None and shift.grad is None


def test_without_gradients():
    found = fxfuse.verify(Stack(1), *pair(), train=False)
    assert found.ok and not found.gradients and "forward only" in str(found)
    assert not any(one.name.startswith("gradient") for one in found.sites[0].compared)


def test_graph_breaks_and_checkpoints():
    from torch.utils.checkpoint import checkpoint

    first, second = (Watched(torch.sin) for _ in range(2))

    def broken(x, residual):
        x = checkpoint(lambda x, r: first(x + r), x, residual, use_reentrant=False)
        if x.sum().item() > 1e9:
            x = x * 2
        return second(x + residual)

    x, residual = pair(requires_grad=True)
    found = fxfuse.verify(broken, x, residual, inner="eager")
    assert found.ok, found
    assert found.report.counts == {"add_rms_norm": 2}
    assert [site.ok for site in found.sites] == [True, True]


def test_sites_after_autograd_are_part_of_the_whole():
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.RMSNorm(WIDTH)
            self.q, self.k = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            y = self.norm(x)
            return self.q(y), self.k(y)

    x = pair(requires_grad=True)[0]
    found = fxfuse.verify(Heads(), x)
    assert found.ok
    alone = {site.pattern: site.ok for site in found.sites}
    assert alone == {"rms_norm": True, "backward_sum_rms_norm": None}


def test_nothing_fused_is_good_with_the_reason():
    found = fxfuse.verify(nn.Linear(4, 4), torch.ones(2, 4), inner="eager")
    assert found.ok and not found.sites and found.reason.startswith("nothing was fused: there is")
    found = fxfuse.verify(Stack(1), *pair(), inner="eager", policy="never")
    assert found.ok and "nothing was fused: the policy" in str(found)


# ---- the state ----------------------------------------------------------------------------------


def state(model):
    grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    calls = [layer.calls for layer in model.layers]
    return copy.deepcopy(model.state_dict()), grads, calls


def same(one, other):
    for mine, theirs in zip(one[1], other[1]):
        assert (mine is None and theirs is None) or torch.equal(mine, theirs)
    for name, value in one[0].items():
        assert torch.equal(value, other[0][name]), name
    assert one[2] == other[2]


@pytest.mark.parametrize("ends", ["good", "wrong", "raises"])
def test_everything_is_as_before(ends):
    class Ends(Stack):
        def forward(self, x, residual):
            y = super().forward(x.mul_(1), residual)
            if ends == "raises":
                raise KeyError("the shop is closed")
            return y

    model, (x, residual) = Ends(2, dropout=0.3, statistics=True), pair()
    Stack.forward(model, x, residual).sum().backward()
    residual.requires_grad_()
    before, given = state(model), [x.clone(), residual.clone()]
    seeds = torch.get_rng_state(), random.getstate()
    dtype, config = torch.get_default_dtype(), torch._dynamo.config.get_config_copy()
    patterns = [changed("wrong", wrong_eps)] if ends == "wrong" else None
    if ends == "raises":
        with pytest.raises(KeyError, match="the shop is closed"):
            fxfuse.verify(model, x, residual, inner="eager")
    else:
        assert fxfuse.verify(model, x, residual, patterns=patterns).ok == (ends == "good")
    same(state(model), before)
    assert torch.equal(x, given[0]) and torch.equal(residual, given[1]) and residual.grad is None
    assert torch.equal(torch.get_rng_state(), seeds[0]) and random.getstate() == seeds[1]
    assert torch.get_default_dtype() == dtype and torch.is_grad_enabled()
    assert torch._dynamo.config.get_config_copy() == config and fuel.left() is None


# ---- what is wrong ------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_the_wrong_site_is_named(layer):
    wrong = changed("wrong", wrong_eps, f"layers.{layer}.")
    found = fxfuse.verify(Stack(), *pair(requires_grad=True), patterns=[wrong], inner="eager")
    assert not found and not found.ok
    assert found.first_bad.module == f"layers.{layer}.norm"
    assert [s.module for s in found.sites if s.ok is False] == [found.first_bad.module]
    assert found.fuel == 3 - layer  # from the end of the graph
    assert "output: rms error" in found.reason
    assert f"first site that differs: wrong, layers.{layer}.norm" in str(found)


def test_of_many_wrong_sites_the_first_that_is_rewritten_is_named():
    wrong = changed("wrong", wrong_eps)
    found = fxfuse.verify(Stack(), *pair(requires_grad=True), patterns=[wrong], inner="eager")
    assert found.fuel == 1 and found.first_bad.module == "layers.2.norm"
    assert [site.ok for site in found.sites] == [False] * 3


_Lib = torch.library.Library("fxfuse_tests_verify", "FRAGMENT")


class _HalfGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return nn.functional.rms_norm(x, weight.shape, weight, eps)

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        with torch.enable_grad():
            x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
            y = nn.functional.rms_norm(x, weight.shape, weight, ctx.eps)
            dx, dw = torch.autograd.grad(y, (x, weight), dy)
        return dx, dw * 0.5, None


_Lib.define("half_gradient(Tensor x, Tensor weight, float eps) -> Tensor")
_Lib.impl("half_gradient", _HalfGradient.apply, "CompositeImplicitAutograd")
_Lib.define("no_nan(Tensor x, Tensor weight, float eps) -> Tensor")
_Lib.impl(
    "no_nan",
    lambda x, w, eps: nn.functional.rms_norm(x, w.shape, w, eps).nan_to_num(),
    "CompositeImplicitAutograd",
)
_Lib.define("raises(Tensor x, Tensor weight, float eps) -> Tensor")


def _raise(x, weight, eps):
    raise RuntimeError("out of order")


_Lib.impl("raises", _raise, "CompositeImplicitAutograd")


def other_op(name, module="layers.1."):
    """rms_norm with another op at one of the sites."""
    op = getattr(torch.ops.fxfuse_tests_verify, name).default

    def change(call):
        return Call(op, (*call.args[:2], 1e-6), {}, ("y",), 0, None, None, None)

    return changed(name, change, module, pattern="rms_norm")


def test_wrong_in_the_gradient_alone():
    found = fxfuse.verify(Stack(), *pair(), patterns=[other_op("half_gradient")], inner="eager")
    assert not found.ok and all(one.ok for one in found.outputs)
    assert [one.name for one in found.gradients if not one.ok] == ["layers.1.norm.weight"]
    assert found.first_bad.module == "layers.1.norm" and found.fuel == 2
    (bad,) = [one for one in found.first_bad.compared if not one.ok]
    assert bad.name.startswith("gradient of ") and "weight" in bad.name


def test_nan_in_other_places():
    x, residual = pair()
    x[2, 3] = float("nan")
    assert fxfuse.verify(Stack(), x, residual, inner="eager").ok
    found = fxfuse.verify(Stack(), x, residual, patterns=[other_op("no_nan")], inner="eager")
    assert not found.ok and found.first_bad.module == "layers.1.norm"
    site = found.first_bad.compared[0]
    assert site.problem == f"NaN in {WIDTH} places eager, in 0 fused"


def test_a_rewrite_that_raises_is_named():
    patterns = [other_op("raises")]
    found = fxfuse.verify(Stack(), *pair(), patterns=patterns, inner="eager")
    assert not found.ok and found.first_bad.module == "layers.1.norm"
    assert "the model raises RuntimeError: out of order" in found.reason


def test_a_site_that_the_whole_does_not_show():
    """What is wrong goes nowhere, and is wrong all the same."""
    model = Stack()
    nn.init.zeros_(model.layers[2].mixer.weight)
    x, residual = pair()
    wrong = changed("wrong", wrong_eps, "layers.2.")
    found = fxfuse.verify(model, x, residual, patterns=[wrong], inner="eager", train=False)
    assert not found.ok and all(one.ok for one in found.outputs)
    assert found.first_bad.module == "layers.2.norm" and "not a site alone" in found.reason


def test_a_model_that_differs_from_itself():
    state = {"calls": 0}

    def drifting(y):
        state["calls"] += 1
        return y + state["calls"]

    found = fxfuse.verify(Watched(drifting), pair()[0], inner="eager")
    assert not found.ok and not found.deterministic and found.first_bad is None
    assert found.reason.startswith("the model is not deterministic: two eager runs differ, output")
    assert all(site.ok is None for site in found.sites)


def test_a_compiler_that_is_wrong_by_itself_is_not_our_fault():
    def wrong(gm, example_inputs):
        return lambda *args: [out * 2 for out in gm(*args)]

    found = fxfuse.verify(Stack(1), *pair(), inner=wrong)
    assert not found.ok and found.first_bad is None
    assert found.reason.startswith("wrong differs from eager without a rewrite: output")
    assert found.sites[0].ok is True


def test_a_compiler_that_fails_by_itself():
    def fails(gm, example_inputs):
        raise RuntimeError("no compiler today")

    with pytest.raises(errors.InnerFailed, match=r"no compiler today.*'eager'"):
        fxfuse.verify(Stack(1), *pair(), inner=fails)


# ---- what it is asked ---------------------------------------------------------------------------


def test_bad_arguments():
    with pytest.raises(errors.BadOption, match="'perhaps'"):
        fxfuse.verify(Stack(1), *pair(), policy="perhaps")
    with pytest.raises(errors.BadOption, match="inner"):
        fxfuse.verify(Stack(1), *pair(), inner="nobody")
    with pytest.raises(errors.UnknownPattern):
        fxfuse.verify(Stack(1), *pair(), patterns=["rms_nrom"])
    with pytest.raises(errors.NoValues, match="meta device"):
        fxfuse.verify(Stack(1).to("meta"), *pair())
    model = Stack(1)
    model.computed = model.layers[0].norm.weight * 2
    with pytest.raises(errors.CannotCopy, match=r"copy\.deepcopy"):
        fxfuse.verify(model, *pair())


def test_a_pattern_that_raises_is_an_error_of_the_pattern():
    def fails(call):
        raise KeyError("width")

    with pytest.raises(errors.BadPattern, match="its build raised KeyError"):
        fxfuse.verify(Stack(1), *pair(), patterns=[changed("fails", fails)], inner="eager")


def test_fuel_of_the_environment_holds(monkeypatch):
    monkeypatch.setenv("FXFUSE_FUEL", "2")
    wrong = changed("wrong", wrong_eps, "layers.0.")  # the third from the end
    found = fxfuse.verify(Stack(), *pair(), patterns=[wrong], inner="eager")
    assert found.ok and len(found.sites) == 2
    assert fuel.left() == 2


def test_json_and_table():
    wrong = changed("wrong", wrong_eps, "layers.1.")
    found = fxfuse.verify(Stack(), *pair(), patterns=[wrong], inner="eager")
    data = json.loads(found.to_json())
    assert set(data) == {
        "ok", "reason", "deterministic", "inner", "policy", "train", "counts", "overall",
        "first_bad", "fuel", "sites", "outputs", "gradients", "misses",
    }  # fmt: skip
    assert data["ok"] is False and data["counts"] == {"wrong": 3} and data["fuel"] == 2
    assert data["first_bad"]["module"] == "layers.1.norm"
    assert set(data["outputs"][0]) == {
        "name", "ok", "dtype", "shape", "by", "eager_error", "fused_error", "allowed", "measure",
        "problem",
    }  # fmt: skip
    assert data["overall"]["gradients"]["tensors"] == len(found.gradients)
    assert data["overall"]["gradients"]["fused_error"] > data["overall"]["gradients"]["eager_error"]
    assert str(found) == found.to_table()
    assert max(map(len, found.to_table().splitlines())) <= 80
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.ok = True


# ---- the judge ----------------------------------------------------------------------------------


def verdict(eager, fused, truth=None, moved=()):
    (one,) = judge.compare({"t": eager}, {"t": fused}, truth and {"t": truth[0]}, moved)
    return one


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_eager_is_not_the_truth(dtype):
    """As near to fp64 as eager is good, on either side; much farther is not."""
    right = torch.randn(1000, dtype=torch.float64)
    eager = right.to(dtype)
    apart = (eager.double() - right).square().mean().sqrt() / right.square().mean().sqrt()
    other = (right - (eager.double() - right)).to(dtype)
    assert verdict(eager, other, [right]).ok
    factor = 1 + 2 * apart + 6 * torch.finfo(dtype).eps
    far = verdict(eager, (eager.double() * factor).to(dtype), [right])
    assert not far.ok and far.by == "fp64" and far.measure in ("rms", "largest")
    assert far.fused_error > far.allowed > far.eager_error


def test_one_element_of_many():
    eager = torch.randn(100_000)
    fused = eager.clone()
    fused[7] += 1e-2
    one = verdict(eager, fused, [eager.double()])
    assert not one.ok and one.measure == "largest"


def test_a_truth_of_another_function_is_not_used():
    eager = torch.randn(100)
    assert verdict(eager, eager * 1.1, [eager.double() * 1.1]).by == "tolerance"
    assert not verdict(eager, eager * 1.1, [eager.double() * 1.1]).ok
    assert verdict(eager, eager * (1 + 5e-6)).ok
    assert not verdict(eager, eager * (1 + 5e-5)).ok


def test_how_far_a_model_moves_by_itself():
    eager = torch.tensor(1e-3)
    fused = torch.tensor(1.1e-3)
    near, far = [{"t": torch.tensor(1.01e-3)}], [{"t": torch.tensor(1.06e-3)}]
    assert not verdict(eager, fused).ok
    assert not verdict(eager, fused, moved=near).ok
    one = verdict(eager, fused, moved=far)
    assert one.ok and one.by == "moved" and one.allowed == pytest.approx(0.12, rel=1e-2)


@pytest.mark.parametrize(
    ("eager", "fused", "words"),
    [
        ([1.0, torch.inf], [1.0, -torch.inf], "inf in 1 places eager, in 0 fused"),
        ([torch.nan, 1.0], [1.0, torch.nan], "not the same ones"),
        ([1.0, 2.0], [1.0], "fused it is 1 float32, eager 2 float32"),
    ],
)
def test_places_and_shapes(eager, fused, words):
    one = verdict(torch.tensor(eager), torch.tensor(fused))
    assert not one.ok and words in one.problem
    assert verdict(torch.tensor(eager), torch.tensor(eager)).ok


def test_other_values():
    assert not verdict(torch.ones(2), torch.ones(2).double()).ok
    assert verdict(None, None).ok and not verdict(None, torch.ones(2)).ok
    assert verdict("a", "a").ok and not verdict("a", "b").ok
    assert not verdict(torch.tensor([1, 2]), torch.tensor([1, 3])).ok
    assert verdict(torch.zeros(3), torch.zeros(3), [torch.zeros(3).double()]).ok
    assert verdict(torch.zeros(0), torch.zeros(0)).ok
    assert verdict(torch.ones(2) * 1j, torch.ones(2) * 1j, [torch.ones(2).double() * 1j]).ok
    (one,) = judge.compare({"a": torch.ones(1)}, {})
    assert not one.ok and one.problem == "it is missing in the fused run"


def test_fp64_reaches_through_casts_and_a_norm_without_eps():
    from fxfuse import in_double

    norm = nn.RMSNorm(WIDTH)
    x = pair()[0] * 1e-3
    wide = copy.deepcopy(norm).double()
    with in_double.running():
        got = wide(x.double().float().half()) + torch.zeros(WIDTH)
    eps = torch.finfo(torch.float32).eps
    want = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + eps)
    torch.testing.assert_close(got, want, rtol=1e-14, atol=0)
    assert torch.get_default_dtype() == torch.float32


def test_patterns_of_a_file(tmp_path):
    file = tmp_path / "wrong_square.py"
    file.write_text(
        textwrap.dedent(
            """
            import fxfuse, torch
            from fxfuse.match import square, var

            @fxfuse.pattern("wrong_square", square(var("x")), size=99)
            def build(b):
                return b.call(torch.ops.aten.abs.default, b.x, outputs=("y",))
            """
        )
    )
    registry.load_file(file)
    try:
        found = fxfuse.verify(lambda x: x.sin() ** 2, pair()[0], inner="eager")
    finally:
        del registry._KNOWN["wrong_square"]
    assert not found.ok and found.first_bad.pattern == "wrong_square"
