"""The norm, add, norm kernels on CPU tensors in Triton's interpreter, against plain formulas.

The interpreter truncates fp32 -> bf16 where a GPU rounds, so bf16 is allowed one step more.
"""

import pytest
import torch

from fxfuse.kernels import (
    rms_norm_launch,
    rows,
    sandwich_launch as kernels,
    sandwich_reference,
)
from tests.kernels.exact import assert_close, normal

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
DTYPES = (FP32, FP16, BF16)
EPS1, EPS2 = 1e-5, 1e-6
WIDTHS = (1, 64, 96, 129, 1001, 4096)


def rows_for(N):
    """Few rows, no multiple of any tile; more where a tile holds many."""
    return 37 if N <= 128 else 5 if N <= 1024 else 2


def operands(M, N, dtype=FP32):
    """x, residual [M, N] and two weights [N]."""
    x, residual = (normal(M, N, dtype=dtype, seed=seed) for seed in (0, 1))
    return x, residual, *(normal(N, dtype=dtype, seed=seed) for seed in (2, 3))


def forward(x, residual, weight1, weight2, *, offsets=(0.0, 0.0), h_dtype=None, **given):
    given = {"unit_dtype1": None, "norm_dtype1": None, "unit_dtype2": None, **given}
    given.setdefault("out_dtype", x.dtype)
    return kernels.rms_norm_add_rms_norm(
        x,
        residual,
        weight1,
        weight2,
        eps1=EPS1,
        eps2=EPS2,
        weight_offset1=offsets[0],
        weight_offset2=offsets[1],
        h_dtype=h_dtype or residual.dtype,
        **given,
    )


def backward(dys, x, h, weight1, weight2, dres=None, *, offsets=(0.0, 0.0), need=(True, True)):
    rstd1, rstd2 = rstd(x.double(), EPS1).float(), rstd(h.double(), EPS2).float()
    return kernels.rms_norm_add_rms_norm_backward(
        dys,
        x,
        h,
        weight1,
        weight2,
        rstd1.squeeze(-1),
        rstd2.squeeze(-1),
        dres,
        weight_offset1=offsets[0],
        weight_offset2=offsets[1],
        need_dweight1=need[0],
        need_dweight2=need[1],
    )


# --- the formulas in fp64 ------------------------------------------------------------------


def rstd(h, eps):
    return torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)


def norm(h, weight, offset, eps):
    unit = h * rstd(h, eps)
    return unit if weight is None else unit * (offset + weight)


def exact_gradients(dys, x, h, weight1, weight2, dres, offsets):
    """dx, dh and the weights' gradients in fp64 from autograd, for the h that was rounded."""
    dy = dys[0]
    for more in dys[1:]:
        dy = dy + more
    x, h, weight1, weight2 = (
        None if t is None else t.double().requires_grad_() for t in (x, h, weight1, weight2)
    )
    norm(h, weight2, offsets[1], EPS2).backward(dy.double())
    dh = h.grad if dres is None else h.grad + dres.double()
    norm(x, weight1, offsets[0], EPS1).backward(dh)
    return x.grad, dh, *(None if w is None else w.grad for w in (weight1, weight2))


def check_forward(x, residual, weight1, weight2, offsets=(0.0, 0.0), **given):
    y, h, rstd1, rstd2 = forward(x, residual, weight1, weight2, offsets=offsets, **given)
    normed = norm(x.double(), _double(weight1), offsets[0], EPS1)
    assert_close(h, residual.double() + normed, terms=normed.abs().max().item())
    # what follows comes from the rounded h
    assert_close(y, norm(h.double(), _double(weight2), offsets[1], EPS2))
    assert_close(rstd1, rstd(x.double(), EPS1).squeeze(-1))
    assert_close(rstd2, rstd(h.double(), EPS2).squeeze(-1))
    return y, h


def _double(weight):
    return None if weight is None else weight.double()


