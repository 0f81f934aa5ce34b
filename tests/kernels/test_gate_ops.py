"""The gated ops, the sandwich and the fork as ops: registration, gradients, transforms, layouts."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.library import opcheck
from torch.nn import functional as F

from fxfuse.kernels import ops  # noqa: F401
from tests.kernels.test_ops import Calls

OPS = torch.ops.fxfuse
FP32, BF16, FP64 = torch.float32, torch.bfloat16, torch.float64
SIDES = [
    dict(zip(("forward", "backward"), s)) for s in itertools.product(("kernel", "inline"), repeat=2)
]
WIDE = {"compute_dtype": ""}
BOTH = {"compute_dtype1": "", "compute_dtype2": ""}

# What takes x, another tensor of its shape and two weights, with its attributes.
CASES = {
    "silu_gate": lambda x, g, w, v, **s: OPS.silu_gate(x, g, **s),
    "rms_norm_silu_gate": lambda x, g, w, v, **s: OPS.rms_norm_silu_gate(
        x, g, w, eps=1e-6, weight_offset=1.0, **WIDE, **s),
    "silu_gate_rms_norm": lambda x, g, w, v, **s: OPS.silu_gate_rms_norm(
        x, g, w, group=4, eps=1e-6, **WIDE, **s),
    "rms_norm_add_rms_norm": lambda x, g, w, v, **s: OPS.rms_norm_add_rms_norm(
        x, g, w, v, eps1=1e-6, eps2=1e-5, weight_offset2=1.0, **BOTH, **s),
    "rms_norm_fork": lambda x, g, w, v, **s: OPS.rms_norm_fork(x, w, eps=1e-6, **WIDE, **s),
}  # fmt: skip
cases = pytest.mark.parametrize("op", CASES.values(), ids=CASES)
sides = pytest.mark.parametrize("side", SIDES, ids=lambda s: "-".join(s.values()))


def operands(dtype=FP64, shape=(2, 3, 8)):
    torch.manual_seed(0)
    shapes = (shape, shape, shape[-1:], shape[-1:])
    return [torch.randn(s).to(dtype).requires_grad_() for s in shapes]


def flat(found):
    return found if isinstance(found, tuple) else (found,)


@cases
@sides
def test_gradients_of_both_orders(op, side):
    call = lambda *tensors: op(*tensors, **side)  # noqa: E731
    assert torch.autograd.gradcheck(call, operands())
    assert torch.autograd.gradgradcheck(call, operands())


LAYOUTS = {
    "contiguous": lambda t: t,
    "halves": lambda t: torch.cat([t, t], -1).chunk(2, -1)[1],
    "transposed": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "expanded": lambda t: t[:1].expand_as(t),
    "every other column": lambda t: torch.stack([t, t], -1).flatten(-2)[..., ::2],
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("contiguous", [False, True])
def test_opcheck(layout, contiguous):
    x, gate, weight, other = (t.detach() for t in operands(BF16))
    x, gate = layout(x), layout(gate).requires_grad_()
    attributes = {"eps": None, "contiguous": contiguous}
    opcheck(OPS.silu_gate.default, (x, gate))
    opcheck(OPS.rms_norm_silu_gate.default, (x, gate, weight), attributes)
    opcheck(OPS.silu_gate_rms_norm.default, (x, gate, weight), attributes | {"group": 4})
    sandwich = {"eps1": None, "eps2": 1e-6, "contiguous1": contiguous, "contiguous": contiguous}
    opcheck(OPS.rms_norm_add_rms_norm.default, (x, gate, weight, other), sandwich)
    opcheck(OPS.rms_norm_fork.default, (gate, weight), attributes)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_opcheck_of_the_inner_ops(layout):
    x, gate, weight, other = (t.detach() for t in operands(BF16))
    x, gate, dy = layout(x), layout(gate), layout(torch.randn_like(x))
    rstd, grouped = torch.ones(2, 3), torch.ones(2, 3, 2)
    opcheck(OPS.silu_gate_fwd.default, (x, gate))
    opcheck(OPS.silu_gate_bwd.default, ([dy, dy], x, gate))
    opcheck(OPS.rms_norm_silu_gate_fwd.default, (x, gate, weight), {"eps": None})
    opcheck(
        OPS.rms_norm_silu_gate_bwd.default, ([dy], x, gate, weight, rstd, dy),
        {"need_dweight": True},
    )  # fmt: skip
    opcheck(OPS.silu_gate_rms_norm_fwd.default, (x, gate, None), {"eps": None, "group": 4})
    opcheck(
        OPS.silu_gate_rms_norm_bwd.default, ([dy], x, gate, weight, grouped),
        {"need_dweight": True, "group": 4, "gated_dtype": "input"},
    )  # fmt: skip
    attributes = {"eps1": None, "eps2": None}
    opcheck(OPS.rms_norm_add_rms_norm_fwd.default, (x, gate, weight, other), attributes)
    opcheck(
        OPS.rms_norm_add_rms_norm_bwd.default,
        ([dy], x, gate, weight, other, rstd, rstd, dy),
        {"need_dweight1": True, "need_dweight2": False},
    )


@cases
def test_gradients_have_the_dtypes_of_the_operands(op):
    x, gate, weight, other = operands(FP32)
    mixed = [
        t.detach().to(dtype).requires_grad_()
        for t, dtype in zip((x, gate, weight, other), (BF16, FP32, FP32, BF16))
    ]
    out = op(*mixed)
    sum(t.float().sum() for t in flat(out)).backward()
    assert all(t.grad is None or t.grad.dtype == t.dtype for t in mixed)
    assert mixed[0].grad is not None


@cases
def test_one_kernel_in_each_direction(op):
    with Calls() as calls:
        out = op(*operands(FP32))
        sum(t.sum() for t in flat(out)).backward()
    assert [name.rsplit("_", 1)[1] for name in calls.names] == ["fwd", "bwd"]


@cases
def test_a_frozen_weight_has_no_gradient(op):
    x, gate, weight, other = operands(FP32)
    weight.requires_grad_(False), other.requires_grad_(False)
    with Calls() as calls:
        sum(t.sum() for t in flat(op(x, gate, weight, other))).backward()
    *_, attributes = calls.seen[-1]
    assert not any(value for key, value in attributes.items() if key.startswith("need_dweight"))
    assert weight.grad is None and x.grad is not None


def test_only_the_sum_of_the_sandwich_is_used():
    x, residual, weight, other = operands()
    _, h = CASES["rms_norm_add_rms_norm"](x, residual, weight, other)
    found = torch.autograd.grad(h.square().sum(), (x, residual, weight))
    unit = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    want = torch.autograd.grad((residual + unit * weight).square().sum(), (x, residual, weight))
    for got, right in zip(found, want):
        torch.testing.assert_close(got, right)


def test_only_the_alias_of_the_fork_is_used():
    x, _, weight, _ = operands()
    _, alias = OPS.rms_norm_fork(x, weight, eps=1e-6)
    (alias * 3.0).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 3.0)) and weight.grad is None


def test_the_alias_is_the_input():
    x, _, weight, _ = operands()
    _, alias = OPS.rms_norm_fork(x, weight, eps=1e-6)
    assert alias.data_ptr() == x.data_ptr() and torch.equal(alias, x)
    with pytest.raises(RuntimeError, match="view"):
        alias.add_(1.0)


@pytest.mark.parametrize("shape", [(2, 3, 1), (1, 8), (2, 1, 8)], ids=str)
def test_operands_that_broadcast_run_the_formula(shape):
    x = operands()[0]
    gate = torch.randn(shape, dtype=FP64, requires_grad=True)
    y = OPS.silu_gate(x, gate)
    torch.testing.assert_close(y, x * F.silu(gate))
    y.sum().backward()
    assert gate.grad.shape == shape and x.grad.shape == x.shape


def test_vmap_and_per_sample_gradients():
    x, gate, weight, _ = (t.detach() for t in operands())

    def loss(w, x, gate):
        return OPS.rms_norm_silu_gate(x, gate, w, eps=1e-6, **WIDE).square().sum()

    found = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(weight, x, gate)
    for i in range(len(x)):
        leaf = weight.clone().requires_grad_()
        loss(leaf, x[i], gate[i]).backward()
        torch.testing.assert_close(found[i], leaf.grad)


def test_unknown_attributes_are_errors():
    x, gate, *_ = operands(FP32)
    with pytest.raises(ValueError, match='"kernel" or "inline"'):
        OPS.silu_gate(x, gate, forward="fast")
    with pytest.raises(ValueError, match="bfloat"):
        OPS.silu_gate(x, gate, silu_dtype="bfloat")


@cases
@pytest.mark.parametrize("side", ["kernel", "inline"])
def test_compiled_with_rows_that_change(op, side):
    call = torch.compile(
        lambda *t: op(*t, forward=side, backward=side), backend="aot_eager", dynamic=True
    )
    for rows in (2, 5):
        tensors = operands(FP32, (rows, 3, 8))
        twins = [t.detach().clone().requires_grad_() for t in tensors]
        got, want = flat(call(*tensors)), flat(op(*twins))
        for one, other in zip(got, want):
            torch.testing.assert_close(one, other)
        sum(t.square().sum() for t in got).backward()
        sum(t.square().sum() for t in want).backward()
        for one, other in zip(tensors, twins):
            torch.testing.assert_close(one.grad, other.grad)


DEPENDENT = {
    "the gate on x": lambda x, w: OPS.rms_norm_silu_gate(x, x * 2.0, w, eps=1e-6, **WIDE),
    "x is the gate": lambda x, w: OPS.silu_gate(x, x),
    "the weight on x": lambda x, w: OPS.silu_gate_rms_norm(
        x, x.sin(), x.sum((0, 1)), eps=1e-6, **WIDE),
    "the residual on x": lambda x, w: OPS.rms_norm_add_rms_norm(
        x, x.cos(), w, w, eps1=1e-6, eps2=1e-6, **BOTH)[0],
}  # fmt: skip


@pytest.mark.parametrize("call", DEPENDENT.values(), ids=DEPENDENT)
def test_operands_that_depend_on_each_other(call):
    """A gradient that is to be differentiated again is still the same gradient."""
    x, _, weight, _ = operands()
    once, again = (
        torch.autograd.grad(call(x, weight).pow(2).sum(), x, create_graph=create)[0]
        for create in (False, True)
    )
    torch.testing.assert_close(once, again)
    assert torch.autograd.gradgradcheck(lambda x: call(x, weight), (x,))


@cases
@sides
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_results_can_be_written_to(op, side, transposed, grad):
    tensors = operands(FP32)
    if transposed:
        tensors[:2] = [t.detach().transpose(0, 1) for t in tensors[:2]]
    y, *others = flat(op(*(t.detach().requires_grad_(grad) for t in tensors), **side))
    y.add_(1.0)
    if op is not CASES["rms_norm_fork"]:
        for other in others:
            other.mul_(2.0)


SWAPPED = {
    "silu_gate": (
        lambda x, g: F.silu(g) * x,
        lambda x, g, **s: OPS.silu_gate(x, g, swapped=True, **s)),
    "silu_gate_rms_norm": (
        lambda x, g: F.rms_norm(F.silu(g) * x, (8,), None, 1e-6) * 1.0,
        lambda x, g, **s: OPS.silu_gate_rms_norm(x, g, None, eps=1e-6, swapped=True, **s)),
    "rms_norm_add_rms_norm": (
        lambda x, g: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) + g,
        lambda x, g, **s: OPS.rms_norm_add_rms_norm(
            x, g, None, None, eps1=1e-6, eps2=1e-6, swapped=True, **s)[1]),
}  # fmt: skip


@pytest.mark.parametrize(("chain", "op"), SWAPPED.values(), ids=SWAPPED)
@sides
def test_the_first_operand_decides_how_the_result_lies(chain, op, side):
    for x, gate in ((a, b) for a, b in itertools.permutations(
        (torch.randn(3, 4, 8), torch.randn(4, 3, 8).transpose(0, 1)))):  # fmt: skip
        y, want = op(x, gate, **side), chain(x, gate)
        torch.testing.assert_close(y, want)
        if chain is not SWAPPED["silu_gate_rms_norm"][0]:
            assert y.stride() == want.stride()


def test_the_sum_takes_no_gradient_because_the_weight_does():
    x, residual, weight, other = (t.detach() for t in operands(FP32))
    weight.requires_grad_()
    y, h = OPS.add_rms_norm(x, residual, weight, eps=1e-6)
    assert y.requires_grad and not h.requires_grad
    y.sum().backward()
    assert weight.grad is not None
    y, h = OPS.rms_norm_add_rms_norm(x, residual, other, weight, eps1=1e-6, eps2=1e-6)
    assert y.requires_grad and not h.requires_grad


def test_no_columns():
    x = torch.zeros(3, 0, requires_grad=True)
    y = OPS.silu_gate_rms_norm(x, x, torch.zeros(0), eps=1e-6)
    assert y.shape == (3, 0)
