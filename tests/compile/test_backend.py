"""The backend inside torch.compile: numbers, options, hooks, caches. Tiny models, few of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxfuse
from fxfuse.errors import BadOption, UnknownOption, UnknownPattern
from tests.spellings import WIDTH, AddThenNorm, CastThenWeight, WeightThenCast


class Model(nn.Module):
    """Both orders of the cast, with a matrix product between."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first, self.second = CastThenWeight(dtype), WeightThenCast(dtype)
        self.mixer = nn.Linear(WIDTH, WIDTH, bias=False, dtype=dtype)

    def forward(self, x, residual):
        h = x + residual
        h = h + self.mixer(self.first(h))
        return self.second(h), h


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()


def inputs(dtype: torch.dtype, rows: int = 6) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, rows, WIDTH, generator=generator).to(dtype) for _ in range(2)]


def run(model, call, args):
    """Outputs, then the gradients of inputs and parameters."""
    model.zero_grad(set_to_none=True)
    leaves = [a.clone().requires_grad_() for a in args]
    y, h = call(*leaves)
    (y.float().square().sum() + h.float().sum()).backward()
    return [y.detach(), h.detach()], [t.grad for t in (*leaves, *model.parameters())]


def relative_error(got: torch.Tensor, right: torch.Tensor) -> float:
    return ((got.double() - right).norm() / right.norm()).item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("policy", ["auto", "always"])
def test_inductor_trains_with_the_right_numbers(dtype, policy):
    torch.manual_seed(0)
    model = Model(dtype)
    with fxfuse.record() as reports:
        compiled = torch.compile(model, backend=fxfuse.make_backend(policy=policy))
        got = run(model, compiled, inputs(dtype))
    assert [r.counts for r in reports] == [{"add_rms_norm": 2}]
    want = run(model, model, inputs(dtype))
    wide = Model(torch.float64)
    wide.load_state_dict({k: v.double() for k, v in model.state_dict().items()})
    right = run(wide, wide, [a.double() for a in inputs(dtype)])
    for ours, eager, true in zip(got[0] + got[1], want[0] + want[1], right[0] + right[1]):
        assert ours.dtype == eager.dtype
        bound = max(1.1 * relative_error(eager, true), 4 * 2**-23)
        assert relative_error(ours, true) <= bound


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_inductor_keeps_the_roundings(dtype):
    for norm in (CastThenWeight(dtype), WeightThenCast(dtype)):
        model = AddThenNorm(norm)
        with torch.no_grad():
            got = torch.compile(model, backend=fxfuse.backend)(*inputs(dtype, 40))
            want = model(*inputs(dtype, 40))
        assert torch.equal(got[1], want[1])
        assert (got[0] == want[0]).float().mean() >= 0.99


def test_frozen_weight_and_inference_mode():
    model = Model(torch.float32)
    model.first.weight.requires_grad_(False)
    compiled = torch.compile(model, backend=fxfuse.make_backend("aot_eager"))
    run(model, compiled, inputs(torch.float32))
    assert model.first.weight.grad is None and model.second.weight.grad is not None
    with torch.inference_mode():
        for got, want in zip(compiled(*inputs(torch.float32)), model(*inputs(torch.float32))):
            torch.testing.assert_close(got, want)


def test_autocast_keeps_its_dtypes():
    model = Model(torch.float32)

    def step(x, residual):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(x, residual)

    with fxfuse.record() as reports:
        got = torch.compile(step, backend=fxfuse.make_backend("aot_eager"))(*inputs(torch.float32))
    assert sum(r.counts.get("add_rms_norm", 0) for r in reports) == 2
    for one, other in zip(got, step(*inputs(torch.float32))):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


def test_backend_by_name():
    assert "fxfuse" in torch.compiler.list_backends()
    model = AddThenNorm(CastThenWeight(torch.float32))
    with fxfuse.record() as reports:
        torch.compile(model, backend="fxfuse")(*inputs(torch.float32))
    assert reports[0].counts == {"add_rms_norm": 1}


def test_counters_and_records():
    from torch._dynamo.utils import counters

    counters["fxfuse"].clear()
    model = AddThenNorm(CastThenWeight(torch.float32))
    with fxfuse.record() as outer, fxfuse.record() as inner:
        torch.compile(model, backend=fxfuse.make_backend("eager"))(*inputs(torch.float32))
    assert len(outer) == len(inner) == 1 and counters["fxfuse"]["add_rms_norm"] == 1
    torch._dynamo.reset()
    torch.compile(model, backend=fxfuse.make_backend("eager"))(*inputs(torch.float32))
    assert len(outer) == 1


def failure(model, **kwargs) -> BaseException:
    """What torch.compile raised, out of the wrapper that Dynamo puts around a backend's error."""
    with pytest.raises(Exception) as caught:
        torch.compile(model, **kwargs)(*inputs(torch.float32))
    return getattr(caught.value, "inner_exception", caught.value)


def test_options():
    model = AddThenNorm(CastThenWeight(torch.float32))
    compiled = torch.compile(
        model,
        backend=fxfuse.backend,
        options={"fxfuse.patterns": ["rms_norm"], "epilogue_fusion": False},
    )
    with fxfuse.record() as reports:
        compiled(*inputs(torch.float32))
    assert reports[0].counts == {"rms_norm": 1}