def check_backward(
    dys, x, h, weight1, weight2, dres=None, offsets=(0.0, 0.0), *, dh_is_rounded=False
):
    found = backward(dys, x, h, weight1, weight2, dres, offsets=offsets)
    exact = exact_gradients(dys, x, h, weight1, weight2, dres, offsets)
    largest = sum(dy.double().abs().max() for dy in dys)
    for t, weight, eps in ((h, weight2, EPS2), (x, weight1, EPS1)):
        largest = largest * rstd(t.double(), eps).max()
        largest = largest * (1.0 if weight is None else 1.0 + weight.double().abs().max())
        largest = largest + (0.0 if dres is None else dres.double().abs().max())
    terms = len(x) * largest.item() * max(1.0, x.abs().max().item(), h.abs().max().item())
    if dh_is_rounded:
        terms *= torch.finfo(h.dtype).eps / torch.finfo(FP32).eps / 16
    for actual, wanted, like in zip(found, exact, (x, h, weight1, weight2)):
        if wanted is None:
            assert actual is None
            continue
        assert actual.dtype == like.dtype
        assert_close(actual, wanted, terms=terms)


# --- numbers -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("N", WIDTHS)
def test_both_ways(N, dtype):
    M, offsets = rows_for(N), ((0.0, 1.0) if N == 96 else (1.0, 0.0) if N == 128 else (0.0, 0.0))
    x, residual, weight1, weight2 = operands(M, N, dtype)
    _, h = check_forward(x, residual, weight1, weight2, offsets)
    count = {FP32: 3, FP16: 2, BF16: 1}[dtype]
    dys = [normal(M, N, dtype=dtype, seed=5 + i) for i in range(count)]
    dres = normal(M, N, dtype=dtype, seed=9) if dtype != BF16 else None
    check_backward(dys, x, h, weight1, weight2, dres, offsets)


def test_without_weights():
    x, residual, weight1, weight2 = operands(5, 96)
    for weights in ((None, None), (weight1, None), (None, weight2)):
        _, h = check_forward(x, residual, *weights, (1.0, 1.0))
        check_backward([residual], x, h, *weights, None, (1.0, 1.0))


def test_mixed_dtypes():
    x, _, weight1, _ = operands(5, 96, FP16)
    residual, weight2 = normal(5, 96, seed=1), normal(96, dtype=BF16, seed=2)
    y, h = check_forward(x, residual, weight1, weight2)
    assert (y.dtype, h.dtype) == (FP16, FP32)
    check_backward([y, y], x, h, weight1, weight2, normal(5, 96, dtype=FP16, seed=3))


ROUNDINGS = (
    {},
    {"norm_dtype1": FP16},
    {"unit_dtype1": FP16},
    {"unit_dtype2": FP16, "out_dtype": FP32},
    {"unit_dtype1": FP16, "norm_dtype1": FP16, "unit_dtype2": FP16},
)


@pytest.mark.parametrize("rounding", ROUNDINGS, ids=str)
@pytest.mark.parametrize("offset", (0.0, 1.0))
def test_rounds_where_it_is_told(rounding, offset):
    tensors = operands(5, 1000, FP16)
    rounding = {"out_dtype": FP16, **rounding}
    found = forward(
        *tensors, offsets=(offset, offset), h_dtype=h_dtype(rounding, offset), **rounding
    )
    expected = sandwich_reference.rms_norm_add_rms_norm(
        *tensors, eps1=EPS1, eps2=EPS2, weight_offset1=offset, weight_offset2=offset, **rounding
    )
    for actual, wanted in zip(found, expected):
        assert actual.dtype == wanted.dtype
        # the order of a sum may move a few of the bits
        assert torch.isclose(actual, wanted, rtol=2e-6, atol=1e-7).double().mean() > 0.99
        torch.testing.assert_close(actual, wanted, rtol=4e-3, atol=4e-3)


def h_dtype(rounding, offset):
    """The dtype of a fp16 residual plus the norm."""
    product = rounding.get("unit_dtype1") if offset == 0 else FP32
    return rounding.get("norm_dtype1") or product or FP32


def test_roundings_are_told_apart():
    tensors = operands(5, 1000, FP16)
    found = [
        forward(*tensors, **{name: FP16})
        for name in ("out_dtype", "unit_dtype1", "norm_dtype1", "unit_dtype2")
    ]
    for place, results in enumerate(found):
        for others in found[:place]:
            assert (results[0] != others[0]).double().mean() > 0.02


def test_the_second_statistic_comes_from_the_rounded_sum():
    # what rounding h to fp16 drops would move rstd2 by 1000 steps of fp32
    x, residual = torch.full((3, 96), 2.0**-12), torch.ones(3, 96, dtype=FP16)
    weight = torch.full((96,), 2.0**-12)
    _, h, _, rstd2 = forward(x, residual, weight, None, h_dtype=FP16)
    assert torch.equal(h, residual)
    assert_close(rstd2, rstd(h.double(), EPS2).squeeze(-1))


