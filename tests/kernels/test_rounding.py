"""Roundings to bf16 by arithmetic are those of a cast, and Inductor's CPU code keeps them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import fxfuse
from fxfuse.kernels.rounding import as_stored, product, rounded

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from op_cases import CASES

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
    same = found == expected
    assert same.float().mean() > 0.9999
    assert ((found - expected).abs() <= expected.abs() / 128).all()


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
