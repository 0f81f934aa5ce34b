"""The gate kernels on CPU tensors in Triton's interpreter, against plain formulas.

The interpreter truncates fp32 -> bf16 where a GPU rounds, so bf16 is allowed one step more.
"""

from dataclasses import replace

import pytest
import torch

from fxfuse.kernels import (
    gate_launch as kernels,
    gate_reference,
    rms_norm_launch,
    rows,
)
from tests.kernels.exact import assert_close, normal

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
DTYPES = (FP32, FP16, BF16)
EPS = 1e-6
# (N, group), with a group of 0 for all columns.
WIDTHS = ((1, 0), (64, 0), (96, 32), (128, 0), (1000, 0), (1024, 128), (4096, 0))


def rows_for(N):
    """Few rows, no multiple of any tile; more where a tile holds many."""
    return 37 if N <= 128 else 5 if N <= 1024 else 2


def operands(M, N, dtype=FP32, *, strided=False):
    """x, gate [M, N] and weight [N]; where strided, x and gate are halves of one projection."""
    if strided:
        x, gate = normal(M, 2 * N, dtype=dtype).chunk(2, -1)
    else:
        x, gate = normal(M, N, dtype=dtype), normal(M, N, dtype=dtype, seed=1)
    return x, gate, normal(N, dtype=dtype, seed=2)


def gradients(count, M, N, dtype):
    """`count` gradients; whole numbers where the interpreter would truncate their sums."""
    dys = [normal(M, N, dtype=dtype, seed=3 + i) for i in range(count)]
    return [dy.round() for dy in dys] if dtype == BF16 and count > 1 else dys


def assert_gradients(found, exact, likes, terms):
    """`found` is close to `exact` and has the dtypes of `likes`."""
    assert len(found) == len(exact) == len(likes)
    for actual, wanted, like in zip(found, exact, likes):
        if wanted is None:
            assert actual is None
            continue
        assert actual.dtype == like.dtype
        assert_close(actual, wanted, terms=terms)


# --- the formulas in fp64 ------------------------------------------------------------------


def silu(gate):
    return gate * torch.sigmoid(gate)


def norm(h, weight, group, offset):
    grouped = h.unflatten(-1, (-1, group or h.shape[-1]))
    rstd = torch.rsqrt(grouped.square().mean(-1, keepdim=True) + EPS)
    unit = (grouped * rstd).flatten(-2)
    return (unit if weight is None else unit * (offset + weight)), rstd.squeeze(-1)


def gate_after(x, gate, weight, group=0, offset=0.0):
    y, rstd = norm(x, weight, group, offset)
    return y * silu(gate), rstd.squeeze(-1)


def gate_before(x, gate, weight, group=0, offset=0.0):
    return norm(x * silu(gate), weight, group, offset)


def exact_gradients(formula, dys, tensors, dres=None):
    """Gradients of `formula` in fp64 from autograd, dys summed with the roundings of eager code."""
    dy = dys[0]
    for more in dys[1:]:
        dy = dy + more
    leaves = [None if t is None else t.double().requires_grad_() for t in tensors]
    formula(*leaves).backward(dy.double())
    found = [None if t is None else t.grad for t in leaves]
    if dres is not None:
        found[0] = found[0] + dres.double()
    return found


# --- calls ---------------------------------------------------------------------------------


def silu_gate(x, gate, *, sigmoid_dtype=None, silu_dtype=None, out_dtype=None):
    return kernels.silu_gate(
        x,
        gate,
        sigmoid_dtype=sigmoid_dtype,
        silu_dtype=silu_dtype,
        out_dtype=out_dtype or torch.promote_types(x.dtype, gate.dtype),
    )


NO_ROUNDING = dict(eps=EPS, unit_dtype=None, sigmoid_dtype=None, silu_dtype=None)


def norm_gate(x, gate, weight, *, offset=0.0, **given):
    given = {**NO_ROUNDING, "norm_dtype": None, "out_dtype": x.dtype, **given}
    return kernels.rms_norm_silu_gate(x, gate, weight, weight_offset=offset, **given)


def norm_gate_backward(dys, x, gate, weight, dres=None, *, offset=0.0, need_dweight=True):
    _, rstd = gate_after(x.double(), gate.double(), None)
    attributes = dict(weight_offset=offset, need_dweight=need_dweight)
    return kernels.rms_norm_silu_gate_backward(
        dys, x, gate, weight, rstd.float(), dres, **attributes
    )