def test_dh_is_not_rounded_on_its_way_into_the_first_norm():
    x, residual, weight1, weight2 = operands(5, 1000, FP16)
    x, dres = x.float(), torch.full((5, 1000), 300.0, dtype=FP16)
    dx, dh, _, _ = backward([residual], x, residual, weight1, weight2, dres)
    exact, _, _, _ = exact_gradients([residual], x, residual, weight1, weight2, dres, (0.0, 0.0))
    rounded, _ = rms_norm_launch.backward(
        [dh], x, weight1, rstd(x, EPS1).squeeze(-1), None, weight_offset=0.0, need_dweight=False
    )
    assert (dx - exact).abs().max() < (rounded - exact).abs().max() / 50


# --- rows that one tile does not hold ------------------------------------------------------


@pytest.fixture
def narrow_tiles(monkeypatch):
    """Rows of more than 1024 columns are walked in chunks, or take one kernel for each norm."""
    for name in ("forward", "backward"):
        monkeypatch.setitem(kernels._WIDEST, name, {2: 1024, 4: 1024})
    monkeypatch.setattr(kernels, "_CHUNK", 1024)
    kernels.plan.cache_clear()
    yield
    kernels.plan.cache_clear()


@pytest.mark.parametrize("dtype", (FP32, FP16), ids=str)
def test_wide_rows(dtype, narrow_tiles, launches):
    N = 2501
    x, residual, weight1, weight2 = operands(3, N, dtype)
    _, h = check_forward(x, residual, weight1, weight2, (1.0, 0.0))
    dys = [normal(3, N, dtype=dtype, seed=5 + i) for i in range(2)]
    check_backward(dys, x, h, weight1, weight2, residual, (1.0, 0.0), dh_is_rounded=True)
    assert launches == ["forward_wide", "backward", "finalize", "backward", "finalize"]


def test_which_rows_are_wide():
    for dtype in (FP32, FP16):
        limits = {name: sizes[dtype.itemsize] for name, sizes in kernels._WIDEST.items()}
        for N, wide in ((limits["forward"], ""), (limits["forward"] + 1, "_wide")):
            cut = kernels.plan("forward", N, dtype)
            assert cut.kernel.fn.__name__ == "forward" + wide
        assert kernels.fits_one_kernel(limits["backward"], dtype)
        assert not kernels.fits_one_kernel(limits["backward"] + 1, dtype)


# --- layouts, sizes, and what does not depend on the rest -----------------------------------


def run_all(x, residual, weight1, weight2, dys):
    return [
        *forward(x, residual, weight1, weight2),
        *backward(dys, x, residual, weight1, weight2, residual),
    ]


def test_strided_rows_are_not_copied(monkeypatch):
    weights = operands(5, 96)[2:]
    x, residual = normal(5, 192).chunk(2, -1)
    packed = run_all(x.contiguous(), residual.contiguous(), *weights, [x.contiguous()])
    monkeypatch.setattr(rows, "_copy", None)
    strided = run_all(x, residual, *weights, [x])
    assert all(torch.equal(a, b) for a, b in zip(strided, packed))


def test_any_layout_and_number_of_dimensions():
    x, residual, *weights = operands(6, 96)
    flat = run_all(x, residual, *weights, [x])
    transposed = run_all(x.t().contiguous().t(), residual, *weights, [x])
    assert all(torch.equal(a, b) for a, b in zip(transposed, flat))
    deep = run_all(x.view(2, 3, 96), residual.view(2, 3, 96), *weights, [x.view(2, 3, 96)])
    assert [t.shape for t in deep[:4]] == [(2, 3, 96), (2, 3, 96), (2, 3), (2, 3)]
    assert all(torch.equal(a.flatten(), b.flatten()) for a, b in zip(deep, flat))
    one = run_all(x[1], residual[1], *weights, [x[1]])
    assert [t.shape for t in one] == [(96,), (96,), (), (), (96,), (96,), (96,), (96,)]
    assert all(torch.equal(a, b[1]) for a, b in zip(one[:6], flat))


