"""The approximate sigmoid of the gate kernels is exact enough for 16-bit results.

Its steps are computed here with the worst errors that NVIDIA states for the instructions, for every
16-bit gate: ex2.approx 2 steps of fp32, rcp.approx 1 step, and denormals flushed to zero.
"""

import itertools
import math

import pytest
import torch
from torch.nn import functional as F

from tests.kernels.exact import step

FP32 = torch.float32
LOG2E = math.log2(math.e)


def every(dtype):
    """All finite values of a 16-bit dtype."""
    values = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    return values[values.isfinite()]


def off_by(exact, steps):
    """fp32 values some steps beside the exact ones, denormals flushed."""
    found = exact.to(FP32)
    found = found * (1 + steps * torch.finfo(FP32).eps)
    return torch.where(found.abs() < torch.finfo(FP32).tiny, 0.0, found)


def sigmoid(gate, power_steps, reciprocal_steps):
    """As `_sigmoid` with FAST computes it."""
    exponent = gate.float() * torch.tensor(-LOG2E, dtype=FP32)
    power = off_by(torch.exp2(exponent.double()), power_steps)
    return off_by(1 / (1 + power).double(), reciprocal_steps)


ERRORS = list(itertools.product((-2, 0, 2), (-1, 0, 1)))


@pytest.mark.parametrize("errors", ERRORS, ids=str)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_silu(dtype, errors):
    gate = every(dtype)
    gate = gate[gate > -87]
    found = (gate.float() * sigmoid(gate, *errors)).to(dtype)
    exact = F.silu(gate.double())
    eager = F.silu(gate)
    assert (found == eager).float().mean() >= 0.99
    assert ((found.double() - exact).abs() <= step(exact, dtype)).all()


@pytest.mark.parametrize("errors", ERRORS, ids=str)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_slope_of_silu(dtype, errors):
    gate = every(dtype)
    gate = gate[(gate > -87) & (gate < 1e4)]
    share = sigmoid(gate, *errors)
    found = (share * (1 + gate.float() * (1 - share))).to(dtype)
    exact_share = torch.sigmoid(gate.double())
    exact = exact_share * (1 + gate.double() * (1 - exact_share))
    cancelled = 8 * torch.finfo(FP32).eps * exact_share * (1 + gate.double().abs())
    assert ((found.double() - exact).abs() <= step(exact, dtype) + cancelled).all()


def test_gates_that_are_further_below_give_zero():
    gate = torch.tensor([-88.0, -100.0, -1e4, -3e38]).to(torch.bfloat16)
    assert (gate.float() * sigmoid(gate, 0, 0) == 0).all()
    assert (F.silu(gate.double()).abs() < 1e-35).all()
