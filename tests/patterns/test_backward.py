"""The backward patterns on graphs of ATen ops, as autograd and make_fx leave them."""

from __future__ import annotations

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

import fxfuse

OPS = torch.ops.fxfuse
ROWS, WIDTH = (2, 3), 8
BF16, FP32 = torch.bfloat16, torch.float32
BOTH = {"backward_add_rms_norm": 1, "backward_sum_rms_norm": 1}


def tensors(count: int, dtype: torch.dtype = BF16, shape: tuple = (*ROWS, WIDTH)) -> list:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for _ in range(count)]


def norm(dys: list, h: torch.Tensor, dres: torch.Tensor | None = None) -> tuple:
    weight, rstd = torch.full((WIDTH,), 0.5, dtype=h.dtype), torch.ones(ROWS)
    return OPS.rms_norm_bwd(dys, h, weight, rstd, dres, weight_offset=0.0, need_dweight=True)


def fuse(function, *inputs) -> tuple[fxfuse.Report, fx.GraphModule]:
    gm = fxfuse.apply(make_fx(function)(*inputs))
    gm.graph.lint()
    return gm.meta["fxfuse"], gm


def backward_of(gm: fx.GraphModule, op=OPS.rms_norm_bwd.default) -> fx.Node:
    (node,) = gm.graph.find_nodes(op="call_function", target=op)
    return node


def check(function, *inputs, counts: dict) -> fx.GraphModule:
    """The counts, and the same results: bit by bit in what is rounded once, else within a step."""
    report, gm = fuse(function, *inputs)
    assert report.counts == counts, report
    for got, want in zip(gm(*inputs), function(*inputs)):
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want, rtol=2**-7, atol=2**-7)
    assert not fxfuse.apply(gm).meta["fxfuse"].modified
    return gm


# --------------------------------------------------------------------------- sums


SUMS = {
    "two": lambda a, b, c, d: a + b,
    "three from the left": lambda a, b, c, d: (a + b) + c,
    "three from the right": lambda a, b, c, d: a + (b + c),
    "four from the left": lambda a, b, c, d: ((a + b) + c) + d,
    "four in pairs": lambda a, b, c, d: (a + b) + (c + d),
}


@pytest.mark.parametrize("total", SUMS.values(), ids=SUMS)
@pytest.mark.parametrize("dtype", [BF16, torch.float16, FP32], ids=str)
def test_sums(total, dtype):
    def function(a, b, c, d, h):
        return norm([total(a, b, c, d)], h)

    *dys, h = tensors(5, dtype)
    report, gm = fuse(function, *dys, h)
    assert report.counts == {"backward_sum_rms_norm": 1}
    for got, want in zip(gm(*dys, h), function(*dys, h)):
        assert torch.equal(got, want), "every add is rounded as it was"
    terms = len(backward_of(gm).args[0])
    assert terms == (2 if total is SUMS["two"] else 3)
    adds = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)
    assert len(adds) == (1 if "four" in next(k for k, v in SUMS.items() if v is total) else 0)


def test_sums_of_matrix_products_behind_views():
    def function(a, b, c, w, h):
        q, k, v = ((t @ w).view(*ROWS, WIDTH) for t in (a, b, c))
        return norm([q + k + v], h)

    flat = tensors(3, shape=(6, WIDTH))
    gm = check(
        function, *flat, *tensors(1, shape=(WIDTH, WIDTH)), *tensors(1),
        counts={"backward_sum_rms_norm": 1},
    )  # fmt: skip
    assert len(backward_of(gm).args[0]) == 3


def test_a_view_of_a_sum():
    def function(a, b, h):
        return norm([(a + b.t()).view(*ROWS, WIDTH)], h)

    inputs = [*tensors(1, shape=(6, WIDTH)), *tensors(1, shape=(WIDTH, 6)), *tensors(1)]
    gm = check(function, *inputs, counts={"backward_sum_rms_norm": 1})
    values = [n.meta["val"] for n in backward_of(gm).args[0]]
    assert [v.shape for v in values] == [(*ROWS, WIDTH)] * 2


def test_a_sum_that_is_used_elsewhere_stays():
    def function(a, b, h):
        total = a + b
        return *norm([total], h), total

    report, _ = fuse(function, *tensors(3))
    assert not report.counts