def gate_norm(x, gate, weight, *, group=0, offset=0.0, **given):
    given = {**NO_ROUNDING, "gated_dtype": None, "out_dtype": x.dtype, **given}
    return kernels.silu_gate_rms_norm(x, gate, weight, group=group, weight_offset=offset, **given)


UNROUNDED = dict(sigmoid_dtype=None, silu_dtype=None, gated_dtype=None)


def gate_norm_backward(dys, x, gate, weight, *, group=0, offset=0.0, need_dweight=True):
    _, rstd = gate_before(x.double(), gate.double(), None, group)
    attributes = dict(group=group, weight_offset=offset, need_dweight=need_dweight, **UNROUNDED)
    return kernels.silu_gate_rms_norm_backward(dys, x, gate, weight, rstd.float(), **attributes)


def terms_of(dys, x, gate, weight, group=0, dres=None):
    """A bound for the terms whose sums are the gradients of norms."""
    largest = sum(dy.double().abs().max() for dy in dys)
    factor = 1.0 if weight is None else 1.0 + weight.double().abs().max()
    _, rstd = gate_before(x.double(), gate.double(), None, group)
    _, plain = gate_after(x.double(), gate.double(), None)
    scale = max(rstd.max().item(), plain.max().item(), 1.0)
    spread = x.double().abs().max() * gate.double().abs().max().clamp_min(1.0)
    extra = 0.0 if dres is None else dres.double().abs().max()
    return (largest * factor * scale * spread + extra).item()


# --- without a norm ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("N", (1, 5, 96, 1001, 4096, 11008))
def test_silu_gate(N, dtype):
    x, gate, _ = operands(rows_for(N), N, dtype, strided=dtype == FP16)
    y = silu_gate(x, gate)
    assert y.dtype == dtype
    assert_close(y, x.double() * silu(gate.double()))
    count = N % 3 + 1
    dys = gradients(count, *x.shape, dtype)
    exact = exact_gradients(lambda x, gate: x * silu(gate), dys, (x, gate))
    terms = terms_of(dys, x, gate, None) if dtype == FP32 else 0.0
    assert_gradients(kernels.silu_gate_backward(dys, x, gate), exact, (x, gate), terms)


@pytest.mark.parametrize("x_dtype, gate_dtype", ((FP16, FP32), (FP32, FP16), (FP16, BF16)), ids=str)
def test_silu_gate_in_mixed_dtypes(x_dtype, gate_dtype):
    x, gate = normal(5, 96, dtype=x_dtype), normal(5, 96, dtype=gate_dtype, seed=1)
    y = silu_gate(x, gate, out_dtype=FP16)
    assert y.dtype == FP16
    assert_close(y, x.double() * silu(gate.double()))
    dy = normal(5, 96, dtype=FP16, seed=2)
    exact = exact_gradients(lambda x, gate: x * silu(gate), [dy], (x, gate))
    found = kernels.silu_gate_backward([dy], x, gate)
    assert_gradients(found, exact, (x, gate), terms_of([dy], x, gate, None))


@pytest.mark.parametrize("sigmoid_dtype", (None, FP16), ids=str)
@pytest.mark.parametrize("silu_dtype", (None, FP16), ids=str)
@pytest.mark.parametrize("out_dtype", (FP32, FP16), ids=str)
def test_silu_gate_rounds_where_it_is_told(sigmoid_dtype, silu_dtype, out_dtype):
    x, gate, _ = operands(5, 1000, FP16)
    rounding = dict(sigmoid_dtype=sigmoid_dtype, silu_dtype=silu_dtype, out_dtype=out_dtype)
    found = silu_gate(x, gate, **rounding)
    assert_same_roundings(found, gate_reference.silu_gate(x, gate, **rounding))
    if silu_dtype == FP16:
        # a product of two fp16 is fp16, whatever dtype y then has
        assert torch.equal(found.half().float(), found.float())


def assert_same_roundings(found, expected):
    """All but a few of the bits are equal: those of sigmoid and of sums may differ in the last."""
    assert found.dtype == expected.dtype
    close = torch.isclose(found, expected, rtol=2e-6, atol=1e-7)
    assert close.double().mean() > 0.99
    torch.testing.assert_close(found, expected, rtol=4e-3, atol=4e-4)


