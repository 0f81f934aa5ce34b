"""The ops against eager PyTorch: its roundings bit by bit, and its errors measured in fp64.

On a CPU the ops run a compiled formula from `compiled.SMALLEST` elements on, and the plain one
below; both are tested, and the inline form with them. Compiling takes seconds, so of what is
compiled only some combinations are.
"""

import math
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fxfuse.kernels import compiled, ops  # noqa: F401

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from accuracy import steps_apart

rms_norm = torch.ops.fxfuse.rms_norm.default
add_rms_norm = torch.ops.fxfuse.add_rms_norm.default

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
EPS = 1e-6
DTYPES = (FP32, BF16, FP16)
SMALL, LARGE, ODD = (4, 37, 64), (4, 128, 256), (1, 301, 256)


def name_case(value) -> str:
    """The name of one parameter of a test."""
    return getattr(value, "__name__", None) or str(value).removeprefix("torch.").replace(" ", "")


def unit_of(x: Tensor, eps: float = EPS) -> Tensor:
    s = x.float()
    return s * torch.rsqrt(s.pow(2).mean(-1, keepdim=True) + eps)


def llama(x, w):
    return w * unit_of(x).to(x.dtype)


def cast_last(x, w):
    return F.rms_norm(x, x.shape[-1:], w, EPS)


def zero_centred(x, w):
    return (unit_of(x) * (1.0 + w.float())).to(x.dtype)


def same_dtype(x, w):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * w


def rounded_root(x, w):
    root = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + EPS)
    return x * root.to(x.dtype) * w


def rounded_scale(x, w):  # as k-diffusion
    root = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + EPS)
    return x * (w.float() * root).to(x.dtype)


ORDERS = {
    llama: {"unit_dtype": "input"},
    cast_last: {"out_dtype": "input"},
    zero_centred: {"out_dtype": "input", "weight_offset": 1.0},
    same_dtype: {"compute_dtype": "input"},
    rounded_root: {"rstd_dtype": "input", "unit_dtype": "input"},
    rounded_scale: {"scale_dtype": "input", "out_dtype": "input"},
}
HALF_STEPS = {
    llama: 2,
    cast_last: 1,
    zero_centred: 1,
    same_dtype: 2,
    rounded_root: 2,
    rounded_scale: 2,
}


def operands(shape, dtype, *, zero=False):
    x, residual = (torch.randn(shape).to(dtype).requires_grad_() for _ in range(2))
    weight = (torch.randn(shape[-1]) * 0.1 + (0 if zero else 1)).to(dtype).requires_grad_()
    return x, residual, weight


def gradients_of(y, h, inputs, dy, dh):
    return torch.autograd.grad((y, h), inputs, (dy, dh))


def error(value: Tensor, exact: Tensor) -> float:
    """Relative RMS."""
    return ((value.double() - exact).norm() / exact.norm()).item()


def test_the_distance_between_numbers():
    a = torch.tensor([1.0, -1.0, 0.0, 1.0], dtype=BF16)
    b = torch.tensor([1.0078125, -1.0078125, -0.0, 1.0], dtype=BF16)
    assert steps_apart(a, b).tolist() == [1, 1, 0, 0]


@pytest.mark.parametrize(
    "order, dtype, shape",
    [(order, dtype, SMALL) for order in ORDERS for dtype in (BF16, FP16)]
    + [(order, BF16, LARGE) for order in ORDERS]
    + [(llama, FP16, LARGE)],
    ids=name_case,
)
def test_half_bits_are_those_of_eager(order, dtype, shape):
    x, residual, weight = operands(shape, dtype, zero=order is zero_centred)
    with torch.no_grad():
        y, h = add_rms_norm(x, residual, weight, eps=EPS, **ORDERS[order])
        alone = rms_norm(h, weight, eps=EPS, forward="inline", **ORDERS[order])
    expected = order(x + residual, weight)
    assert torch.equal(h, x + residual)
    for value in (y, alone):
        apart = steps_apart(value, expected)
        assert (apart == 0).double().mean() >= 0.99
        assert apart.max() <= HALF_STEPS[order]


