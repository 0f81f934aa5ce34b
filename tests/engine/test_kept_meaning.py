"""Models whose numbers, gradients or memory a rewrite could change without a word."""

from __future__ import annotations

import math

import pytest
import torch
import torch._dynamo.testing
from torch import nn
from torch.export import Dim

import fxfuse
from tests.dialects import aten, compiled, symbolic

N, EPS = 16, 1e-5


def norm(h, w):
    wide = h.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(h.dtype) * w


def values(*shapes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(s, generator=generator).to(dtype) for s in shapes)


class Of(nn.Module):
    """A function of tensors as a module."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


# ---- a step that stays in the graph for others, in a region of its own ---------------------------


def copied_without_grad(x, r, w):
    with torch.no_grad():
        v = x.clone()
    return norm(v, w) * 2 + r, v


def sum_copied_without_grad(x, r, w):
    h = x + r
    with torch.no_grad():
        v = h.clone()
    return norm(v, w), v, h


def widened_without_grad(x, r, w):
    with torch.no_grad():
        wide = x.float()
    y = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return y.to(x.dtype) * w + r, wide


def weight_widened_without_grad(x, r, w):
    with torch.no_grad():
        wide = w.float()
    root = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + EPS)
    other = torch.rsqrt(r.float().pow(2).mean(-1, keepdim=True) + EPS)
    return x.float() * root * wide, r.float() * other * wide


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "function",
    [copied_without_grad, sum_copied_without_grad, widened_without_grad,
     weight_widened_without_grad],
    ids=lambda f: f.__name__,
)  # fmt: skip
def test_gradients_end_where_they_did(function, dtype):
    found = []
    for run in (function, torch.compile(function, backend=fxfuse.make_backend("eager"))):
        torch._dynamo.reset()
        leaves = [t.requires_grad_() for t in values((4, N), (4, N), (N,), dtype=dtype)]
        outs = [o for o in run(*leaves) if o.requires_grad]
        found.append(
            torch.autograd.grad(outs, leaves, [torch.ones_like(o) for o in outs], allow_unused=True)
        )
    for mine, theirs in zip(*found):
        assert (mine is None) == (theirs is None)
        if theirs is not None:
            torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=2e-2)


# ---- memory that two values share ----------------------------------------------------------------


def sum_that_is_its_own_cast(x, r, w):
    s = x + r
    h = s.to(x.dtype)
    y = norm(h.view(-1, N), w)
    s.mul_(2)
    return h, y


def cast_that_is_its_own_sum(x, r, w):
    s = x + r
    h = s.to(x.dtype)
    y = norm(h.view(-1, N), w)
    h.mul_(2)
    return s, y


def idle_dropout(x, r, w):
    s = x + r
    h = torch.nn.functional.dropout(s, 0.1, False)
    y = norm(h.view(-1, N), w)
    h.mul_(2)
    return s, y


def written_by_a_dunder(x, r, w):
    h = x + r
    root = torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)
    h.__iadd__(1)
    return h * root * w


def renormalised_table(x, r, w):
    h = x + r
    root = torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)
    picked = torch.nn.functional.embedding(torch.tensor([0, 1]), h, max_norm=0.1)
    return h * root * w, picked


@pytest.mark.parametrize(
    "function",
    [sum_that_is_its_own_cast, cast_that_is_its_own_sum, idle_dropout, written_by_a_dunder,
     renormalised_table],
    ids=lambda f: f.__name__,
)  # fmt: skip
@torch.no_grad()
def test_writes_reach_who_shares_the_memory(function):
    operands = ((4, N), (4, N), (N,))
    got, _ = compiled(Of(function), values(*operands))
    for mine, theirs in zip(_flat(got), _flat(function(*values(*operands)))):
        torch.testing.assert_close(mine, theirs)


@torch.no_grad()
def test_what_is_returned_twice_is_one_tensor():
    """A caller that writes to the one sees it in the other."""

    def function(x, r, w):
        s = x + r
        h = s.to(x.dtype)
        return s, h, norm(h.view(-1, N), w)

    (one, other, _), _ = compiled(Of(function), values((4, N), (4, N), (N,)))
    assert one.data_ptr() == other.data_ptr()


def _flat(found):
    return found if isinstance(found, tuple) else (found,)


# ---- sizes ---------------------------------------------------------------------------------------


def test_a_number_made_of_a_size_is_not_fixed():
    def function(x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3 * x.shape[0])

    rows = {0: Dim("rows", min=2, max=999)}
    program = torch.export.export(Of(function), values((4, N)), dynamic_shapes=((rows,),))
    (other,) = values((100, N))
    got = fxfuse.apply(program).module()(other * 0.1)
    torch.testing.assert_close(got, function(other * 0.1))


@pytest.mark.parametrize("divisor", [lambda n: math.sqrt(n), lambda n: n * 1.5, lambda n: n + 0.5])
def test_no_size_is_fixed_to_look_at_a_division(divisor):
    def function(x):
        return (x @ x.transpose(-1, -2)) / divisor(x.shape[0]), norm(x, 1.0)

    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend(fxfuse.make_backend("eager"))
    run = torch.compile(function, backend=counter, dynamic=True)
    for rows in range(3, 9):
        run(torch.randn(rows, N))
    assert counter.frame_count == 1


# ---- roundings and shapes ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_scaled_half_is_rounded_before_it_is_divided(dtype):
    def function(x):
        return (x * 48**0.5) / torch.sqrt(x.float().pow(2).sum(-1, keepdim=True))

    args = values((64, 48), dtype=dtype)
    gm = fxfuse.apply(aten(Of(function), args))
    torch.testing.assert_close(gm(*args), function(*args), rtol=1e-6, atol=1e-6)


def test_one_column_that_is_spread_over_many():
    def function(x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS).expand(4, 8)

    args = values((4, 1))
    assert fxfuse.apply(aten(Of(function), args))(*args).shape == (4, 8)


@pytest.mark.parametrize("spread", [lambda w: w.view(1, 1, N), lambda w: w.expand(4, N)])
def test_a_weight_that_broadcasts_the_rows(spread):
    def function(x, w):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * spread(w)

    args = values((1, N), (N,))
    got, want = fxfuse.apply(aten(Of(function), args))(*args), function(*args)
    assert got.shape == want.shape
    torch.testing.assert_close(got, want)


def test_a_root_in_fp64_gives_fp64():
    def function(x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS).double()

    args = values((4, N))
    gm = fxfuse.apply(aten(Of(function), args))
    assert torch.equal(gm(*args), function(*args)) and not gm.meta["fxfuse"].counts


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (
            x.float()
            * torch.rsqrt(x.float().pow(2).mean(-1, dtype=torch.float64).unsqueeze(-1) + EPS)
        ),
        lambda x: x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + EPS).to(x.dtype),
    ],
    ids=["a mean in fp64", "a root in the dtype of fp64 input"],
)
def test_fp64_without_metadata(function):
    (x,) = values((4, N))
    gm = fxfuse.apply(symbolic(Of(function).function, (x,)))
    got, want = gm(x.double()), function(x.double())
    assert got.dtype == want.dtype and torch.allclose(got, want, rtol=1e-12, atol=0)


def test_integers_times_a_float_without_metadata():
    def function(x, r):
        h = (x + r) * 1.0
        return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)

    gm = fxfuse.apply(symbolic(function, ()))
    x = torch.arange(2 * N).reshape(2, N)
    torch.testing.assert_close(gm(x, x), function(x, x))


def test_a_thousand_residual_adds():
    def function(x, w):
        h = torch.sin(x)
        for _ in range(1200):
            h = h + torch.sin(h)
        return norm(h, w)

    gm = fxfuse.apply(aten(Of(function), values((2, N), (N,))))
    assert gm.meta["fxfuse"].counts == {"add_rms_norm": 1}
