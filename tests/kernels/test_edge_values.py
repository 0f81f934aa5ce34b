"""All outer ops at the edges: values, shapes, strides and derivatives that are not the usual ones.

Each op is compared with the chain of plain ops that it stands for, on both of its sides.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F

import fxfuse
from fxfuse.kernels import compiled, ops, reference  # noqa: F401
from tests.kernels.test_numerics import error, steps_apart

OPS = torch.ops.fxfuse
FP32, FP16, BF16, FP64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
EPS = 1e-6
ROUND = {"unit_dtype": "input"}
WIDE = {"compute_dtype": ""}


def unit(x: Tensor, eps: float | None) -> Tensor:
    """x / rms(x) in at least fp32."""
    s = wide(x)
    return s * torch.rsqrt(
        s.pow(2).mean(-1, keepdim=True) + (torch.finfo(FP32).eps if eps is None else eps)
    )


def wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, FP32))


def norm(x: Tensor, weight: Tensor, eps: float | None) -> Tensor:
    return weight * unit(x, eps).to(x.dtype)


def sandwich(eps, x, residual, w, v):
    h = residual + norm(x, w, eps)
    return norm(h, v, eps), h


def sandwich_op(eps, x, residual, w, v, **sides):
    return OPS.rms_norm_add_rms_norm(
        x, residual, w, v, eps1=eps, eps2=eps, unit_dtype1="input", unit_dtype2="input",
        compute_dtype1="", compute_dtype2="", **sides,
    )  # fmt: skip


@dataclass(frozen=True)
class Case:
    """rows, weights: how many operands [..., N] and [N]; chain, op: take eps and the operands."""

    rows: int
    weights: int
    chain: Callable
    op: Callable


CASES = {
    "rms_norm": Case(
        1, 1, lambda eps, x, w: (norm(x, w, eps),),
        lambda eps, x, w, **s: (OPS.rms_norm(x, w, eps=eps, **ROUND, **WIDE, **s),)),
    "rms_norm_fork": Case(
        1, 1, lambda eps, x, w: (norm(x, w, eps), x * 1.0),
        lambda eps, x, w, **s: OPS.rms_norm_fork(x, w, eps=eps, **ROUND, **WIDE, **s)),
    "add_rms_norm": Case(
        2, 1, lambda eps, x, r, w: (norm(x + r, w, eps), x + r),
        lambda eps, x, r, w, **s: OPS.add_rms_norm(x, r, w, eps=eps, **ROUND, **WIDE, **s)),
    "silu_gate": Case(
        2, 0, lambda eps, x, g: (F.silu(g) * x,),
        lambda eps, x, g, **s: (OPS.silu_gate(x, g, silu_dtype="gate", out_dtype="", **s),)),
    "rms_norm_silu_gate": Case(
        2, 1, lambda eps, x, g, w: ((norm(x, w, eps) * F.silu(wide(g))).to(x.dtype),),
        lambda eps, x, g, w, **s: (OPS.rms_norm_silu_gate(
            x, g, w, eps=eps, norm_dtype="input", **ROUND, **WIDE, **s),)),
    "silu_gate_rms_norm": Case(
        2, 1, lambda eps, x, g, w: (w * unit(wide(x) * F.silu(wide(g)), eps).to(x.dtype),),
        lambda eps, x, g, w, **s: (OPS.silu_gate_rms_norm(
            x, g, w, eps=eps, **ROUND, **WIDE, **s),)),
    "rms_norm_add_rms_norm": Case(2, 2, sandwich, sandwich_op),
}  # fmt: skip
NORMS = [name for name in CASES if name != "silu_gate"]
SIDES = [
    dict(zip(("forward", "backward"), s)) for s in itertools.product(("kernel", "inline"), repeat=2)
]
SAME_SIDES = [SIDES[0], SIDES[-1]]
names = pytest.mark.parametrize("name", CASES)
same_sides = pytest.mark.parametrize("side", SAME_SIDES, ids=["kernel", "inline"])


def draw(case: Case, shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    rows = [torch.randn(shape).to(dtype) for _ in range(case.rows)]
    return rows + [(1 + 0.1 * torch.randn(shape[-1])).to(dtype) for _ in range(case.weights)]


def run(function: Callable, eps, operands, gradients=None, **sides) -> tuple[list, list]:
    """Outputs, and gradients of the operands; None where the op has no such output."""
    leaves = [t.detach().requires_grad_() for t in operands]
    outputs = function(eps, *leaves, **sides)
    gradients = gradients or [torch.ones_like(y) for y in outputs]
    found = torch.autograd.grad(outputs, leaves, gradients[: len(outputs)])
    return [y.detach() for y in outputs], list(found)


def assert_near(found: Tensor, expected: Tensor, dtype: torch.dtype, terms: float = 0.0) -> None:
    """As near as roundings of `dtype` leave them, at the scale of the whole tensor.

    terms: how large the terms are that may cancel in it.
    """
    assert found.dtype == expected.dtype and found.shape == expected.shape
    if expected.numel():
        bound = 1e-4 if dtype in (FP32, FP64) else 3e-2
        scale = max(expected.abs().max().item(), torch.finfo(dtype).tiny)
        allowed = max(bound * scale, 4 * torch.finfo(dtype).eps * terms)
        torch.testing.assert_close(found, expected, rtol=bound, atol=allowed)


# ------------------------------------------------------------ values

BAD_ROW, BAD_COLUMN = 3, 5
VALUES = {
    "nan": math.nan, "inf": math.inf, "-inf": -math.inf, "zero": 0.0, "-zero": -0.0,
    "denormal": 1e-40, "half denormal": 5e-7, "6e4": 6e4, "1e30": 1e30, "1e38": 1e38,
    "-100": -100.0, "100": 100.0,
}  # fmt: skip


def kinds(t: Tensor) -> Tensor:
    """What is NaN, what infinite and of which sign, and what a number."""
    return t.isnan() * 3 + (t == math.inf) * 1 + (t == -math.inf) * 2


def check_value(
    case: Case, value: float, place: tuple, dtype: torch.dtype, run_op: Callable
) -> None:
    """With `value` in one row of each operand in turn.

    The other rows keep their bits. Forward results are NaN and infinite where the chain's are, and
    gradients are numbers wherever the chain's are: it may overflow in between where we do not.
    """
    shape = (8, 64)
    clean = draw(case, shape, dtype)
    gradients = [torch.randn(shape).to(dtype) for _ in range(2)]
    before = [*itertools.chain(*run_op(clean, gradients))]
    others = torch.arange(shape[0]) != BAD_ROW
    for i in range(case.rows):
        operands = [t.clone() for t in clean]
        operands[i][place] = torch.tensor(value).to(dtype)
        found, dfound = run_op(operands, gradients)
        expected, dexpected = run(case.chain, EPS, operands, gradients)
        for one, old in zip([*found, *dfound[: case.rows]], before[: len(found) + case.rows]):
            assert torch.equal(one[others], old[others])
        for one, other in zip(found, expected):
            assert torch.equal(kinds(one), kinds(other))
            number = other.isfinite()
            assert_near(one[number], other[number], dtype)
        for one, other in zip(dfound, dexpected):
            number = other.isfinite()
            assert one[number].isfinite().all()
            assert_near(one[number], other[number], dtype)


@names
@pytest.mark.parametrize("dtype", [FP32, FP16, BF16], ids=str)
@pytest.mark.parametrize("place", [(BAD_ROW, BAD_COLUMN), (BAD_ROW,)], ids=["element", "row"])
@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_values_stay_in_their_rows_and_do_what_the_chain_does(value, place, dtype, name):
    case = CASES[name]
    for side in SIDES:
        check_value(case, value, place, dtype, lambda *a, s=side: run(case.op, EPS, *a, **s))


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("value", [math.nan, math.inf, 1e38], ids=str)
def test_a_value_in_a_weight_reaches_the_column_of_every_row(value, name):
    case = CASES[name]
    for side, dtype in itertools.product(SAME_SIDES, (FP32, BF16)):
        operands = draw(case, (8, 64), dtype)
        operands[-1][BAD_COLUMN] = value
        (found, *_), _ = run(case.op, EPS, operands, **side)
        (expected, *_), _ = run(case.chain, EPS, operands)
        assert torch.equal(kinds(found), kinds(expected))
        number = expected.isfinite()
        assert_near(found[number], expected[number], dtype)


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("eps", [None, 0.0, 1e-12, 1e-2], ids=str)
def test_every_eps_of_small_rows_and_of_rows_of_zeros(eps, name):
    case = CASES[name]
    for side, dtype in itertools.product(SAME_SIDES, (FP32, FP16, BF16)):
        operands = draw(case, (8, 64), dtype)
        for i in range(case.rows):
            operands[i] *= 1e-3
            operands[i][1] = 0
        (y, *_), gradients = run(case.op, eps, operands, **side)
        (expected, *_), others = run(case.chain, eps, operands)
        assert torch.equal(kinds(y), kinds(expected))
        assert_near(y[y.isfinite()], expected[y.isfinite()], dtype)
        for one, other in zip(gradients, others):
            number = other.isfinite()
            assert_near(one[number], other[number], dtype)
    if eps is None:
        assert not torch.allclose(run(case.op, 1e-2, operands)[0][0], y)


@pytest.mark.parametrize("value", [math.inf, 1e34, 1e38], ids=str)
def test_in_fp32_inductor_code_keeps_huge_values_in_their_place(value):
    """And in bf16 in their rows: there inline code makes the norm of such a row NaN."""
    case = CASES["add_rms_norm"]
    for dtype in (FP32, BF16):
        torch._dynamo.reset()
        function = torch.compile(lambda *t: case.chain(EPS, *t), backend=fxfuse.backend)
        operands = draw(case, (8, 64), dtype)
        with fxfuse.record() as reports:
            clean, _ = function(*operands)
        assert reports[0].counts == {"add_rms_norm": 1}
        operands[0][BAD_ROW, BAD_COLUMN] = value
        y, h = function(*operands)
        expected, expected_h = case.chain(EPS, *operands)
        others = torch.arange(8) != BAD_ROW
        assert torch.equal(y[others], clean[others]) and torch.equal(h, expected_h)
        if dtype == FP32:
            assert torch.equal(kinds(y), kinds(expected))


# ------------------------------------------------------------ shapes and strides

SHAPES = [(0, 64), (4, 0), (0, 0), (2, 0, 8), (1,), (1, 1), (5, 1), (64,)]


@names
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@same_sides
def test_empty_and_tiny_tensors(side, shape, name):
    case = CASES[name]
    for dtype in (FP32, BF16):
        operands = draw(case, shape, dtype)
        if shape[-1] == 1:  # a norm of one column has no gradient to speak of
            operands = [t.sign() * (1 + t.abs()) for t in operands]
        found, expected = run(case.op, EPS, operands, **side), run(case.chain, EPS, operands)
        for one, other in zip(itertools.chain(*found), itertools.chain(*expected), strict=True):
            assert one.stride() == other.stride() or other.numel() == 0
            assert_near(one, other, dtype, terms=4.0 if shape[-1] == 1 else 0.0)


@names
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_very_wide_rows(dtype, name):
    check_wide(CASES[name], (1, 131072), dtype)


def test_very_wide_rows_where_the_formula_is_compiled():
    """A compiler that adds up a row in one go would be ten times as far from fp64."""
    shape = (2, 131072)
    assert math.prod(shape) > compiled.SMALLEST and shape[1] > reference.WIDE
    check_wide(CASES["silu_gate_rms_norm"], shape, FP32)


def check_wide(case: Case, shape: tuple[int, int], dtype: torch.dtype) -> None:
    operands, gradients = draw(case, shape, dtype), [torch.randn(shape).to(dtype) for _ in range(2)]
    expected, dexpected = run(case.chain, EPS, operands, gradients)
    exact, dexact = run(case.chain, EPS, double(operands), double(gradients))
    for side in SAME_SIDES:
        found, dfound = run(case.op, EPS, operands, gradients, **side)
        if dtype == BF16:
            for one, other in zip(found, expected):
                assert (steps_apart(one, other) == 0).double().mean() >= 0.99
        pairs = zip([*found, *dfound], [*expected, *dexpected], [*exact, *dexact], strict=True)
        for one, other, right in pairs:
            assert error(one, right) <= max(1.1 * error(other, right), 4 * torch.finfo(FP32).eps)


def double(tensors: list[Tensor]) -> list[Tensor]:
    return [t.double() for t in tensors]


GRADIENTS = {
    "one number": lambda shape, dtype: torch.randn((), dtype=dtype).expand(shape),
    "one row": lambda shape, dtype: torch.randn(shape[-1], dtype=dtype).expand(shape),
    "one column": lambda shape, dtype: torch.randn(shape[0], 1, dtype=dtype).expand(shape),
    "transposed": lambda shape, dtype: torch.randn(shape[::-1], dtype=dtype).t(),
    "half": lambda shape, dtype: torch.randn(shape[0], 2 * shape[1], dtype=dtype).chunk(2, -1)[1],
    "every other": lambda shape, dtype: torch.randn(shape[0], 2 * shape[1], dtype=dtype)[:, ::2],
}


@names
@pytest.mark.parametrize("kind", GRADIENTS)
def test_incoming_gradients_of_any_strides(kind, name):
    case, shape = CASES[name], (16, 64)
    for side, dtype in itertools.product(SAME_SIDES, (FP32, BF16)):
        operands = draw(case, shape, dtype)
        gradients = [GRADIENTS[kind](shape, dtype) for _ in range(2)]
        assert not all(g.is_contiguous() for g in gradients)
        _, found = run(case.op, EPS, operands, gradients, **side)
        _, expected = run(case.chain, EPS, operands, [g.contiguous() for g in gradients])
        for one, other in zip(found, expected, strict=True):
            assert_near(one, other, dtype)


# ------------------------------------------------------------ other derivatives


def derivatives(function: Callable, operands: list[Tensor], tangents: list[Tensor]):
    """By torch.func, by dual tensors, by differentiating twice and by batches of gradients."""

    def outputs(*t):
        return torch.cat(function(EPS, *t), -1)

    def loss(*t):
        return outputs(*t).square().sum()

    every = tuple(range(len(operands)))
    yield "grad", torch.func.grad(loss, every)(*operands)
    yield "jvp", torch.func.jvp(outputs, tuple(operands), tuple(tangents))
    yield "jacrev", torch.func.jacrev(outputs, every)(*operands)
    yield "jacfwd", torch.func.jacfwd(outputs, every)(*operands)
    yield "hessian", torch.func.hessian(loss)(*operands)
    stacked = [torch.stack([t, 2 * t]) for t in operands]
    yield "vmap", torch.func.vmap(outputs)(*stacked)
    yield "per sample", torch.func.vmap(torch.func.grad(loss, every))(*stacked)
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(*pair) for pair in zip(operands, tangents)]
        tangent = forward_ad.unpack_dual(outputs(*duals)).tangent
    yield "dual", tangent
    leaves = [t.detach().requires_grad_() for t in operands]
    first = torch.autograd.grad(loss(*leaves), leaves, create_graph=True)
    yield "twice", torch.autograd.grad(sum(g.square().sum() for g in first), leaves)
    y = outputs(*leaves)
    several = torch.stack([torch.ones_like(y), y.detach()])
    yield "batched", torch.autograd.grad(y, leaves, several, is_grads_batched=True)


@names
@same_sides
def test_other_derivatives_are_those_of_the_chain(side, name):
    case = CASES[name]
    operands, tangents = draw(case, (3, 8), FP64), draw(case, (3, 8), FP64)
    found = derivatives(lambda *t: case.op(*t, **side), operands, tangents)
    for (kind, one), (_, other) in zip(found, derivatives(case.chain, operands, tangents)):
        leaves = torch.utils._pytree.tree_leaves(other)
        assert max(t.abs().max() for t in leaves) > 1e-3, kind
        torch.testing.assert_close(one, other, msg=lambda text, kind=kind: f"{kind}: {text}")