def test_roundings_of_silu_gate_are_told_apart():
    x, gate, _ = operands(5, 1000, FP16)
    found = [
        silu_gate(x, gate, sigmoid_dtype=sigmoid_dtype, silu_dtype=silu_dtype)
        for sigmoid_dtype in (None, FP16)
        for silu_dtype in (None, FP16)
    ]
    for place, y in enumerate(found):
        for other in found[:place]:
            assert (y != other).double().mean() > 0.05


INF, NAN = float("inf"), float("nan")
LARGE = torch.tensor([INF, -INF, NAN, 1e4, -1e4, 200.0, -200.0, 88.0, -88.0, 0.0, -0.0])


@pytest.mark.parametrize("sigmoid_dtype", (None, FP16), ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_gates_give_what_the_formula_gives(dtype, sigmoid_dtype):
    gate = LARGE.to(dtype).repeat(3, 1)
    x = torch.tensor([[1.0], [-2.0], [0.0]]).to(dtype).expand(3, len(LARGE)).contiguous()
    rounding = dict(sigmoid_dtype=sigmoid_dtype, out_dtype=dtype)
    expected = gate_reference.silu_gate(x, gate, **rounding)
    torch.testing.assert_close(silu_gate(x, gate, **rounding), expected, equal_nan=True)
    found = kernels.silu_gate_backward([x], x, gate)
    for actual, wanted in zip(found, gate_reference.silu_gate_bwd([x], x, gate)):
        torch.testing.assert_close(actual, wanted, equal_nan=True)


def test_silu_is_exact_to_a_few_steps():
    gate = torch.linspace(-60.0, 60.0, 4000).view(4, 1000)
    y = silu_gate(torch.ones_like(gate), gate)
    assert_close(y, silu(gate.double()), steps=4)


# --- with a norm ---------------------------------------------------------------------------


@pytest.mark.parametrize("N, group", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_forward(N, group, dtype):
    x, gate, weight = operands(rows_for(N), N, dtype, strided=N % 64 == 0)
    wide = x.double(), gate.double(), weight.double()
    for offset in (0.0, 1.0) if N == 96 else (float(N % 3 == 1),):
        y, rstd = norm_gate(x, gate, weight, offset=offset)
        exact, exact_rstd = gate_after(*wide, offset=offset)
        assert_close(y, exact)
        assert_close(rstd, exact_rstd)
        y, rstd = gate_norm(x, gate, weight, group=group, offset=offset)
        exact, exact_rstd = gate_before(*wide, group, offset)
        assert_close(y, exact)
        assert_close(rstd, exact_rstd)


CASES = [
    # dtype, gradients of y, with dres
    (FP32, 3, True),
    (FP16, 2, True),
    (BF16, 1, False),
]


@pytest.mark.parametrize("N, group", WIDTHS)
@pytest.mark.parametrize("dtype, count, with_dres", CASES, ids=str)
def test_backward(N, group, dtype, count, with_dres):
    M, offset = rows_for(N), float(count == 2)
    x, gate, weight = operands(M, N, dtype, strided=N % 64 == 0)
    dys = gradients(count, M, N, dtype)
    dres = normal(M, N, dtype=dtype, seed=9) if with_dres else None
    check_backward(dys, x, gate, weight, dres, group, offset)


def check_backward(dys, x, gate, weight, dres=None, group=0, offset=0.0):
    tensors = (x, gate, weight)
    exact = exact_gradients(lambda *t: gate_after(*t, offset=offset)[0], dys, tensors, dres)
    # a sum over rows has as many terms as there are rows
    terms = len(x) * terms_of(dys, x, gate, weight, group, dres)
    found = norm_gate_backward(dys, x, gate, weight, dres, offset=offset)
    assert_gradients(found, exact, tensors, terms)
    exact = exact_gradients(lambda *t: gate_before(*t, group, offset)[0], dys, tensors)
    found = gate_norm_backward(dys, x, gate, weight, group=group, offset=offset)
    assert_gradients(found, exact, tensors, terms)


@pytest.fixture
def narrow_tiles(monkeypatch):
    """Rows of more than 1024 columns are walked in chunks."""
    cuts = {
        name: replace(cut, widest={2: 1024, 4: 1024}, chunk=1024)
        for name, cut in kernels._CUTS.items()
    }
    monkeypatch.setattr(kernels, "_CUTS", cuts)
    kernels.plan.cache_clear()
    yield
    kernels.plan.cache_clear()


@pytest.mark.parametrize("N, group", ((1101, 0), (4096, 2048)))
def test_wide_rows(N, group, narrow_tiles, launches):
    M = 9 if N < 2000 else 5  # more than the programs, so that partial sums of rows meet
    x, gate, weight = operands(M, N, FP16)
    y, rstd = gate_norm(x, gate, weight, group=group, offset=1.0)
    wide = x.double(), gate.double(), weight.double()
    exact, exact_rstd = gate_before(*wide, group, 1.0)
    assert_close(y, exact)
    assert_close(rstd, exact_rstd)
    y, rstd = norm_gate(x, gate, weight)
    exact, exact_rstd = gate_after(*wide)
    assert_close(y, exact)
    assert_close(rstd, exact_rstd)
    dys = gradients(2, M, N, FP16)
    check_backward(dys, x, gate, weight, normal(M, N, dtype=FP16, seed=9), group, 1.0)
    assert set(launches) == {"forward_wide", "backward_wide", "finalize"}


@pytest.mark.parametrize("kernel", kernels._CUTS)
def test_which_rows_are_wide(kernel):
    for dtype in (FP32, FP16):
        widest = kernels._CUTS[kernel].widest[dtype.itemsize]
        for group, name in ((widest, ""), (widest + 1, "_wide")):
            cut = kernels.plan(kernel, 3 * group, dtype, group=group)
            assert cut.kernel.fn.__name__.endswith("ward" + name)


def test_a_very_wide_row():
    x, gate, weight = operands(1, 16501, FP16)
    found = norm_gate_backward([x], x, gate, weight)
    tensors = (x, gate, weight)
    exact = exact_gradients(lambda *t: gate_after(*t)[0], [x], tensors)
    assert_gradients(found, exact, tensors, terms_of([x], x, gate, weight))
    y, _ = norm_gate(x, gate, weight)
    assert_close(y, gate_after(x.double(), gate.double(), weight.double())[0])


@pytest.mark.parametrize("N, group", ((96, 32), (1024, 0)))
def test_without_a_weight(N, group):
    x, gate, _ = operands(5, N)
    y, _ = norm_gate(x, gate, None, offset=1.0)
    assert_close(y, gate_after(x.double(), gate.double(), None)[0])
    y, _ = gate_norm(x, gate, None, group=group)
    assert_close(y, gate_before(x.double(), gate.double(), None, group)[0])
    check_backward(gradients(1, 5, N, FP32), x, gate, None, None, group)


@pytest.mark.parametrize("N", (96, 1024))
def test_mixed_dtypes(N):
    x, gate = normal(5, N, dtype=FP16), normal(5, N, seed=1)
    weight = normal(N, dtype=BF16, seed=2)
    y, _ = norm_gate(x, gate, weight, out_dtype=FP32)
    assert y.dtype == FP32
    assert_close(y, gate_after(x.double(), gate.double(), weight.double())[0])
    check_backward(gradients(2, 5, N, FP16), x, gate, weight, normal(5, N, seed=9))


ROUNDINGS = (
    {},
    {"unit_dtype": FP16},
    {"unit_dtype": FP16, "out_dtype": FP32},
    {"sigmoid_dtype": FP16},
    {"silu_dtype": FP16, "out_dtype": FP32},
    {"between": FP16},
    {"between": FP16, "silu_dtype": FP16},
    {"between": FP32, "unit_dtype": FP16, "silu_dtype": FP16, "out_dtype": FP32},
    {"between": BF16, "out_dtype": BF16},
)


@pytest.mark.parametrize("rounding", ROUNDINGS, ids=str)
@pytest.mark.parametrize("offset", (0.0, 1.0))
def test_rounds_where_it_is_told(rounding, offset):
    # bf16 only where the interpreter's truncation makes no difference of more than a step
    x, gate, weight = operands(5, 1000, FP16)
    rounding = {**NO_ROUNDING, "out_dtype": FP16, **rounding}
    between = rounding.pop("between", None)
    attributes = {**rounding, "weight_offset": offset}
    compare = assert_same_roundings if between != BF16 else assert_a_step_apart
    found = kernels.rms_norm_silu_gate(x, gate, weight, norm_dtype=between, **attributes)
    expected = gate_reference.rms_norm_silu_gate(x, gate, weight, norm_dtype=between, **attributes)
    compare(found[0], expected[0])
    attributes |= {"group": 125, "gated_dtype": between}
    found = kernels.silu_gate_rms_norm(x, gate, weight, **attributes)
    expected = gate_reference.silu_gate_rms_norm(x, gate, weight, **attributes)
    compare(found[0], expected[0])
    torch.testing.assert_close(
        found[1], expected[1], rtol=2e-2 if between == BF16 else 1e-5, atol=0
    )


def assert_a_step_apart(found, expected):
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=3e-2, atol=1e-3)


def test_the_statistic_comes_from_the_rounded_product():
    # silu(gate) = 1: what x * silu(gate) is rounded to decides about rstd alone
    gate = torch.full((3, 96), 1.27846454)
    x = torch.full((3, 96), 1.0 + 2**-12)
    _, rstd = gate_norm(x, gate, None, gated_dtype=FP16)
    _, unrounded = gate_norm(x, gate, None)
    assert torch.allclose(rstd, torch.ones_like(rstd), rtol=1e-6)
    assert not torch.allclose(unrounded, torch.ones_like(rstd), rtol=1e-5)


@pytest.mark.parametrize("backward", (norm_gate_backward, gate_norm_backward))
def test_gradients_are_rounded_after_each_addition(backward):
    x, gate, weight = operands(5, 1000, FP16)
    dys = gradients(3, 5, 1000, FP16)
    together = backward(dys, x, gate, weight)
    summed = backward([(dys[0] + dys[1]) + dys[2]], x, gate, weight)
    assert all(torch.equal(a, b) for a, b in zip(together, summed))
    mixed = backward([dys[0], dys[1].float()], x, gate, weight)
    summed = backward([dys[0] + dys[1].float()], x, gate, weight)
    assert all(torch.equal(a, b) for a, b in zip(mixed, summed))


@pytest.mark.parametrize("backward", (norm_gate_backward, gate_norm_backward))
def test_a_frozen_weight(backward, launches):
    x, gate, weight = operands(5, 96)
    dys = gradients(1, 5, 96, FP32)
    trained, frozen = (backward(dys, x, gate, weight, need_dweight=need) for need in (True, False))
    assert launches == ["backward", "finalize", "backward"]
    assert torch.equal(trained[0], frozen[0]) and torch.equal(trained[1], frozen[1])
    assert frozen[2] is None


# --- layouts and sizes ---------------------------------------------------------------------


def test_halves_of_a_projection_are_not_copied(monkeypatch):
    monkeypatch.setattr(rows, "_copy", None)
    x, gate, weight = operands(5, 96, strided=True)
    strided = run_all(x, gate, weight, [x], 32)
    packed = run_all(x.contiguous(), gate.contiguous(), weight, [x.contiguous()], 32)
    assert all(torch.equal(a, b) for a, b in zip(strided, packed))


def run_all(x, gate, weight, dys, group=0):
    """Every result of every op."""
    return [
        silu_gate(x, gate),
        *kernels.silu_gate_backward(dys, x, gate),
        *norm_gate(x, gate, weight),
        *norm_gate_backward(dys, x, gate, weight),
        *gate_norm(x, gate, weight, group=group),
        *gate_norm_backward(dys, x, gate, weight, group=group),
    ]


@pytest.mark.parametrize("group", (0, 32))
def test_any_layout(group):
    weight = normal(96, seed=2)
    x, gate, dy = normal(96, 7).t(), normal(7, 192)[:, ::2], normal(1, 96).expand(7, 96)
    found = run_all(x, gate, weight, [dy], group)
    expected = run_all(*(t.contiguous() for t in (x, gate, weight)), [dy.contiguous()], group)
    assert all(torch.equal(a, b) for a, b in zip(found, expected))


def test_more_and_fewer_dimensions():
    x, gate, weight = normal(2, 3, 96), normal(3, 2, 96).transpose(0, 1), normal(96)
    flat = run_all(x.view(6, 96), gate.reshape(6, 96), weight, [x.view(6, 96)], 32)
    for found, expected in zip(run_all(x, gate, weight, [x], 32), flat):
        assert torch.equal(found.flatten(), expected.flatten())
    y, rstd = gate_norm(x, gate, weight, group=32)
    assert y.shape == x.shape and rstd.shape == (2, 3, 3)
    one = run_all(x[0, 0], gate[0, 0], weight, [x[0, 0]], 32)
    assert one[0].shape == (96,) and one[3].shape == (96,) and one[4].shape == ()
    assert one[8].shape == (96,) and one[9].shape == (3,)
    assert torch.equal(one[8], y[0, 0])


@pytest.mark.parametrize("N, group", ((1, 0), (96, 32), (8200, 0)))
@pytest.mark.parametrize("between", ("sigmoid_dtype", "silu_dtype", "gated_dtype"))
def test_the_backward_rounds_the_product_as_the_forward(N, group, between):
    """In columns whose gradient cancels, the rounding of another product would be all there is."""
    x, gate, dy = (normal(3, N, dtype=FP16, seed=seed) for seed in (1, 2, 3))
    rounded = {**UNROUNDED, between: FP16}
    given = dict(group=group, eps=EPS, compute_dtype=FP32)
    _, rstd = gate_reference.silu_gate_rms_norm(x, gate, None, **given, **rounded)
    attributes = dict(group=group, weight_offset=0.0, need_dweight=False, **rounded)
    operands = [dy], x, gate, None, rstd
    ours = kernels.silu_gate_rms_norm_backward(*operands, **attributes)
    expected = gate_reference.silu_gate_rms_norm_bwd(*operands, **attributes)
    for got, want in zip(ours[:2], expected[:2]):
        torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-5)


