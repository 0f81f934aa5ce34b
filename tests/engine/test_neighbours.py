"""What goes in and out of a site, and what Inductor would fuse with it: graphs to figures."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxfuse
from fxfuse.rewrite import rewrite
from tests.dialects import dynamo

ROWS, WIDTH = 4096, 4096


def norm(x: Tensor, weight: Tensor) -> Tensor:
    h = x.float()
    return weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Layers(nn.Module):
    """A product, `between`, and `count` products more."""

    def __init__(self, between, count: int = 1) -> None:
        super().__init__()
        with torch.device("meta"):
            self.weight, self.other = (nn.Parameter(torch.empty(WIDTH)) for _ in range(2))
            self.before = nn.Linear(WIDTH, WIDTH, bias=False)
            self.behind = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count))
            self.table = nn.Embedding(9, WIDTH)
        self.between = between
        self.to(torch.bfloat16)

    def forward(self, z, residual):
        y, *rest = self.between(self, self.before(z), residual)
        return *(layer(y) for layer in self.behind), *rest


def policy(between, count: int = 1, rows: int = ROWS, train: bool = True, pattern=None) -> str:
    """What is said of the one site (of a pattern) in the graph."""
    x = torch.empty(2, rows // 2, WIDTH, dtype=torch.bfloat16, device="meta", requires_grad=True)
    report = fxfuse.explain(Layers(between, count), x, x, target="sm_90", train=train)
    (found,) = {m.policy for m in report.matches if pattern in (None, m.pattern)}
    return found


def add_norm(m, x, residual):
    h = x + residual
    return norm(h, m.weight), h


def last(m, x, residual):
    return (norm(x + residual, m.weight),)


def viewed(m, x, residual):
    return norm(x.view(2, -1, WIDTH), m.weight).transpose(0, 1), residual


def forked(m, x, residual):
    return norm(x, m.weight), x.view(-1)


def post(m, x, residual):
    h = residual + norm(x, m.weight)
    return h, h


def rope(m, x, residual):
    y = norm(x, m.weight)
    return y * residual + torch.roll(y, 1, -1), residual


def scaled(m, x, residual):
    h = x * 0.22 + residual
    return norm(h, m.weight), h


def dropped(m, x, residual):
    h = residual + F.dropout(x, 0.1)
    return norm(h, m.weight), h


def sum_before(m, x, residual):
    h = (x + x.roll(1, 0)) + residual
    return norm(h, m.weight), h


def activated(m, x, residual):
    return norm(torch.tanh(x), m.weight), residual


def embedded(m, x, residual):
    x = m.table(torch.arange(ROWS, device="meta").view(2, -1))
    return norm(x, m.weight), x


def also_pointwise(m, x, residual):
    h = x + residual
    y = norm(h, m.weight)
    return y, y.tanh(), h


def before_a_sandwich(m, x, residual):
    y = norm(x, m.weight)
    h = residual + norm(y, m.other)
    return norm(h, m.weight), y


@pytest.mark.parametrize(
    ("between", "count", "sides", "words"),
    [
        (add_norm, 1, "kernel", "backward 8 bytes an element against Inductor's 12 and 4"),
        (add_norm, 3, "kernel", "backward 12 bytes an element against Inductor's 20 and 8"),
        (add_norm, 5, "kernel", "keeping apart the sum of all but 2 of its gradients"),
        (last, 1, "kernel", "backward 6 bytes an element against"),
        (viewed, 1, "kernel", "backward 6 bytes an element against"),
        (forked, 1, "kernel", "backward 8 bytes an element against Inductor's 12"),
        (post, 1, "forward inline, backward kernel", "backward 6 + 2 bytes an element, keeping "
            "apart the add behind it"),
        (rope, 1, "forward inline, backward kernel", "forward 4 + 4 bytes an element, keeping "
            "apart the mul behind it, against Inductor's 4 and 2"),
        (scaled, 1, "forward inline, backward kernel", "8 + 2 bytes an element, keeping apart the "
            "mul before it"),
        (dropped, 1, "forward inline, backward kernel", "apart the dropout before it"),
        (sum_before, 1, "forward inline, backward kernel", "backward 8 bytes an element against"),
        (activated, 1, "inline", "backward 6 + 8 bytes an element, keeping apart the tanh before"),
        (embedded, 1, "forward inline, backward kernel", "forward 4 + 2 bytes an element, keeping "
            "apart the embedding before it"),
        (also_pointwise, 1, "forward inline, backward kernel", "forward 8 + 2 bytes an element, "
            "keeping apart the tanh behind it"),
    ],
)  # fmt: skip
def test_neighbours(between, count, sides, words):
    found = policy(between, count)
    assert found.partition(":")[0] == sides, found
    assert words in found


def test_without_gradients():
    """Then a sum that nobody reads is written by the kernel alone."""
    assert policy(last, train=False).startswith("inline: 8 bytes an element against Inductor's 6")
    assert policy(add_norm, train=False).startswith("kernel: 8 bytes an element against")


def test_a_kernel_beside_it_is_no_fusion_lost():
    """It reads the result once, in however many steps the graph has it."""
    sandwich = policy(before_a_sandwich, pattern="rms_norm_add_rms_norm")
    assert sandwich.startswith("kernel: forward 8 + 2 bytes an element, keeping apart the mul")
    found = policy(before_a_sandwich, pattern="rms_norm")
    assert found.startswith("kernel: forward 4 bytes an element against Inductor's 4 and 2")
    assert "backward 8 bytes an element against Inductor's 14" in found


def test_a_gate_on_its_own():
    found = policy(lambda m, x, residual: (F.silu(x) * residual, residual))
    assert found == (
        "inline: forward 6 bytes an element either way; backward 10 bytes an element either way"
    )


def test_a_frozen_weight():
    def frozen(m, x, residual):
        return norm(x, m.weight.detach()), residual

    words = "backward 6 bytes an element against Inductor's 6 and 4 again"
    assert words in policy(frozen)


def test_rows_of_a_symbolic_number():
    """Known is what moves an element; no guard is added to learn the rest."""
    model = Layers(add_norm)
    x = torch.empty(2, 64, WIDTH, dtype=torch.bfloat16, device="meta")
    torch._dynamo.mark_dynamic(x, 1)
    report = rewrite(dynamo(model, (x, x)), target="sm_90", compiled=True)
    (found,) = {m.policy for m in report.matches}
    assert "in one pass or 12 and 4 again from the cache in two passes (where the rows" in found
    assert found.startswith("kernel: ")


def test_equal_sites_have_one_reason():
    def chain(m, x, residual):
        for _ in range(3):
            h = x + residual
            x, residual = m.before(norm(h, m.weight)), h
        return x, residual

    x = torch.empty(2, 64, WIDTH, dtype=torch.bfloat16, device="meta")
    report = fxfuse.explain(Layers(chain), x, x, target="sm_90")
    assert report.counts["add_rms_norm"] == 3
    assert len({m.policy for m in report.matches}) == 1
