"""The gated ops and the sandwich against chains of plain ops, and both against fp64.

A chain rounds where the graph of a model does. Forward bits have to be the chain's; gradients have
to be as near to fp64 as the chain's are, since inside of an op they stay in fp32.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fxfuse.kernels import compiled, ops  # noqa: F401
from tests.kernels.test_numerics import error, steps_apart

version = tuple(map(int, torch.__version__.split(".")[:2]))
OPS = torch.ops.fxfuse
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
EPS = 1e-5
SHAPES = {
    "1": (5, 1), "64": (3, 7, 64), "96": (33, 96), "128": (2, 9, 3, 128), "1000": (5, 1000),
    "4096": (9, 4096), "no rows": (0, 64), "no dims before": (64,),
}  # fmt: skip


def unit(x: Tensor) -> Tensor:
    """x / rms(x) in fp32 (fp64 for fp64)."""
    wide = x.to(torch.promote_types(x.dtype, FP32))
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)


def wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, FP32))


# ---- (what a model writes, the op with its attributes); w and v are weights -------------------


def swiglu(x, gate, w, v):
    return F.silu(gate) * x


def swiglu_op(x, gate, w, v):
    return OPS.silu_gate(x, gate, silu_dtype="gate", out_dtype="")


def silu_gate(x, gate, w, v):
    return (wide(x) * F.silu(wide(gate))).to(x.dtype)


def silu_gate_op(x, gate, w, v):
    return OPS.silu_gate(x, gate)


def by_sigmoid(x, gate, w, v):
    return gate * torch.sigmoid(gate) * x


def by_sigmoid_op(x, gate, w, v):
    return OPS.silu_gate(x, gate, sigmoid_dtype="gate", silu_dtype="gate", out_dtype="")


def native_weight(x, gate, w, v):
    return (w * unit(x).to(x.dtype) * F.silu(wide(gate))).to(x.dtype)


def native_weight_op(x, gate, w, v):
    return OPS.rms_norm_silu_gate(
        x, gate, w, eps=EPS, compute_dtype="", unit_dtype="input", norm_dtype="input"
    )


def one_cast(x, gate, w, v):
    return (unit(x) * wide(w) * F.silu(wide(gate))).to(x.dtype)


def one_cast_op(x, gate, w, v):
    return OPS.rms_norm_silu_gate(x, gate, w, eps=EPS, compute_dtype="")


def zero_centred(x, gate, w, v):
    return (unit(x) * (1.0 + wide(w))).to(x.dtype) * F.silu(gate)


def zero_centred_op(x, gate, w, v):
    return OPS.rms_norm_silu_gate(
        x, gate, w, eps=EPS, compute_dtype="", weight_offset=1.0, norm_dtype="input",
        silu_dtype="gate",
    )  # fmt: skip


def no_weight(x, gate, w, v):
    return unit(x).to(x.dtype) * F.silu(gate)


def no_weight_op(x, gate, w, v):
    return OPS.rms_norm_silu_gate(
        x, gate, None, eps=EPS, compute_dtype="", norm_dtype="input", silu_dtype="gate"
    )


def mamba(groups: int, offset: bool):
    def chain(x, gate, w, v):
        gated = wide(x) * F.silu(wide(gate))
        normed = unit(gated.unflatten(-1, (groups, -1))).flatten(-2)
        return normed * (1.0 + wide(w)) if offset else w * normed.to(x.dtype)

    def op(x, gate, w, v):
        attributes = {"weight_offset": 1.0} if offset else {"unit_dtype": "input"}
        return OPS.silu_gate_rms_norm(
            x, gate, w, group=x.shape[-1] // groups, eps=EPS, compute_dtype="", **attributes
        )

    chain.__name__ = f"mamba_{groups}_groups{'_zero_centred' if offset else ''}"
    return chain, op


def rounded_first(x, gate, w, v):
    return (unit(F.silu(gate) * x) * wide(w)).to(x.dtype)


def rounded_first_op(x, gate, w, v):
    return OPS.silu_gate_rms_norm(
        x, gate, w, eps=EPS, compute_dtype="", silu_dtype="gate", gated_dtype="input",
        out_dtype="input",
    )  # fmt: skip


def gemma(x, residual, w, v):
    h = residual + (unit(x) * (1.0 + wide(w))).to(x.dtype)
    return (unit(h) * (1.0 + wide(v))).to(h.dtype), h


def gemma_op(x, residual, w, v):
    return OPS.rms_norm_add_rms_norm(
        x, residual, w, v, eps1=EPS, eps2=EPS, compute_dtype1="", compute_dtype2="",
        weight_offset1=1.0, weight_offset2=1.0, norm_dtype1="input", out_dtype="input",
    )  # fmt: skip


def glm(x, residual, w, v):
    h = residual + w * unit(x).to(x.dtype)
    return v * unit(h).to(h.dtype), h


def glm_op(x, residual, w, v):
    return OPS.rms_norm_add_rms_norm(
        x, residual, w, v, eps1=EPS, eps2=EPS, compute_dtype1="", compute_dtype2="",
        unit_dtype1="input", unit_dtype2="input",
    )  # fmt: skip


PAIRS = [
    (swiglu, swiglu_op), (silu_gate, silu_gate_op), (by_sigmoid, by_sigmoid_op),
    (native_weight, native_weight_op), (one_cast, one_cast_op), (zero_centred, zero_centred_op),
    (no_weight, no_weight_op), mamba(1, False), mamba(1, True), (rounded_first, rounded_first_op),
    (gemma, gemma_op), (glm, glm_op),
]  # fmt: skip
GROUPED = [mamba(4, False), mamba(2, True)]
SANDWICHES = (gemma, glm)
# A chain of roundings may move an element by a step at each of them; 1 for those not listed.
STEPS = {
    native_weight: 3,
    rounded_first: 3,
    zero_centred: 2,
    no_weight: 2,
    GROUPED[0][0]: 2,
    PAIRS[7][0]: 2,
}


def operands(shape, dtype, strided):
    x, gate = (torch.randn(shape) for _ in range(2))
    if strided:  # halves of one projection
        x, gate = torch.cat([x, gate], -1).to(dtype).chunk(2, -1)
    weights = (1 + 0.1 * torch.randn(shape[-1]) for _ in range(2))
    return [t.to(dtype).detach() if not strided or t.dim() == 1 else t.detach()
            for t in (x, gate, *weights)]  # fmt: skip


def run(function, tensors, gradients):
    """Outputs and gradients; None for a weight that is not used."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    found = function(*leaves)
    outputs = found if isinstance(found, tuple) else (found,)
    picked = gradients[: len(outputs)]
    grads = torch.autograd.grad(
        outputs, leaves, [g.to(o.dtype) for g, o in zip(picked, outputs)], allow_unused=True
    )
    return [t.detach() for t in outputs], grads


