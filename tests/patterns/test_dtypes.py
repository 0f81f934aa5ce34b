"""Dtypes at the edges of a match: what a cast beside it means, with metadata and without."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

import fxfuse
from tests.dialects import aten, exported

N = 16


def rms(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class Model(nn.Module):
    def __init__(self, formula, w_dtype, affine=True) -> None:
        super().__init__()
        self.formula = formula
        self.norm = nn.RMSNorm(N, elementwise_affine=affine, dtype=torch.bfloat16)
        self.w = nn.Parameter(torch.linspace(0.5, 1.5, N).to(w_dtype))

    def forward(self, x):
        return self.formula(self, x)


HALF, WIDE = torch.bfloat16, torch.float32
BESIDE = {
    "whole * (1 + w)": (lambda m, x: m.norm(x) * (1 + m.w), HALF, HALF),
    "whole * (1 + wide w)": (lambda m, x: m.norm(x) * (1 + m.w), WIDE, HALF),
    "whole * w.float()": (lambda m, x: m.norm(x) * m.w.float(), HALF, HALF),
    "half formula * w.float()": (lambda m, x: rms(x) * m.w.float(), HALF, HALF),
    "in place by a wide weight": (lambda m, x: rms(x).mul_(m.w), WIDE, HALF),
    "whole of a cast down": (lambda m, x: m.norm(x.bfloat16()), HALF, WIDE),
    "formula of a cast down": (lambda m, x: rms(x.half()), HALF, WIDE),
    "wide formula * w.double()": (lambda m, x: rms(x.float()) * m.w.double(), HALF, HALF),
    "cast to an integer": (lambda m, x: (rms(x.float()) * m.w).to(torch.int8), HALF, HALF),
    "cast up again": (lambda m, x: (rms(x.float()).to(x.dtype) * m.w).float(), HALF, HALF),
    "1 + w in half": (lambda m, x: (rms(x.float()) * (1 + m.w)).to(x.dtype), HALF, HALF),
}


@pytest.mark.parametrize(
    "trace", [lambda m, a: fx.symbolic_trace(m), exported], ids=["fx", "export"]
)
@pytest.mark.parametrize("name", BESIDE)
def test_values_and_dtypes(name, trace):
    formula, w_dtype, x_dtype = BESIDE[name]
    model = Model(formula, w_dtype, affine="(1" not in name)
    x = torch.randn(4, N, generator=torch.Generator().manual_seed(0)).to(x_dtype)
    want = model(x)
    gm = fxfuse.apply(trace(model, (x,)))
    got = gm(x)
    assert got.dtype == want.dtype
    assert (got == want).float().mean() >= 0.99


def test_whole_norm_of_a_wider_cast():
    """eps=None means the epsilon of the dtype that the norm sees."""
    x = torch.randn(4, N) * 1e-8

    def model(x):
        return F.rms_norm(x.double(), (N,))

    for gm in (fx.symbolic_trace(model), exported(Wrapped(model), (x,))):
        got = fxfuse.apply(gm)(x)
        assert got.dtype == torch.float64
        torch.testing.assert_close(got, model(x))


class Wrapped(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


def test_in_place_add_keeps_its_dtype():
    def model(x, r, w):
        h = (x * 2).add_(r)
        return h, rms(h.float()) * w

    args = torch.randn(4, N).bfloat16(), torch.randn(4, N), torch.rand(N)
    for gm in (fx.symbolic_trace(model), exported(Wrapped(model), args)):
        for got, want in zip(fxfuse.apply(gm)(*args), model(*args)):
            assert got.dtype == want.dtype
            torch.testing.assert_close(got, want)


def test_normalized_shape_that_is_not_a_literal_row():
    def over_two(x):
        return F.rms_norm(x, x.shape[1:])

    x = torch.randn(2, 4, N)
    for example in (None, (x,)):
        gm = fxfuse.apply(fx.symbolic_trace(over_two), example)
        torch.testing.assert_close(gm(x), over_two(x))


def test_complex_weight_is_left_alone():
    gm = fx.symbolic_trace(lambda x, w: rms(x) * w)
    args = torch.randn(4, N), torch.randn(N, dtype=torch.complex64)
    report = fxfuse.apply(gm, args).meta["fxfuse"]
    assert "weight" not in [k for m in report.matches for k in m.shapes]
    torch.testing.assert_close(gm(*args), rms(args[0]) * args[1])


def root(x: torch.Tensor) -> torch.Tensor:
    return torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def of_one_column(x):
    column = x[:, :1] * 1.5
    return column * root(column).expand_as(x)


def of_complex_numbers(x):
    z = torch.complex(x, 2 * x)
    return z * root(z)


def whole_of_complex_numbers(x):
    return F.rms_norm(torch.complex(x, 2 * x), (48,), eps=1e-6)


def by_a_wider_root(x):
    return x * root(x).double()


def by_a_root_of_whole_numbers(x):
    return x * root(x).to(torch.int32)


def rows_rounded_before_a_wider_root(x):
    return 48**0.5 * x * x.double().pow(2).sum(-1, keepdim=True).rsqrt()


def rows_rounded_before_a_wider_root_divides(x):
    return (48**0.5 * x / (x.double().pow(2).sum(-1, keepdim=True) + 1e-6).sqrt()).float()


LEFT_ALONE = {
    of_one_column: "what it scales, of shape (4, 1), broadcasts",
    of_complex_numbers: "its input is complex64, not a floating-point tensor",
    whole_of_complex_numbers: "its input is complex64, not a floating-point tensor",
    by_a_wider_root: "its root is cast to float64 before it scales",
    by_a_root_of_whole_numbers: "its root is cast to int32 before it scales",
    rows_rounded_before_a_wider_root: "it divides by the root of a sum of squares",
    rows_rounded_before_a_wider_root_divides: "it divides by the root of a sum of squares",
}


@pytest.mark.parametrize("trace", [lambda f, x: fx.symbolic_trace(f), aten], ids=["fx", "make_fx"])
@pytest.mark.parametrize("function", LEFT_ALONE, ids=lambda f: f.__name__)
def test_steps_in_other_dtypes_or_shapes_are_left_alone(function, trace):
    x = torch.randn(4, 48, generator=torch.Generator().manual_seed(0))
    gm = fxfuse.apply(trace(function, (x,)), (x,))
    report = gm.meta["fxfuse"]
    assert not report.counts and torch.equal(gm(x), function(x))
    (miss,) = report.misses
    assert LEFT_ALONE[function] in miss.reason