@pytest.mark.parametrize("shape", ((0, 96), (3, 0), (2, 0, 64)))
def test_empty(shape, launches):
    x, weight = torch.empty(shape), normal(shape[-1])
    assert silu_gate(x, x).shape == shape
    assert [t.shape for t in kernels.silu_gate_backward([x], x, x)] == [shape, shape]
    y, rstd = norm_gate(x, x, weight)
    assert y.shape == shape and rstd.shape == shape[:-1]
    group = 32 if shape[-1] else 0
    y, rstd = gate_norm(x, x, weight, group=group)
    assert y.shape == shape and rstd.shape[:-1] == shape[:-1]
    given = dict(weight_offset=0.0, need_dweight=True)
    operands = [x], x, x, weight
    grouped = dict(group=group, **UNROUNDED)
    for dx, dgate, dweight in (
        kernels.rms_norm_silu_gate_backward(*operands, rstd[..., 0], None, **given),
        kernels.silu_gate_rms_norm_backward(*operands, rstd, **grouped, **given),
    ):
        assert dx.shape == dgate.shape == shape
        assert torch.equal(dweight, torch.zeros_like(weight))
    assert launches == []


@pytest.mark.parametrize("N, group", ((1101, 0), (1000, 0), (96, 32)))
def test_nothing_is_written_outside_of_the_results(N, group, narrow_tiles, monkeypatch):
    frames = []

    def framed(*shape, dtype, device=None):
        """An empty tensor in the middle of a larger one full of sevens."""
        shape = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        size, frame = torch.Size(shape).numel(), 4096
        memory = torch.full((size + 2 * frame,), 7.0, dtype=dtype)
        frames.append((memory[:frame], memory[frame + size :]))
        return memory[frame : frame + size].view(shape)

    x, gate, weight = operands(5, N, FP16)
    for module in (kernels, rms_norm_launch):
        monkeypatch.setattr(module.torch, "empty", framed)
    run_all(x, gate, weight, [x], group)
    monkeypatch.undo()
    assert len(frames) > 10
    for frame in frames:
        assert all((part == 7.0).all() for part in frame)


