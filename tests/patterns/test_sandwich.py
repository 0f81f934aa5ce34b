"""A norm, a residual add and a norm of the sum, from every tracer, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

import fxfuse
from tests.dialects import DIALECTS, aten, compiled, exported
from tests.patterns.test_spellings import assert_equals_eager, inputs
from tests.spellings import (
    EPS,
    HALVES,
    SPELLINGS,
    WIDTH,
    CastThenWeight,
    LeafModule,
    NormAddNorm,
    WeightThenCast,
    ZeroCentred,
)

FLOAT, HALF = torch.float32, torch.bfloat16
NAME = "rms_norm_add_rms_norm"


def check(gm: fx.GraphModule, args: tuple, want: tuple, found: int = 1) -> None:
    report = fxfuse.apply(gm).meta["fxfuse"]
    assert report.counts.get(NAME, 0) == found, report.misses
    assert_same(gm(*args), want)


def assert_same(found: tuple, want: tuple) -> None:
    """In fp32 the add may cancel most of a norm, so that the last bits of the rest are its own."""
    for got, right in zip(found, want):
        if right.dtype in HALVES:
            assert_equals_eager(got, right)
        else:
            torch.testing.assert_close(got, right)


@pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda s: s.__name__)
def test_every_norm_on_both_sides(spelling):
    for dtype, w_dtype in ((FLOAT, FLOAT), (HALF, HALF), (HALF, FLOAT)):
        model, args = NormAddNorm(spelling(w_dtype)), inputs(dtype)
        lost = spelling.fp32_only and dtype in HALVES
        check(aten(model, args), args, model(*args), int(not lost))


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("spelling", [CastThenWeight, ZeroCentred, LeafModule])
def test_every_dialect(spelling, dialect):
    for dtype in (FLOAT, HALF):
        model, args = NormAddNorm(spelling(dtype)), inputs(dtype)
        check(DIALECTS[dialect](model, args), args, model(*args))


@pytest.mark.parametrize("spelling", [CastThenWeight, ZeroCentred, LeafModule])
def test_dynamo(spelling):
    model, args = NormAddNorm(spelling(HALF)), inputs(HALF)
    got, counts = compiled(model, args, dynamic=True)
    assert counts == {NAME: 1}
    assert_same(got, model(*args))


class Two(nn.Module):
    """Two norms of different kinds, between which `middle(n, residual)` adds."""

    def __init__(self, middle) -> None:
        super().__init__()
        self.one, self.two = CastThenWeight(HALF), WeightThenCast(HALF)
        self.middle = middle

    def forward(self, x, residual):
        h = self.middle(self.one(x), residual)
        return self.two(h), h


MIDDLES = {
    "norm on the left": (lambda n, r: n + r, 1),
    "in place on the residual": (lambda n, r: (r * 2).add_(n), 1),
    "in place on the norm": (lambda n, r: n.add_(r), 1),
    "wide residual": (lambda n, r: r.float() + n, 1),
    "wide sum of wide operands": (lambda n, r: r.float() + n.float(), 1),
    "twice the norm": (lambda n, r: torch.add(r, n, alpha=2), 0),
    "one row for all": (lambda n, r: r[:, :1] + n, 0),
}


@pytest.mark.parametrize("name", MIDDLES)
def test_middle_adds(name):
    middle, found = MIDDLES[name]
    model, args = Two(middle), inputs(HALF)
    check(aten(model, args), args, model(*args), found)
    check(exported(model, args), args, model(*args), found)


def test_gradients():
    model, args = NormAddNorm(ZeroCentred(FLOAT)), inputs(FLOAT)
    gm = fxfuse.apply(exported(model, args))
    assert gm.meta["fxfuse"].counts[NAME] == 1
    grads = []
    for run in (model, gm):
        leaves = [a.clone().requires_grad_() for a in args]
        run.zero_grad()
        y, h = run(*leaves)
        (y.square().sum() + (h * torch.arange(WIDTH)).sum()).backward()
        grads.append([leaf.grad for leaf in leaves] + [p.grad.clone() for p in run.parameters()])
    for want, got in zip(*grads):
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-4)


def norm(x):
    return F.rms_norm(x, (WIDTH,), eps=EPS)


def test_post_norm_says_that_the_norm_is_alone():
    def model(x, residual):
        return residual + norm(x)

    args = inputs(FLOAT)
    for gm in (fx.symbolic_trace(model), aten(model, args)):
        report = fxfuse.apply(gm).meta["fxfuse"]
        assert report.counts["rms_norm"] == 1 and NAME not in report.counts
        (miss,) = report.misses
        assert miss.pattern == NAME
        assert miss.reason.endswith("follows: only the norm itself can be fused")


def test_a_bias_is_no_residual():
    args = (inputs(FLOAT)[0], torch.ones(WIDTH))
    report = fxfuse.apply(aten(lambda x, bias: norm(x) + bias, args)).meta["fxfuse"]
    assert report.misses == []


def test_a_first_norm_that_is_used_again_is_left_out():
    def model(x, residual):
        n = norm(x)
        h = residual + n
        return norm(h), h, n

    args = inputs(FLOAT)
    gm = fxfuse.apply(aten(model, args))
    report = gm.meta["fxfuse"]
    assert report.counts["add_rms_norm"] == 1 and NAME not in report.counts
    assert any(m.pattern == NAME and "also used by" in m.reason for m in report.misses)
    assert_same(gm(*args), model(*args))


def test_a_norm_of_a_sum_takes_its_own_add():
    def model(x, residual):
        n = norm(x + residual)
        h = residual + n
        return norm(h), h

    args = inputs(FLOAT)
    check(aten(model, args), args, model(*args), 0)
    report = fxfuse.apply(aten(model, args)).meta["fxfuse"]
    assert report.counts["add_rms_norm"] == 2 and report.misses == []
