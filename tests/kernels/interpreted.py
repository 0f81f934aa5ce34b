"""The RMSNorm kernels on CPU tensors in Triton's interpreter, against plain formulas.

The interpreter truncates fp32 -> bf16 where a GPU rounds, so bf16 is allowed one step more.
"""

import pytest
import torch
from torch.library import opcheck

from fxfuse.kernels import ops, rms_norm_launch as kernels, rows, settle  # noqa: F401
from tests.kernels.exact import normal, step

WIDTHS = (1, 7, 64, 96, 129, 1000, 2047, 4096)
# Beyond what one tile holds in every dtype, and no multiple of a chunk; the backward also beyond
# what holds dweight in registers.
WIDE = {"forward": (33001,), "backward": (8201, 33001)}

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
DTYPES = (FP32, FP16, BF16)
EPS = 1e-6


def rows_for(N):
    """Few rows, no multiple of any tile; more where a tile holds many."""
    return 37 if N <= 128 else 5 if N <= 1024 else 3


def assert_close(actual, exact, *, steps, terms=0.0):
    """Within some steps of the dtype, and of fp32 for the largest of the terms that cancel."""
    assert actual.dtype in DTYPES
    assert actual.is_contiguous()
    error = (actual.double() - exact).abs()
    allowed = steps * step(exact, actual.dtype) + 8 * torch.finfo(FP32).eps * terms
    if actual.dtype == BF16:  # truncated, and computed in fp32 before
        allowed = allowed + 4 * step(exact, FP32)
    worst = (error / allowed).max().item()
    assert worst <= 1.0, f"{worst:.2f} times the allowed error"


def steps_of(tensor):
    """fp32 results are those of several operations, narrower ones are rounded once."""
    return 4 if tensor.dtype == FP32 else 1


def norm(h, weight, offset, unit_dtype=None):
    """The formula in fp64; one rounding where the graph asks for it."""
    h = h.double()
    unit = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + EPS)
    if unit_dtype is not None:
        unit = unit.float().to(unit_dtype).double()
    return unit if weight is None else unit * (offset + weight.double())


def forward(x, residual, weight, *, offset=0.0, unit_dtype=None, out_dtype=None, **rounding):
    out_dtype = out_dtype or x.dtype
    return kernels.forward(
        x,
        residual,
        weight,
        eps=EPS,
        weight_offset=offset,
        unit_dtype=unit_dtype,
        out_dtype=out_dtype,
        **rounding,
    )


def rstd_of(h):
    return torch.rsqrt(h.double().square().mean(-1) + EPS).float()


def backward(dys, h, weight, dres=None, *, offset=0.0, need_dweight=True):
    return kernels.backward(
        dys, h, weight, rstd_of(h), dres, weight_offset=offset, need_dweight=need_dweight
    )


def exact_gradients(dys, h, weight, dres, offset):
    """dh and dweight in fp64 from autograd, dy summed with the roundings of eager code."""
    dy = dys[0]
    for more in dys[1:]:
        dy = dy + more
    leaf = h.double().requires_grad_()
    scale = None if weight is None else weight.double().requires_grad_()
    unit = leaf * torch.rsqrt(leaf.square().mean(-1, keepdim=True) + EPS)
    (unit if scale is None else unit * (offset + scale)).backward(dy.double())
    dh = leaf.grad if dres is None else leaf.grad + dres.double()
    return dh, None if scale is None else scale.grad


def assert_gradients(found, dys, h, weight, dres=None, offset=0.0):
    dh, dweight = found
    exact_dh, exact_dweight = exact_gradients(dys, h, weight, dres, offset)
    dy = sum(dy.double().abs() for dy in dys)
    rstd = rstd_of(h)[:, None]
    factor = 1.0 if weight is None else (offset + weight.double()).abs()
    terms = (dy * factor * rstd).max() + (0.0 if dres is None else dres.abs().max())
    assert dh.dtype == h.dtype
    assert_close(dh, exact_dh, steps=steps_of(dh), terms=terms)
    if weight is None:
        assert dweight is None
        return
    assert dweight.dtype == weight.dtype
    products = (dy * h.double().abs() * rstd).sum(0).max()
    assert_close(dweight, exact_dweight, steps=steps_of(dweight), terms=products)