# --- what does not depend on the rest ------------------------------------------------------


@pytest.mark.parametrize("N, group", ((96, 32), (200, 0)))
def test_same_bits_every_run_and_for_every_number_of_rows(N, group):
    x, gate, weight = operands(9, N)
    first, again = (run_all(x, gate, weight, [x], group) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again))
    row = slice(7, 8)
    alone = run_all(x[row], gate[row], weight, [x[row]], group)
    for together, single in zip(first, alone):
        if together.shape != weight.shape:
            assert torch.equal(together[row], single)


@pytest.mark.parametrize("bad", (INF, -INF, NAN))
@pytest.mark.parametrize("N, group", ((64, 0), (1000, 0)))
def test_nan_and_inf_stay_in_their_row(N, group, bad):
    x, gate, weight = operands(5, N)
    broken = gate.clone()
    broken[2, 3] = bad
    others = [row for row in range(5) if row != 2]
    sound = run_all(x, gate, weight, [x], group)
    for found, expected in zip(run_all(x, broken, weight, [x], group), sound):
        if found.shape != weight.shape:
            assert torch.equal(found[others], expected[others])


def test_nan_stays_in_its_group():
    x, gate, weight = operands(5, 96)
    broken = x.clone()
    broken[2, 40] = NAN
    others = [*range(32), *range(64, 96)]
    for run in (gate_norm, lambda *t, group: gate_norm_backward([gate], *t, group=group)[:2]):
        sound = run(x, gate, weight, group=32)[0]
        found = run(broken, gate, weight, group=32)[0]
        assert torch.equal(found[:, others], sound[:, others])
        assert found[2, 40].isnan()