def test_a_norm_that_rounds_elsewhere_has_other_bits():
    """The two orders differ in a quarter of the elements, so the bit tests tell them apart."""
    x, _, weight = operands(LARGE, BF16)
    y = rms_norm(x, weight, eps=EPS, **ORDERS[cast_last])
    assert (steps_apart(y, llama(x, weight)) == 0).double().mean() < 0.9


@pytest.mark.parametrize(
    "order, dtype, shape",
    [(order, dtype, SMALL) for order in (llama, cast_last, zero_centred) for dtype in DTYPES]
    + [(llama, dtype, LARGE) for dtype in DTYPES]
    + [(cast_last, BF16, LARGE), (zero_centred, BF16, LARGE), (zero_centred, FP32, ODD)],
    ids=name_case,
)
def test_errors_are_at_most_those_of_eager(order, dtype, shape):
    inputs = operands(shape, dtype, zero=order is zero_centred)
    dy, dh = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    x, residual, weight = inputs
    y, h = add_rms_norm(x, residual, weight, eps=EPS, **ORDERS[order])
    ours = (y, h, *gradients_of(y, h, inputs, dy, dh))
    h = x + residual
    y = order(h, weight)
    eager = (y, h, *gradients_of(y, h, inputs, dy, dh))
    exact = exact_results(inputs, dy, dh, offset=ORDERS[order].get("weight_offset", 0.0))
    for name, a, b, c in zip(("y", "h", "dx", "dresidual", "dweight"), ours, eager, exact):
        assert a.dtype == b.dtype and a.shape == b.shape
        limit = error(b, c) * (2 if dtype == FP32 and name == "dweight" else 1.1)
        if dtype == FP32:
            limit = max(limit, 4 * torch.finfo(FP32).eps / 2)
        assert error(a, c) <= limit, name


def exact_results(inputs, dy, dh, *, offset):
    x, residual, weight = inputs = [t.detach().double().requires_grad_() for t in inputs]
    h = x + residual
    unit = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)
    y = unit * (offset + weight)
    gradients = gradients_of(y, h, inputs, dy.double(), dh.double())
    return (y.detach(), h.detach(), *gradients)


@pytest.mark.parametrize("rows", [4096, 4097, 65536])
def test_the_weight_gradient_is_summed_as_a_tree(rows):
    x, _, weight = operands((rows, 64), FP32)
    dy = torch.randn(rows, 64)
    (ours,) = torch.autograd.grad(rms_norm(x, weight, eps=EPS), weight, dy)
    (eager,) = torch.autograd.grad(llama(x, weight), weight, dy)
    s = x.detach().double()
    exact = (dy.double() * s * torch.rsqrt(s.pow(2).mean(-1, keepdim=True) + EPS)).sum(0)
    assert error(ours, exact) <= 2 * error(eager, exact)


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_sums_of_gradients_round_as_eager_does(dtype):
    shape = LARGE[1:]
    h, weight = torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    rstd = unit_of(h).new_ones(shape[:-1])
    dys = [torch.randn(shape).to(dtype) for _ in range(3)]
    backward = torch.ops.fxfuse.rms_norm_bwd.default
    three = backward(dys, h, weight, rstd, None, need_dweight=True)
    one = backward([dys[0] + dys[1] + dys[2]], h, weight, rstd, None, need_dweight=True)
    exact = backward([sum(dy.float() for dy in dys)], h, weight, rstd, None, need_dweight=True)
    assert all(torch.equal(a, b) for a, b in zip(three, one))
    assert not torch.equal(three[0], exact[0])


@pytest.mark.parametrize("shape", [SMALL, LARGE], ids=["plain", "compiled"])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_kernel_and_inline_agree(dtype, shape):
    inputs = operands(shape, dtype)
    dy, dh = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    results = []
    for side in ("kernel", "inline"):
        y, h = add_rms_norm(*inputs, eps=EPS, unit_dtype="input", forward=side, backward=side)
        results.append((y, h, *gradients_of(y, h, inputs, dy, dh)))
    for a, b in zip(*results):
        assert a.dtype == b.dtype
        assert error(a, b.double()) < (3e-7 if dtype == FP32 else 1e-4)