def check(chain, op, shape, dtype, strided=False):
    torch.manual_seed(0)
    tensors = operands(shape, dtype, strided)
    gradients = [torch.randn(shape).to(dtype) for _ in range(2)]
    outputs, grads = run(op, tensors, gradients)
    expected, chained = run(chain, tensors, gradients)
    exact, exact_grads = run(chain, [t.double() for t in tensors], [g.double() for g in gradients])
    for got, want, right in zip(outputs, expected, exact):
        assert got.dtype == want.dtype and got.shape == want.shape
        assert got.stride() == want.stride()
        if got.numel() == 0:
            continue
        check_output(got, want, right, chain, dtype)
    for tensor, got, want, right in zip(tensors, grads, chained, exact_grads):
        assert (got is None) == (want is None)
        if got is not None:
            check_gradient(got, want, right, tensor)


def check_output(got, want, right, chain, dtype):
    if got.dtype == FP32:
        torch.testing.assert_close(got, want, rtol=4e-6 if dtype == FP32 else 2**-7, atol=1e-5)
    else:
        apart = steps_apart(got, want)
        assert (apart == 0).double().mean() >= 0.99
        if chain in SANDWICHES:  # a step of the norm is many of a sum that is nearly zero
            step = torch.finfo(dtype).eps
            torch.testing.assert_close(got, want, rtol=3 * step, atol=6 * step)
        else:
            assert apart.max() <= STEPS.get(chain, 1)
    assert error(got, right) <= max(1.1 * error(want, right), 4 * 2**-23)


