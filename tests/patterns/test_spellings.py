"""Every spelling of RMSNorm, alone and after a residual add, from every tracer, bit for bit."""

from __future__ import annotations

import inspect

import pytest
import torch

import fxfuse
from tests.dialects import DIALECTS
from tests.spellings import HALVES, SPELLINGS, WIDTH, AddThenNorm

DTYPES = ((torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16),
          (torch.bfloat16, torch.float32), (torch.float16, torch.float16),
          (torch.float32, torch.bfloat16))  # fmt: skip
SLOW = ("export", "core_aten")  # seconds a trace: two dtypes show their dialect


def inputs(dtype: torch.dtype) -> tuple:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(3, 8, WIDTH, generator=generator).to(dtype) for _ in range(2))


def step(want: torch.Tensor) -> torch.Tensor:
    """One unit in the last place of each element, as fp32."""
    bits = {torch.float16: 10, torch.bfloat16: 7, torch.float32: 23}[want.dtype]
    return torch.exp2(torch.floor(torch.log2(want.abs().float().clamp_min(1e-30))) - bits)


def assert_equals_eager(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.dtype == want.dtype and got.shape == want.shape
    if want.dtype in HALVES:
        assert (got == want).float().mean() >= 0.99
        assert ((got.float() - want.float()).abs() <= 2 * step(want)).all()
    else:
        assert ((got - want).abs() <= 8 * step(want)).all()


def expected(spelling: type, dialect: str, x_dtype: torch.dtype) -> bool:
    if dialect == "symbolic_trace":
        return not spelling.needs_dtypes
    return not (spelling.fp32_only and x_dtype in HALVES)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda s: s.__name__)
def test_add_and_norm_is_found_and_exact(spelling, dialect):
    if spelling.untraceable and dialect == "symbolic_trace":
        pytest.skip("torch.fx.symbolic_trace cannot trace a branch on a dtype")
    for x_dtype, w_dtype in DTYPES[1:3] if dialect in SLOW else DTYPES:
        model, args = AddThenNorm(spelling(w_dtype)), inputs(x_dtype)
        want = model(*args)
        gm = fxfuse.apply(DIALECTS[dialect](model, args))
        report = gm.meta["fxfuse"]
        if expected(spelling, dialect, x_dtype):
            assert report.counts == {"add_rms_norm": 1}, (x_dtype, w_dtype, report.misses)
        else:
            assert report.counts == {} and len(report.misses) == 1
        for got, right in zip(gm(*args), want):
            assert_equals_eager(got, right)


@pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda s: s.__name__)
def test_dynamo_hands_over_the_same_match(spelling):
    for dtype in (torch.float32, torch.bfloat16):
        model, args = AddThenNorm(spelling(dtype)), inputs(dtype)
        torch._dynamo.reset()
        with fxfuse.record() as reports:
            got = torch.compile(model, backend=fxfuse.make_backend("eager"))(*args)
        found = expected(spelling, "dynamo", dtype)
        assert [r.counts for r in reports] == [{"add_rms_norm": 1} if found else {}]
        for one, right in zip(got, model(*args)):
            assert_equals_eager(one, right)


@pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda s: s.__name__)
def test_norm_alone(spelling):
    model, (x, _) = spelling(torch.float32), inputs(torch.float32)
    gm = fxfuse.apply(torch.export.export(model, (x,)).module())
    assert gm.meta["fxfuse"].counts == {"rms_norm": 1}
    assert_equals_eager(gm(x), model(x))


@pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda s: s.__name__)
def test_gradients(spelling):
    model, args = AddThenNorm(spelling(torch.float32)), inputs(torch.float32)
    gm = fxfuse.apply(torch.export.export(model, args).module())
    grads = []
    for run in (model, gm):
        leaves = [a.clone().requires_grad_() for a in args]
        y, h = run(*leaves)
        (y.square().sum() + (h * torch.arange(WIDTH)).sum()).backward()
        weight = next((p for p in run.parameters() if p.grad is not None), None)
        grads.append([leaf.grad for leaf in leaves] + [weight.grad if weight is not None else None])
    for got, want in zip(*grads):
        if want is None:
            assert got is None
        else:
            torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)


def test_a_trace_without_metadata_uses_example_inputs():
    for spelling in (s for s in SPELLINGS if s.needs_dtypes):
        model, args = AddThenNorm(spelling(torch.float32)), inputs(torch.float32)
        gm = fxfuse.apply(torch.fx.symbolic_trace(model), args)
        assert gm.meta["fxfuse"].counts == {"add_rms_norm": 1}
        assert_equals_eager(gm(*args)[0], model(*args)[0])


def test_a_trace_without_metadata_runs_in_any_dtype():
    for spelling in (s for s in SPELLINGS if not (s.needs_dtypes or s.untraceable)):
        for dtype in (torch.bfloat16, torch.float64):
            model = AddThenNorm(spelling(torch.float32)).to(dtype)
            gm = fxfuse.apply(torch.fx.symbolic_trace(model))
            assert gm.meta["fxfuse"].counts == {"add_rms_norm": 1}
            for got, want in zip(gm(*inputs(dtype)), model(*inputs(dtype))):
                assert got.dtype == want.dtype
                rtol = 1.6e-2 if dtype == torch.bfloat16 else 1e-6 if casts(spelling) else 1e-14
                torch.testing.assert_close(got, want, rtol=rtol, atol=rtol)


def casts(spelling: type) -> bool:
    """Whether its formula computes in fp32 even where all is fp64."""
    return "float" in inspect.getsource(spelling.forward)