@pytest.mark.parametrize("shape", [SMALL, LARGE], ids=["plain", "compiled"])
def test_the_same_bits_in_every_run(shape):
    inputs = operands(shape, BF16)
    dy, dh = torch.randn(shape).to(BF16), torch.randn(shape).to(BF16)
    runs = []
    for _ in range(3):
        y, h = add_rms_norm(*inputs, eps=EPS)
        runs.append((y, h, *gradients_of(y, h, inputs, dy.float(), dh)))
    for again in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], again))


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16, torch.float64])
@pytest.mark.parametrize("eps", [None, 0.0, 1e-12, 1e-2])
def test_eps(eps, dtype):
    x = (torch.randn(8, 64) * 1e-3).to(dtype)
    compute = "float64" if dtype == torch.float64 else "float32"
    y = rms_norm(x, None, eps=eps, compute_dtype=compute, out_dtype="input")
    torch.testing.assert_close(y, F.rms_norm(x, (64,), None, eps))
    if eps is None:
        other = rms_norm(x, None, eps=1e-3, compute_dtype=compute, out_dtype="input")
        assert not torch.allclose(y, other, rtol=0.1)


@pytest.mark.parametrize("shape", [(16, 64), (512, 256)], ids=["plain", "compiled"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_bad_values_stay_in_their_rows(bad, shape):
    x, residual, weight = operands(shape, FP32)
    with torch.no_grad():
        clean, _ = add_rms_norm(x, residual, weight, eps=EPS)
        x[3, 5] = bad
    y, h = add_rms_norm(x, residual, weight, eps=EPS)
    dx, dw = torch.autograd.grad((y, h), (x, weight), (torch.randn(shape), torch.randn(shape)))
    others = torch.arange(shape[0]) != 3
    assert torch.equal(y[others], clean[others])
    assert torch.equal(y[3].isnan(), llama(x + residual, weight)[3].isnan())
    assert dx[others].isfinite().all() and not dx[3].isfinite().all()
    assert dw.isnan().any()


@pytest.mark.parametrize("order", [llama, cast_last], ids=lambda o: o.__name__)
@pytest.mark.parametrize("shape", [(3, 1), (0, 64), (2, 0, 8), (64,), (1, 64)], ids=str)
def test_small_shapes(shape, order):
    x, residual, weight = inputs = operands(shape, FP32)
    dy, dh = torch.randn(shape), torch.randn(shape)
    y, h = add_rms_norm(x, residual, weight, eps=EPS, **ORDERS[order])
    ours = (y, h, *gradients_of(y, h, inputs, dy, dh))
    h = x + residual
    y = order(h, weight)
    eager = (y, h, *gradients_of(y, h, inputs, dy, dh))
    for a, b in zip(ours, eager):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("eps", [0.0, EPS])
def test_rows_of_zeros(eps):
    x, _, weight = operands((4, 64), FP32)
    with torch.no_grad():
        x[1] = 0
    y = rms_norm(x, weight, eps=eps)
    expected = weight * unit_of(x, eps)
    assert torch.equal(y.isnan(), expected.isnan()) and y[1].isnan().all() == (eps == 0)
    dx, dw = torch.autograd.grad(y, (x, weight), torch.randn(4, 64))
    assert dx[[0, 2, 3]].isfinite().all() and dw.isfinite().all() == (eps != 0)


def test_large_inputs_were_compiled():
    """Guards the tests above: LARGE and ODD must take the compiled path."""
    assert math.prod(SMALL) < compiled.SMALLEST <= min(math.prod(LARGE), math.prod(ODD))
    x, residual, weight = operands(LARGE, FP32)
    add_rms_norm(x, residual, weight, eps=0.5)
    assert any(f is not None and ("eps", 0.5) in key for key, f in compiled._functions.items())