@pytest.mark.parametrize("shape", ((0, 96), (3, 0), (2, 0, 8192)))
def test_empty(shape, launches):
    x, weight = torch.empty(shape), normal(shape[-1])
    y, h, rstd1, rstd2 = forward(x, x, weight, weight)
    assert y.shape == h.shape == shape
    assert rstd1.shape == rstd2.shape == shape[:-1]
    dx, dh, dweight1, dweight2 = backward([x], x, x, weight, weight)
    assert dx.shape == dh.shape == shape
    assert torch.equal(dweight1, torch.zeros_like(weight))
    assert torch.equal(dweight2, torch.zeros_like(weight))
    assert launches == []


@pytest.mark.parametrize("need", ((True, False), (False, True), (False, False)))
def test_frozen_weights(need, launches):
    x, h, weight1, weight2 = operands(5, 96)
    trained = backward([x], x, h, weight1, weight2)
    assert launches == ["backward", "finalize", "finalize"]
    found = backward([x], x, h, weight1, weight2, need=need)
    wanted = (True, True, *need)
    for actual, expected, is_wanted in zip(found, trained, wanted):
        assert torch.equal(actual, expected) if is_wanted else actual is None


def test_gradients_are_rounded_after_each_addition():
    x, h, weight1, weight2 = operands(5, 96, FP16)
    dys = [normal(5, 96, dtype=FP16, seed=5 + i) for i in range(3)]
    together = backward(dys, x, h, weight1, weight2)
    summed = backward([(dys[0] + dys[1]) + dys[2]], x, h, weight1, weight2)
    assert all(torch.equal(a, b) for a, b in zip(together, summed))


@pytest.mark.parametrize("N", (96, 1000, 1101))
def test_nothing_is_written_outside_of_the_results(N, narrow_tiles, monkeypatch):
    frames = []

    def framed(*shape, dtype, device=None):
        """An empty tensor in the middle of a larger one full of sevens."""
        shape = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        size, frame = torch.Size(shape).numel(), 4096
        memory = torch.full((size + 2 * frame,), 7.0, dtype=dtype)
        frames.append((memory[:frame], memory[frame + size :]))
        return memory[frame : frame + size].view(shape)

    tensors = operands(5, N, FP16)
    monkeypatch.setattr(torch, "empty", framed)
    run_all(*tensors, [tensors[0]])
    monkeypatch.undo()
    assert len(frames) >= 10
    for frame in frames:
        assert all((part == 7.0).all() for part in frame)


@pytest.mark.parametrize("N", (64, 1000))
def test_same_bits_every_run_and_for_every_number_of_rows(N):
    x, residual, *weights = operands(9, N)
    first, again = (run_all(x, residual, *weights, [x]) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again))
    row = slice(7, 8)
    alone = run_all(x[row], residual[row], *weights, [x[row]])
    assert all(torch.equal(a[row], b) for a, b in zip(first[:6], alone))


@pytest.mark.parametrize("bad", (float("nan"), float("inf")))
def test_nan_and_inf_stay_in_their_row(bad):
    x, residual, *weights = operands(5, 96)
    broken = x.clone()
    broken[2, 3] = bad
    others = [row for row in range(5) if row != 2]
    sound = run_all(x, residual, *weights, [residual])
    found = run_all(broken, residual, *weights, [residual])
    for actual, expected in zip(found[:6], sound):
        assert torch.equal(actual[others], expected[others])
    assert found[0][2].isnan().any()


# --- launches, and what the kernels refuse --------------------------------------------------


@pytest.fixture
def launches(monkeypatch):
    """The names of the kernels that are launched."""
    seen = []

    def recording(cut, *given):
        seen.append(cut.kernel.fn.__name__)
        rows.launch(cut, *given)

    for module in (kernels, rms_norm_launch):
        monkeypatch.setattr(module, "launch", recording)
    return seen


def test_unfit():
    x, weight = torch.ones(2, 4), torch.ones(4)
    tensors = {"input": x, "residual": x.half(), "dres": None}
    assert kernels.unfit(tensors, {"first weight": weight, "second weight": None}) is None
    reason = "the second weight's shape [2] is not one value for each of 4 columns"
    assert kernels.unfit(tensors, {"second weight": torch.ones(2)}) == reason
    reason = "the residual's shape [4] is not the input's [2, 4]"
    assert kernels.unfit({"input": x, "residual": weight}, {}) == reason


def test_too_many_gradients():
    x, h, *weights = operands(2, 64)
    with pytest.raises(ValueError, match="1 to 3 gradients, not 4"):
        backward([x] * 4, x, h, *weights)