# --- forward -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("N", WIDTHS)
@pytest.mark.parametrize("with_weight", (True, False))
def test_norm(N, dtype, with_weight):
    x = normal(rows_for(N), N, dtype=dtype)
    weight = normal(N, dtype=dtype, seed=1) if with_weight else None
    y, h, rstd = forward(x, None, weight)
    assert h is None
    assert_close(y, norm(x, weight, 0.0), steps=steps_of(y))
    assert_close(rstd, rstd_of(x).double(), steps=4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("N", WIDTHS)
@pytest.mark.parametrize("offset", (0.0, 1.0))
def test_add_norm(N, dtype, offset):
    x = normal(rows_for(N), N, dtype=dtype)
    residual = normal(rows_for(N), N, dtype=dtype, seed=1)
    weight = normal(N, dtype=dtype, seed=2)
    y, h, rstd = forward(x, residual, weight, offset=offset)
    if dtype == BF16:
        assert_close(h, x.double() + residual.double(), steps=1)
    else:
        assert torch.equal(h, x + residual)
    assert_close(y, norm(h, weight, offset), steps=steps_of(y))
    assert_close(rstd, rstd_of(h).double(), steps=4)


@pytest.mark.parametrize("dtype", (FP16, BF16), ids=str)
@pytest.mark.parametrize("N", (96, 1024))
def test_statistics_come_from_the_rounded_sum(N, dtype):
    # a residual that the sum cannot hold: unrounded, it would move rstd by a quarter step
    x = torch.ones(3, N, dtype=dtype)
    residual = torch.full((3, N), torch.finfo(dtype).eps / 4, dtype=dtype)
    _, h, rstd = forward(x, residual, None)
    assert torch.equal(h, x)
    assert_close(rstd, rstd_of(x).double(), steps=2)


@pytest.mark.parametrize(
    "x_dtype, residual_dtype", ((FP16, FP32), (FP32, FP16), (FP16, BF16)), ids=str
)
@pytest.mark.parametrize("N", (96, 1024))
def test_residual_in_another_dtype(N, x_dtype, residual_dtype):
    x = normal(5, N, dtype=x_dtype)
    residual = normal(5, N, dtype=residual_dtype, seed=1)
    weight = normal(N, seed=2)
    y, h, _ = forward(x, residual, weight, out_dtype=FP16)
    assert y.dtype == FP16
    assert torch.equal(h, x + residual)
    assert_close(y, norm(h, weight, 0.0), steps=1)


@pytest.mark.parametrize("N", (64, 1000, 4096))
def test_unit_is_rounded_before_the_weight(N):
    x = normal(5, N, dtype=FP16)
    weight = normal(N, dtype=FP16, seed=1)
    rounded, _, rstd = forward(x, None, weight, unit_dtype=FP16)
    eager = (x.float() * rstd[:, None]).to(FP16) * weight
    assert torch.equal(rounded, eager)
    assert not torch.equal(rounded, forward(x, None, weight)[0])


@pytest.mark.parametrize("N", (64, 1000, 4096, WIDE["forward"][0]))
def test_rstd_is_rounded_before_it_scales(N):
    x = normal(5, N, dtype=FP16)
    y, _, rstd = forward(x, None, None, rstd_dtype=FP16, unit_dtype=FP16)
    assert torch.equal(y, x * rstd[:, None].half())
    assert rstd.dtype == FP32 and not torch.equal(rstd, rstd.half().float())
    assert not torch.equal(y, forward(x, None, None, unit_dtype=FP16)[0])


@pytest.mark.parametrize("N", (64, 1000, 4096, WIDE["forward"][0]))
@pytest.mark.parametrize("offset", (0.0, 1.0))
def test_rstd_times_the_weight_is_rounded_before_it_scales(N, offset):
    x, weight = normal(5, N, dtype=FP16), normal(N, dtype=FP16, seed=1)
    y, _, rstd = forward(x, None, weight, offset=offset, scale_dtype=FP16)
    assert torch.equal(y, x * (rstd[:, None] * (weight.float() + offset)).half())
    assert not torch.equal(y, forward(x, None, weight, offset=offset)[0])


def test_unit_rounded_then_a_wider_weight():
    x = normal(5, 96, dtype=FP16)
    weight = normal(96, seed=1)
    y, _, rstd = forward(x, None, weight, unit_dtype=FP16, out_dtype=FP32)
    assert torch.equal(y, (x.float() * rstd[:, None]).to(FP16) * weight)


@pytest.mark.parametrize("dtype", (FP32, FP16), ids=str)
def test_wide_rows_forward(dtype):
    N = WIDE["forward"][0]
    x = normal(3, N, dtype=dtype)
    residual = normal(3, N, dtype=dtype, seed=1)
    weight = normal(N, dtype=dtype, seed=2)
    assert kernels.plan("forward", N, dtype).constants["BLOCK"] < N
    y, h, rstd = forward(x, residual, weight, offset=1.0)
    assert torch.equal(h, x + residual)
    assert_close(y, norm(h, weight, 1.0), steps=steps_of(y))
    assert_close(rstd, rstd_of(h).double(), steps=4)


# --- backward ------------------------------------------------------------------------------


# Every width in every dtype, and both with every sum of gradients at one width.
SUMS = ((1, False, 0.0), (1, True, 1.0), (2, False, 1.0), (3, True, 0.0))
GRADIENTS = [
    (N, dtype, *terms)
    for N in WIDTHS
    for place, terms in enumerate(SUMS)
    for dtype in (DTYPES if N == 96 else (DTYPES[place % len(DTYPES)],))
]


@pytest.mark.parametrize("N, dtype, count, with_dres, offset", GRADIENTS, ids=str)
def test_backward(N, dtype, count, with_dres, offset):
    M = rows_for(N)
    h = normal(M, N, dtype=dtype)
    weight = normal(N, dtype=dtype, seed=1)
    # the interpreter would truncate each sum of bf16 gradients: whole numbers have exact sums
    dys = [normal(M, N, dtype=dtype, seed=2 + i) for i in range(count)]
    if dtype == BF16 and count > 1:
        dys = [dy.round() for dy in dys]
    dres = normal(M, N, dtype=dtype, seed=9) if with_dres else None
    found = backward(dys, h, weight, dres, offset=offset)
    assert_gradients(found, dys, h, weight, dres, offset)


@pytest.mark.parametrize("N", (96, 1024))
def test_backward_without_a_weight(N):
    h, dy, dres = (normal(5, N, seed=i) for i in range(3))
    assert_gradients(backward([dy], h, None, dres), [dy], h, None, dres)


@pytest.mark.parametrize("N", (96, 1024))
def test_backward_in_mixed_dtypes(N):
    h = normal(5, N)
    dys = [normal(5, N, dtype=FP16, seed=i) for i in (1, 2)]
    dres = normal(5, N, dtype=FP32, seed=3)
    weight = normal(N, dtype=FP16, seed=4)
    assert_gradients(backward(dys, h, weight, dres), dys, h, weight, dres)


def test_gradients_of_unlike_dtypes_are_added_as_eager_adds_them():
    h, weight = normal(5, 96), normal(96, seed=1)
    half, single = normal(5, 96, dtype=FP16, seed=2), normal(5, 96, seed=3)
    together = backward([half, single], h, weight)
    summed = backward([half + single], h, weight)
    assert all(torch.equal(a, b) for a, b in zip(together, summed))


@pytest.mark.parametrize("N", (96, 1024))
def test_gradients_are_rounded_after_each_addition(N):
    h, weight = normal(5, N, dtype=FP16), normal(N, dtype=FP16, seed=1)
    dys = [normal(5, N, dtype=FP16, seed=2 + i) for i in range(3)]
    together = backward(dys, h, weight)
    summed = backward([(dys[0] + dys[1]) + dys[2]], h, weight)
    assert all(torch.equal(a, b) for a, b in zip(together, summed))
    once = (dys[0].float() + dys[1].float() + dys[2].float()).to(FP16)
    assert not torch.equal(once, (dys[0] + dys[1]) + dys[2])


@pytest.mark.parametrize("weighted", (True, False))
@pytest.mark.parametrize("N", WIDE["backward"])
def test_wide_rows_backward(N, weighted):
    M = 5  # more than the programs, so that partial sums of several rows meet
    h, dy, dy2, dres = (normal(M, N, dtype=FP16, seed=i) for i in range(4))
    weight = normal(N, seed=4) if weighted else None
    assert kernels.plan("backward", N, FP16).constants["BLOCK"] < N
    found = backward([dy, dy2], h, weight, dres, offset=1.0)
    assert_gradients(found, [dy, dy2], h, weight, dres, 1.0)


@pytest.mark.parametrize("N", (2880, 8192, 12000, 20001))
def test_every_fallback_of_the_backward(N):
    h, dy, dres = (normal(5, N, seed=i) for i in range(3))
    weight = normal(N, seed=3)
    plans = settle.rungs(kernels.plan("backward", N, FP32))
    assert len(plans) > 1
    for rung in range(len(plans)):
        with settle.forced(rung=rung):
            found = backward([dy], h, weight, dres)
        assert_gradients(found, [dy], h, weight, dres, 0.0)


def test_many_partial_sums():
    # more rows than one tile of the finalize kernel, and no multiple of it
    partials = normal(300, 100)
    dweight = kernels.finalize(partials, torch.empty(100))
    assert_close(dweight, partials.double().sum(0), steps=4, terms=partials.abs().sum(0).max())


# --- layouts and sizes ---------------------------------------------------------------------


@pytest.mark.parametrize("pitch", (1000, 1003))
@pytest.mark.parametrize("N", (96, 1000))
def test_strided_rows(N, pitch):
    x, residual, dres = (normal(5, pitch + 8, seed=i)[:, :N] for i in range(3))
    weight = normal(N, seed=3)
    assert rows.Rows.of(x).tensor is x
    for strided, packed in zip(
        forward(x, residual, weight), forward(x.clone(), residual.contiguous(), weight)
    ):
        assert torch.equal(strided, packed)
    strided = backward([residual], x, weight, dres)
    packed = backward([residual.contiguous()], x.contiguous(), weight, dres.contiguous())
    assert all(torch.equal(a, b) for a, b in zip(strided, packed))


@pytest.mark.parametrize(
    "dy",
    (
        normal(1, 96).expand(7, 96),
        normal(1, 1).expand(7, 96),
        normal(96, 7).t(),
        normal(7, 192)[:, ::2],
        normal(7 * 96 + 1)[1:].view(7, 96),
    ),
    ids=("expanded rows", "expanded", "transposed", "every other column", "misaligned"),
)
def test_gradients_in_any_layout(dy):
    h, weight = normal(7, 96, seed=1), normal(96, seed=2)
    found = backward([dy], h, weight)
    expected = backward([dy.clone(memory_format=torch.contiguous_format)], h, weight)
    assert all(torch.equal(a, b) for a, b in zip(found, expected))


def test_more_dimensions():
    x = normal(2, 3, 4, 64).transpose(0, 1)
    y, _, rstd = forward(x, None, None)
    assert y.shape == x.shape and rstd.shape == x.shape[:-1]
    assert_close(y, norm(x, None, 0.0), steps=4)


LAYOUTS = {
    "transposed": lambda: normal(2, 3, 5, 64).transpose(1, 2),
    "sliced": lambda: normal(2, 3, 80)[..., :64],
    "expanded": lambda: normal(3, 1, 64).expand(2, 3, 2, 64),
    "columns first": lambda: normal(2, 64, 3).transpose(1, 2),
    "one batch": lambda: normal(1, 3, 2, 64).transpose(1, 2),
    "one dim": lambda: normal(128)[::2],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("contiguous", (False, True))
def test_outputs_of_the_ops_lie_where_fake_tensors_say(layout, contiguous, launches):
    x, weight = LAYOUTS[layout](), normal(64, seed=1)
    attributes = {"eps": EPS, "contiguous": contiguous}
    check = {"test_utils": "test_faketensor"}
    opcheck(torch.ops.fxfuse.rms_norm_fwd.default, (x, weight), attributes, **check)
    operands = (x, LAYOUTS[layout]() * 2, weight)
    opcheck(torch.ops.fxfuse.add_rms_norm_fwd.default, operands, attributes, **check)
    y, h, rstd = torch.ops.fxfuse.add_rms_norm_fwd.default(*operands, **attributes)
    operands = ([y, h], h, weight, rstd, x)
    opcheck(torch.ops.fxfuse.rms_norm_bwd.default, operands, {"need_dweight": True}, **check)
    dh, _ = torch.ops.fxfuse.rms_norm_bwd.default(*operands, need_dweight=True)
    assert {"forward", "backward", "finalize"} == set(launches)
    torch.testing.assert_close(h, 3 * x)
    torch.testing.assert_close(y.double(), norm(h, weight, 0.0), rtol=1e-5, atol=1e-5)
    expected, _ = exact_gradients([y, h], h, weight, x, 0.0)
    torch.testing.assert_close(dh.double(), expected, rtol=1e-4, atol=1e-4)


def test_dense_rows_in_another_order_are_not_copied(monkeypatch):
    monkeypatch.setattr(rows, "_copy", None)
    x, residual, weight = LAYOUTS["transposed"](), LAYOUTS["transposed"](), normal(64)
    y, h, rstd = torch.ops.fxfuse.add_rms_norm_fwd.default(x, residual, weight, eps=EPS)
    gradients = torch.ops.fxfuse.rms_norm_bwd.default([y], h, weight, rstd, x, need_dweight=True)
    assert x.stride() == y.stride() == h.stride() == gradients[0].stride()


@pytest.mark.parametrize(
    "tensor, stride",
    (
        (torch.empty(4, 6), 6),
        (torch.empty(2, 3, 6), 6),
        (torch.empty(4, 10)[:, :6], 10),
        (torch.empty(2, 3, 10)[..., :6], 10),
        (torch.empty(1, 6).expand(4, 6), 0),
        (torch.empty(1, 10)[:, :6], 6),
        (torch.empty(6), 6),
        (torch.empty(6, 4).t(), None),
        (torch.empty(4, 12)[:, ::2], None),
        (torch.empty(3, 2, 6).transpose(0, 1), None),
        (torch.empty(3, 4, 6)[:, :2], None),
        (torch.empty(4, 3)[:, :1], 3),
    ),
)
def test_row_stride(tensor, stride):
    assert rows.row_stride(tensor) == stride


@pytest.mark.parametrize("shape", ((0, 96), (3, 0), (2, 0, 64)))
def test_empty(shape, launches):
    x = torch.empty(shape)
    weight = normal(shape[-1])
    y, h, rstd = forward(x, x, weight)
    assert y.shape == shape and h.shape == shape and rstd.shape == shape[:-1]
    dh, dweight = kernels.backward([x], x, weight, rstd, None, weight_offset=0.0, need_dweight=True)
    assert dh.shape == shape
    assert torch.equal(dweight, torch.zeros_like(weight))
    assert launches == []


@pytest.mark.parametrize("N", (96, 1024))
def test_one_row(N):
    x, dy, weight = normal(1, N), normal(1, N, seed=1), normal(N, seed=2)
    y, _, _ = forward(x, None, weight)
    assert_close(y, norm(x, weight, 0.0), steps=4)
    assert_gradients(backward([dy], x, weight), [dy], x, weight)


# --- what does not depend on the rest ------------------------------------------------------


@pytest.mark.parametrize("N", (96, 1000))
def test_same_bits_every_run(N):
    h, dy, dres = (normal(9, N, seed=i) for i in range(3))
    weight = normal(N, seed=3)
    first, again = (backward([dy], h, weight, dres) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again))


@pytest.mark.parametrize("N", (64, 1000))
def test_a_row_does_not_depend_on_the_number_of_rows(N):
    x, dy, weight = normal(9, N), normal(9, N, seed=1), normal(N, seed=2)
    y, _, rstd = forward(x, None, weight)
    dh, _ = backward([dy], x, weight)
    y_alone, _, rstd_alone = forward(x[7:8], None, weight)
    dh_alone, _ = backward([dy[7:8]], x[7:8], weight)
    assert torch.equal(y[7:8], y_alone) and torch.equal(rstd[7:8], rstd_alone)
    assert torch.equal(dh[7:8], dh_alone)


@pytest.mark.parametrize("bad", (float("nan"), float("inf")))
@pytest.mark.parametrize("N", (64, 1000))
def test_nan_and_inf_stay_in_their_row(N, bad):
    x, dy, weight = normal(5, N), normal(5, N, seed=1), normal(N, seed=2)
    broken = x.clone()
    broken[2, 3] = bad
    others = [row for row in range(5) if row != 2]
    y, _, _ = forward(broken, None, weight)
    dh, _ = backward([dy], broken, weight)
    assert torch.equal(y[others], forward(x, None, weight)[0][others])
    assert torch.equal(dh[others], backward([dy], x, weight)[0][others])
    assert y[2, 3].isnan() and dh[2, 3].isnan()


def test_zero_rows():
    x = torch.zeros(3, 64)
    y, _, rstd = forward(x, None, normal(64))
    assert torch.equal(y, x)
    assert_close(rstd, rstd_of(x).double(), steps=2)


# --- launches ------------------------------------------------------------------------------


@pytest.fixture
def launches(monkeypatch):
    """The names of the kernels that are launched."""
    seen, launch = [], kernels.launch

    def recording(cut, *given):
        seen.append(cut.kernel.fn.__name__)
        launch(cut, *given)

    monkeypatch.setattr(kernels, "launch", recording)
    return seen


@pytest.mark.parametrize("need_dweight", (True, False))
def test_backward_launches(launches, need_dweight):
    h, dy, dres, weight = normal(5, 96), normal(5, 96), normal(5, 96), normal(96)
    _, dweight = backward([dy, dy, dy], h, weight, dres, need_dweight=need_dweight)
    assert launches == (["backward", "finalize"] if need_dweight else ["backward"])
    assert (dweight is not None) == need_dweight


def test_forward_launches_once(launches):
    x = normal(5, 96)
    forward(x, x, normal(96))
    assert launches == ["forward"]


@pytest.mark.parametrize("N", (64, 1024, 4096, 16384))
@pytest.mark.parametrize("M", (1, 3, 257, 4096, 1 << 20))
def test_programs_share_the_rows_evenly(N, M):
    cut = kernels.plan("backward", N, BF16)
    tiles = -(-M // cut.constants["ROWS"])
    programs = rows.count_programs(M, cut, 132)
    assert 1 <= programs <= tiles
    each = -(-tiles // programs)
    assert each <= 256
    assert (programs - 1) * each < tiles, "a program is left without rows"


# --- what the kernels refuse ---------------------------------------------------------------


def unfit(x, residual=None, weight=None, compute_dtype=FP32, unit_dtype=None):
    return kernels.unfit(x, residual, weight, compute_dtype=compute_dtype, dtypes=[unit_dtype])


@pytest.mark.parametrize(
    "reason, arguments",
    (
        ("the input has no last dimension", dict(x=torch.ones(()))),
        (
            "the kernel computes in float32, not in float64",
            dict(x=torch.ones(2, 4), compute_dtype=torch.float64),
        ),
        (
            "the kernel does not round to float64",
            dict(x=torch.ones(2, 4), unit_dtype=torch.float64),
        ),
        ("the kernel takes 1 to 1048576 columns, not 0", dict(x=torch.ones(2, 0))),
        (
            "the kernel takes 1 to 1048576 columns, not 1048577",
            dict(x=torch.ones(1, 1).expand(1, 1048577)),
        ),
        (
            "the residual's shape [1, 4] is not the input's [2, 4]",
            dict(x=torch.ones(2, 4), residual=torch.ones(1, 4)),
        ),
        (
            "the weight's shape [1] is not one value for each of 4 columns",
            dict(x=torch.ones(2, 4), weight=torch.ones(1)),
        ),
        (
            "the weight's shape [1, 4] is not one value for each of 4 columns",
            dict(x=torch.ones(2, 4), weight=torch.ones(1, 4)),
        ),
        (
            "the input is float64, which the kernel does not take",
            dict(x=torch.ones(2, 4, dtype=torch.float64)),
        ),
        (
            "the weight is int64, which the kernel does not take",
            dict(x=torch.ones(2, 4), weight=torch.ones(4, dtype=torch.int64)),
        ),
        (
            "the residual is on meta, the input on cpu",
            dict(x=torch.ones(2, 4), residual=torch.ones(2, 4, device="meta")),
        ),
        (
            "the kernel runs on CUDA devices, the input is on meta",
            dict(x=torch.ones(2, 4, device="meta")),
        ),
        (
            "the input does not begin at a 16-byte boundary",
            dict(x=torch.ones(9)[1:].view(2, 4)),
        ),
    ),
)
def test_unfit(reason, arguments):
    assert unfit(**arguments) == reason


def test_fit():
    x = torch.ones(2, 4)
    assert unfit(x, x.half(), torch.ones(4, dtype=BF16), unit_dtype=BF16) is None
    assert unfit(x) is None


def test_too_many_gradients():
    h = normal(2, 64)
    with pytest.raises(ValueError, match="1 to 3 gradients, not 4"):
        backward([h] * 4, h, None)