def test_bad_options():
    model = AddThenNorm(CastThenWeight(torch.float32))
    error = failure(model, backend=fxfuse.backend, options={"fxfuse.polcy": "auto"})
    assert isinstance(error, UnknownOption) and "fxfuse.policy" in str(error)
    error = failure(model, backend=fxfuse.backend, options={"fxfuse.policy": "fast"})
    assert isinstance(error, BadOption) and "'fast'" in str(error)
    error = failure(model, backend=fxfuse.backend, options={"fxfuse.patterns": ["nrom"]})
    assert isinstance(error, UnknownPattern)
    error = failure(model, backend=fxfuse.make_backend("eager"), options={"max_autotune": True})
    assert isinstance(error, BadOption) and "max_autotune" in str(error)
    with pytest.raises(BadOption, match="inner"):
        fxfuse.make_backend("no_such_backend")
    with pytest.raises(BadOption, match="policy"):
        fxfuse.make_backend(policy="fast")


def test_inductor_options_and_a_hook_that_is_set_already():
    seen = []

    def mine(graph):
        seen.append(len(list(graph.nodes)))

    options = fxfuse.inductor_options({"post_grad_custom_pre_pass": mine, "fx_graph_cache": False})
    model = Model(torch.float32)
    with fxfuse.record() as reports, torch.no_grad():
        got = torch.compile(model, options=options)(*inputs(torch.float32))
    assert fxfuse.Report.merge(reports).counts == {"add_rms_norm": 2}
    assert seen
    for one, other in zip(got, model(*inputs(torch.float32))):
        torch.testing.assert_close(one, other)


def test_hooks_of_two_sides_have_one_identity():
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class Mine(CustomGraphPass):
        def __call__(self, graph):
            pass

        def uuid(self):
            return "mine"

    alone = fxfuse.inductor_options()["post_grad_custom_pre_pass"].uuid()
    both = fxfuse.inductor_options({"post_grad_custom_pre_pass": Mine()})
    assert both["post_grad_custom_pre_pass"].uuid() == ("mine", *alone)
    assert (
        fxfuse.inductor_options({"post_grad_custom_pre_pass": print})[
            "post_grad_custom_pre_pass"
        ].uuid()
        is None
    )


def test_dynamic_rows_compile_once():
    model = Model(torch.float32)
    backend = fxfuse.make_backend("aot_eager")
    with fxfuse.record() as reports:
        compiled = torch.compile(model, backend=backend, dynamic=True)
        for rows in range(3, 12):
            args = inputs(torch.float32, rows)
            for got, want in zip(compiled(*args), model(*args)):
                torch.testing.assert_close(got, want)
    assert [r.counts for r in reports] == [{"add_rms_norm": 2}]


def test_always_leaves_one_op_in_each_direction():
    """What a compiler sees: one opaque forward, one opaque backward, nothing of the norm beside."""
    from torch._dynamo.backends.common import aot_autograd

    graphs = []

    def keep(gm, example_inputs):
        graphs.append([str(n.target) for n in gm.graph.nodes if n.op == "call_function"])
        return gm

    model = AddThenNorm(CastThenWeight(torch.bfloat16))
    inner = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    compiled = torch.compile(model, backend=fxfuse.make_backend(inner, policy="always"))
    run(model, compiled, inputs(torch.bfloat16))
    forward, backward = ([t for t in g if "getitem" not in t and "detach" not in t] for g in graphs)
    assert forward == ["fxfuse.add_rms_norm_fwd.default"]
    assert backward == ["fxfuse.rms_norm_bwd.default"]


def test_inductor_options_take_our_keys():
    options = fxfuse.inductor_options({"fxfuse.policy": "never", "max_autotune": False})
    assert not any(key.startswith("fxfuse.") for key in options) and "max_autotune" in options
    torch.manual_seed(0)
    model = Model(torch.float32)
    with fxfuse.record() as reports:
        torch.compile(model, options=options)(*inputs(torch.float32))
    assert [r.counts for r in reports] == [{}]
    with pytest.raises(BadOption):
        fxfuse.inductor_options({"fxfuse.policy": "x"})
    with pytest.raises(UnknownOption):
        fxfuse.inductor_options({"fxfuse.polcy": "auto"})


def test_a_weight_whose_values_lie_apart():
    """Inductor's code for the backward would keep one row in a buffer while it walks several."""

    def gated(r, w):
        product = r.detach() * (r.sigmoid() * r)
        return torch.sqrt((product**2).mean(-1, keepdim=True)).reciprocal() * product * w

    r, w = torch.randn(4, 3, 32, requires_grad=True), torch.randn(64)[::2]
    assert fxfuse.explain(gated, r, w).matches[0].policy.startswith("kernel")
    dy = torch.linspace(-1, 1, r.numel()).view_as(r)
    found, expected = (
        torch.autograd.grad(f(r, w), r, dy)
        for f in (torch.compile(gated, backend=fxfuse.backend), gated)
    )
    torch.testing.assert_close(found, expected)
