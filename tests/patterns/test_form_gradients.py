"""Gradients of the less usual forms, against autograd through the plain ops."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import fxfuse
from tests.dialects import DIALECTS

WIDTH, EPS = 64, 1e-6


def norm(h, w):
    wide = h.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return w * wide.to(h.dtype)


def root_of(x):
    return torch.rsqrt(x.float().square().mean(-1, keepdim=True) + EPS)


def rounded_root(x, r, w):
    return x * root_of(x).to(x.dtype) * w


def rounded_root_of_a_sum(x, r, w):
    h = x + r
    return h * root_of(h).to(x.dtype) * w, h


def weight_times_root(x, r, w):
    return (x.float() * (w.float() * root_of(x))).to(x.dtype)


def root_put_back(x, r, w):
    root = torch.rsqrt(x.float().pow(2).mean(-1) + EPS)
    return w * (x.float() * root.unsqueeze(-1)).to(x.dtype)


def root_repeated(x, r, w):
    return w * (x.float() * root_of(x).expand_as(x)).to(x.dtype)


def by_vector_norm(x, r, w):
    wide = x.float()
    length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    return w * (wide / (length * WIDTH**-0.5)).to(x.dtype)


def by_vector_norm_at_last(x, r, w):
    wide = x.float()
    return w * (wide / wide.norm(dim=-1, keepdim=True) * math.sqrt(WIDTH)).to(x.dtype)


def by_squared_vector_norm(x, r, w):
    wide = x.float()
    mean_square = torch.linalg.vector_norm(wide, dim=-1, keepdim=True) ** 2 / WIDTH
    return w * (wide * torch.rsqrt(mean_square + EPS)).to(x.dtype)


def sum_in_float(x, r, w):
    h = (x.float() + r.float()).to(x.dtype)
    return norm(h, w), h


def sum_as_rows(x, r, w):
    h = x + r
    return norm(h.reshape(-1, WIDTH), w), h


def branch_after_dropout(x, r, w):
    h = r + torch.nn.functional.dropout(norm(x, w), 0.1, False)
    return norm(h, w), h


FORMS = {
    rounded_root: "rms_norm", rounded_root_of_a_sum: "add_rms_norm", weight_times_root: "rms_norm",
    root_put_back: "rms_norm", root_repeated: "rms_norm", by_vector_norm: "rms_norm",
    by_vector_norm_at_last: "rms_norm", by_squared_vector_norm: "rms_norm",
    sum_in_float: "add_rms_norm", sum_as_rows: "add_rms_norm",
    branch_after_dropout: "rms_norm_add_rms_norm",
}  # fmt: skip


def results(function, dtype, run_in=None):
    """Outputs and gradients of a function of x, residual and weight, for the same random values."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((4, 16, WIDTH), (4, 16, WIDTH), (WIDTH,))
    given = [torch.randn(s, generator=generator).to(dtype).to(run_in or dtype) for s in shapes]
    leaves = [t.requires_grad_() for t in given]
    outs = function(*leaves)
    outs = outs if isinstance(outs, tuple) else (outs,)
    dys = [torch.randn(o.shape, generator=generator).to(dtype).to(o.dtype) for o in outs]
    found = torch.autograd.grad(outs, leaves, dys, allow_unused=True)
    return [*outs, *(g for g in found if g is not None)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.__name__)
def test_gradients(form, dtype):
    class Model(nn.Module):
        def forward(self, x, r, w):
            return form(x, r, w)

    shapes = ((4, 16, WIDTH), (4, 16, WIDTH), (WIDTH,))
    gm = DIALECTS["make_fx"](Model(), tuple(torch.randn(s).to(dtype) for s in shapes))
    gm = fxfuse.apply(gm)
    assert gm.meta["fxfuse"].counts == {FORMS[form]: 1}
    plain, got = results(form, dtype), results(gm, dtype)
    if dtype == torch.float32:
        for one, other in zip(got, plain):
            torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-5)
        return
    exact = results(form, dtype, torch.float64)  # its casts to float32 stay: exact enough for bf16
    for one, other, right in zip(got, plain, exact):
        assert one.dtype == other.dtype
        ours, theirs = (((t.double() - right).norm() / right.norm()).item() for t in (one, other))
        assert ours <= 1.1 * theirs + 1e-4