def check_gradient(got, want, right, tensor):
    assert got.dtype == want.dtype == tensor.dtype and got.shape == want.shape
    if right.norm() == 0:
        assert got.norm() == 0
        return
    if tensor.shape[-1] == 1:  # nearly all of it cancels: it is as near as its dtype allows
        allowed = 2e-6 if tensor.dtype == FP32 else torch.finfo(tensor.dtype).eps * 1e-2
        assert (got.double() - right).norm() <= 1.1 * (want.double() - right).norm() + allowed
        return
    bound = 2.0 if tensor.dim() == 1 and tensor.dtype == FP32 else 1.1
    assert error(got, right) <= max(bound * error(want, right), 4 * 2**-23)
    torch.testing.assert_close(
        got.float(), want.float(), rtol=3e-2 if tensor.dtype != FP32 else 1e-4,
        atol=(3e-2 if tensor.dtype != FP32 else 1e-4) * want.float().abs().max().item(),
    )  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", [FP32, FP16, BF16], ids=str)
@pytest.mark.parametrize(("chain", "op"), PAIRS, ids=lambda f: f.__name__)
def test_like_the_chain(chain, op, dtype, shape):
    check(chain, op, shape, dtype)


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16], ids=str)
@pytest.mark.parametrize(("chain", "op"), GROUPED, ids=lambda f: f.__name__)
@pytest.mark.parametrize("shape", [(3, 7, 64), (33, 96), (2, 1024), (0, 64), (64,)], ids=str)
def test_groups(chain, op, dtype, shape):
    check(chain, op, shape, dtype)


@pytest.mark.parametrize("shape", [(3, 7, 64), (5, 1000), (9, 4096)], ids=str)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize(
    ("chain", "op"),
    [p for p in PAIRS + GROUPED if p[0] not in SANDWICHES],
    ids=lambda f: f.__name__,
)
def test_halves_of_one_projection(chain, op, dtype, shape):
    check(chain, op, shape, dtype, strided=True)


@pytest.mark.parametrize(
    ("chain", "op"), [PAIRS[0], PAIRS[3], GROUPED[0], PAIRS[-1]], ids=lambda f: f.__name__
)
def test_where_the_formula_is_compiled(chain, op):
    shape = (2, 64, 1024)
    assert torch.Size(shape).numel() > compiled.SMALLEST
    check(chain, op, shape, BF16)
    if version >= (2, 13):  # before, Inductor drops roundings, and the formula runs uncompiled
        assert all(compiled._functions.values())


def test_a_compiled_formula_that_rounds_otherwise_is_not_used(monkeypatch):
    monkeypatch.setattr(compiled, "_functions", {})
    monkeypatch.setattr(compiled, "_KEEP_CASTS", {"emulate_precision_casts": False})
    x, gate = (torch.randn(64, 2048).to(torch.float16) for _ in range(2))
    for _ in range(2):
        y = swiglu_op(x, gate, None, None)
        assert (steps_apart(y, swiglu(x, gate, None, None)) == 0).all()
    assert list(compiled._functions.values()) == [None]


def test_rows_that_are_nan_do_not_count_as_rounded_otherwise(monkeypatch):
    monkeypatch.setattr(compiled, "_functions", {})
    x, gate = (torch.full((64, 2048), float("nan"), dtype=BF16) for _ in range(2))
    assert swiglu_op(x, gate, None, None).isnan().all()
    if version >= (2, 13):
        assert None not in compiled._functions.values()
