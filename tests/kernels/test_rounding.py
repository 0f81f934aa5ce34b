"""Roundings to bf16 by arithmetic are those of a cast, and Inductor's CPU code keeps them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import fxfuse
from fxfuse.kernels.rounding import _nearest_bf16, as_stored, product, readings, rounded

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from op_cases import CASES
from step_memory import of_call

BF16, FP32 = torch.bfloat16, torch.float32


def compiled(function):
    torch.compiler.reset()
    return torch.compile(function, fullgraph=True)


def twice(t: torch.Tensor, bounded: bool) -> torch.Tensor:
    """The rounding that a chain of fused steps would drop."""
    return rounded(t, BF16, bounded=bounded).to(FP32) * 1.5


@pytest.mark.parametrize("bounded", [False, True])
def test_values_are_rounded_to_nearest_and_ties_to_even(bounded):
    t = torch.randn(1 << 16) * torch.logspace(-20, 20, 1 << 16)
    halves = t.to(BF16).float()
    t = torch.cat([t, halves * (1 + 1 / 256), halves * halves.flip(0)])
    found, expected = compiled(twice)(t, bounded), t.to(BF16).float() * 1.5
    assert torch.equal(found, expected)


def test_every_value_of_three_binades():
    for first in range(0x3F00, 0x4080, 32):
        bits = (torch.arange(first, first + 32, dtype=torch.int32)[:, None] << 16) + torch.arange(
            1 << 16, dtype=torch.int32
        )
        t = bits.view(FP32)
        assert torch.equal(_nearest_bf16(t, bounded=True), t.to(BF16).float())


def test_what_is_huge_or_not_a_number_is_as_it_was():
    t = torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0, -0.0, 1e-40, 3e38, -2e34])
    found = compiled(lambda t: rounded(t, BF16))(t)
    assert torch.equal(found[:2], t[:2].to(BF16)) and found[2].isnan()
    assert torch.equal(found[3:], t[3:].to(BF16))


def test_the_steps_round_what_they_promote_to():
    a, b = torch.randn(1 << 16).to(BF16), torch.randn(1 << 16).to(BF16)
    found = compiled(lambda a, b: product(a, b).to(FP32) * 1.5)(a, b)
    assert torch.equal(found, (a * b).float() * 1.5)
    assert product(a.float(), b).dtype == FP32
    found = compiled(lambda a, b: as_stored(a + b).to(FP32) * 1.5)(a, b)
    assert torch.equal(found, (a + b).float() * 1.5)


def test_a_gradient_goes_through_a_cast():
    t = torch.randn(64, requires_grad=True)
    compiled(lambda t: rounded(t, BF16))(t).sum().backward()
    assert torch.equal(t.grad, torch.ones(64))


@pytest.mark.parametrize("name", sorted(CASES))
def test_inline_sites_give_the_bits_of_eager(name):
    case = CASES[name]
    torch.manual_seed(0)
    shapes = [(256, 1024)] * len(case.rows) + [(1024,)] * len(case.weights)
    inputs = [torch.randn(s, dtype=BF16, requires_grad=True) for s in shapes]

    def chain(*inputs):
        return case.chain(*inputs)[: case.results]

    torch.compiler.reset()
    with fxfuse.record() as reports:
        found = torch.compile(chain, backend=fxfuse.backend)(*inputs)
    assert all(m.policy.startswith("inline") for m in reports[0].matches), reports[0]
    for one, other in zip(found, chain(*inputs)):
        assert (one == other).float().mean() >= 0.99


@pytest.mark.parametrize("value", [1.0, 1.5, 3.0, 0.75, 100.0])
def test_rows_of_one_magnitude(value):
    """Their normalised values lie just below 1, where a rounding is easily a step off."""

    def norm(x, residual, weight):
        h = x + residual
        wide = h.float()
        unit = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return weight * unit.to(h.dtype), h

    x = torch.randint(0, 2, (64, 512)).mul(2).sub(1).mul(value).to(BF16)
    inputs = x, torch.zeros_like(x), torch.ones(512, dtype=BF16)
    torch.compiler.reset()
    found = torch.compile(norm, backend=fxfuse.backend)(*inputs)
    assert torch.equal(found[0], norm(*inputs)[0])


@pytest.mark.parametrize("grad", [False, True])
def test_what_reads_a_result_in_the_same_kernel_sees_it_rounded(grad):
    def post_norm(x, residual, weight):
        return residual + torch.nn.functional.rms_norm(x, x.shape[-1:], weight, 1e-6)

    def gate(x, residual, weight):
        return residual + torch.nn.functional.silu(x) * residual.flip(0)

    inputs = [
        torch.randn(s, dtype=BF16, requires_grad=grad) for s in ((64, 512), (64, 512), (512,))
    ]
    for function in (post_norm, gate):
        torch.compiler.reset()
        with fxfuse.record() as reports:
            found = torch.compile(function, backend=fxfuse.backend)(*inputs)
        assert reports[0].counts
        assert (found == function(*inputs)).float().mean() >= 0.99


def test_readings_are_of_what_an_op_chain_would_have_stored():
    t = torch.randn(4, 64)
    for reading in readings(t, BF16):
        assert reading.dtype is FP32 and torch.equal(reading, t.to(BF16).float())
    assert all(reading is t for dtype in (None, FP32) for reading in readings(t, dtype))


def test_a_compiler_stores_what_is_read_twice_as_narrowly():
    def gradients(dy, gate):
        one, other = readings(dy * torch.sigmoid(gate), BF16)
        return one.sum(-1), other.sum(0)

    dy, gate = torch.randn(2, 256, 64).unbind()
    expected = gradients(dy, gate)
    function = compiled(gradients)
    found = function(dy, gate)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    results = sum(t.nbytes for t in expected)
    assert of_call(lambda: function(dy, gate)).peak - results <= dy.nbytes // 2