@pytest.mark.parametrize("groups", (1, 3, 64, 4096))
@pytest.mark.parametrize("M", (1, 3, 257, 1 << 20))
def test_programs_of_a_group_share_the_rows_evenly(groups, M):
    cut = kernels.plan("silu_gate_rms_norm_backward", groups * 64, BF16, group=64)
    tiles = -(-M // cut.constants["ROWS"])
    programs = rows.count_programs(M, cut, 132, groups)
    assert 1 <= programs <= tiles
    each = -(-tiles // programs)
    assert each <= 256
    assert (programs - 1) * each < tiles, "a program is left without rows"


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


def test_each_forward_and_gradient_is_one_launch(launches):
    x, gate, weight = operands(5, 96)
    run_all(x, gate, weight, [x, x], 32)
    assert launches == [
        "silu_gate",
        "silu_gate_backward",
        *["forward", "backward", "finalize"] * 2,
    ]


@pytest.mark.parametrize(
    "reason, tensors, weight, given",
    (
        ("the x has no last dimension", {"x": torch.ones(())}, None, {}),
        (
            "the kernel computes in float32, not in float64",
            {"x": torch.ones(2, 4)},
            None,
            {"compute_dtype": torch.float64},
        ),
        (
            "the kernel does not round to float64",
            {"x": torch.ones(2, 4)},
            None,
            {"dtypes": [None, FP16, torch.float64]},
        ),
        ("the kernel takes 1 to 1048576 columns, not 0", {"x": torch.ones(2, 0)}, None, {}),
        (
            "the gate's shape [1, 4] is not the x's [2, 4]",
            {"x": torch.ones(2, 4), "gate": torch.ones(1, 4)},
            None,
            {},
        ),
        (
            "the weight's shape [1] is not one value for each of 4 columns",
            {"x": torch.ones(2, 4)},
            torch.ones(1),
            {},
        ),
        (
            "the gate is int64, which the kernel does not take",
            {"x": torch.ones(2, 4), "gate": torch.ones(2, 4, dtype=torch.int64)},
            None,
            {},
        ),
        (
            "the weight is on meta, the x on cpu",
            {"x": torch.ones(2, 4)},
            torch.ones(4, device="meta"),
            {},
        ),
        (
            "the kernel runs on CUDA devices, the x is on meta",
            {"x": torch.ones(2, 4, device="meta")},
            None,
            {},
        ),
        (
            "the gate does not begin at a 16-byte boundary",
            {"x": torch.ones(2, 4), "gate": torch.ones(9)[1:].view(2, 4)},
            None,
            {},
        ),
        (
            "4 columns are no whole number of groups of 3",
            {"x": torch.ones(2, 4)},
            None,
            {"group": 3},
        ),
    ),
)
def test_unfit(reason, tensors, weight, given):
    assert kernels.unfit(tensors, {"weight": weight}, **given) == reason


def test_fit():
    x = torch.ones(2, 4)
    tensors = {"x": x, "gate": x.half(), "dres": None}
    given = dict(dtypes=[BF16, None], group=2)
    assert kernels.unfit(tensors, {"weight": torch.ones(4, dtype=BF16)}, **given) is None
    assert kernels.unfit(tensors, {}) is None


def test_too_many_gradients():
    x, gate, weight = operands(2, 64)
    for backward in (norm_gate_backward, gate_norm_backward):
        with pytest.raises(ValueError, match="1 to 3 gradients, not 4"):
            backward([x] * 4, x, gate, weight)