@pytest.mark.parametrize(
    "total",
    [
        lambda a, b: torch.add(a, b, alpha=2),
        lambda a, b: a + b[..., :1],
        lambda a, b: a + 1.0,
        lambda a, b: (a.float() + b).to(BF16),
        lambda a, b: a * b,
    ],
    ids=["scaled", "broadcast", "a number", "in another dtype", "a product"],
)
def test_what_is_no_sum_of_gradients(total):
    report, _ = fuse(lambda a, b, h: norm([total(a, b)], h), *tensors(3))
    assert not report.counts


# --------------------------------------------------------------------------- residual gradients


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("swapped", [False, True])
def test_a_residual_gradient(dtype, swapped):
    def function(dy, h, dres):
        dh, dweight = norm([dy], h)
        return (dh + dres if swapped else dres + dh), dweight

    gm = check(function, *tensors(3, dtype), counts={"backward_add_rms_norm": 1})
    assert backward_of(gm).args[4] is not None


def test_the_weight_gradient_may_be_unused():
    def function(dy, h, dres):
        return (dres + norm([dy], h)[0],)

    check(function, *tensors(3), counts={"backward_add_rms_norm": 1})


def test_sums_and_a_residual_gradient():
    def function(a, b, h, dres):
        dh, dweight = norm([a + b], h)
        return dres + dh, dweight

    check(function, *tensors(4), counts=BOTH)


def test_a_second_residual_gradient_stays_outside():
    def function(dy, h, one, two):
        dh, dweight = norm([dy], h)
        return two + (one + dh), dweight

    report, _ = fuse(function, *tensors(4))
    assert report.counts == {"backward_add_rms_norm": 1}
    assert [m.reason for m in report.misses] == [
        "the kernel adds another residual gradient already"
    ]


REFUSED = {
    "another dtype": (
        lambda dh, dres: dh + dres.float(),
        "the residual gradient is torch.float32, the norm's torch.bfloat16",
    ),
    "another shape": (
        lambda dh, dres: dh + dres[..., :1],
        "the residual gradient has another shape than the norm's input",
    ),
}


@pytest.mark.parametrize(("add", "reason"), REFUSED.values(), ids=REFUSED)
def test_refused(add, reason):
    def function(dy, h, dres):
        dh, dweight = norm([dy], h)
        return add(dh, dres), dweight

    report, _ = fuse(function, *tensors(3))
    assert not report.counts and [m.reason for m in report.misses] == [reason]


def test_a_gradient_that_is_used_elsewhere_stays():
    def function(dy, h, dres):
        dh, dweight = norm([dy], h)
        return dres + dh, dweight, dh * 2.0

    report, _ = fuse(function, *tensors(3))
    assert not report.counts
    assert "is also used by mul" in report.misses[0].reason


def test_a_residual_gradient_that_needs_the_norms():
    def function(dy, h, dres):
        dh, dweight = norm([dy], h)
        return dres * dweight + dh, dweight

    report, _ = fuse(function, *tensors(3))
    assert not report.counts


# --------------------------------------------------------------------------- the other ops


def test_of_a_gated_norm():
    def function(a, b, x, gate, dres):
        weight, rstd = torch.ones(WIDTH, dtype=x.dtype), torch.ones(ROWS)
        dx, dgate, dweight = OPS.rms_norm_silu_gate_bwd(
            [a + b], x, gate, weight, rstd, None, need_dweight=True
        )
        return dx + dres, dgate, dweight

    check(function, *tensors(5), counts=BOTH)


def test_of_the_sandwich():
    def function(a, b, x, h, dres):
        weight, rstd = torch.ones(WIDTH, dtype=x.dtype), torch.ones(ROWS)
        dx, dh, *dweights = OPS.rms_norm_add_rms_norm_bwd(
            [a + b], x, h, weight, weight, rstd, rstd, None, need_dweight1=True, need_dweight2=True
        )
        return dx, dh + dres, *dweights

    # dres is of the residual alone here: inside of the kernel it would change dx
    check(function, *tensors(5), counts={"backward_sum_rms_norm": 1})


@pytest.mark.parametrize("grouped", [False, True])
def test_sums_of_gates(grouped):
    def function(a, b, x, gate):
        if not grouped:
            return OPS.silu_gate_bwd([a + b], x, gate)
        weight, rstd = torch.ones(WIDTH, dtype=x.dtype), torch.ones(*ROWS, 2)
        return OPS.silu_gate_rms_norm_bwd(
            [a + b], x, gate, weight, rstd, group=4, need_dweight=True
        )

    check(function, *tensors(4), counts={"backward_sum_rms_norm": 1})
