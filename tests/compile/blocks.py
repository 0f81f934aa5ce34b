"""A model of four equal blocks, compiled block by block or checkpointed by layer; and a script.

As a script it prints in JSON, for each such way, the counts and how far gradients are from eager's;
then how often autograd's cache hit.
"""

from __future__ import annotations

import collections
import copy
import json
import sys

import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fxfuse

WIDTH, DEPTH = 32, 4


class Block(nn.Module):
    """norm, attention, add, norm, gated MLP, add."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        names = ("q", "k", "v", "o", "gate", "up", "down")
        self.linear = nn.ModuleDict({n: nn.Linear(WIDTH, WIDTH, bias=False) for n in names})

    def forward(self, x):
        lin = self.linear
        a = self.first(x)
        q, k, v = lin["q"](a), lin["k"](a), lin["v"](a)
        x = x + lin["o"](F.softmax(q @ k.transpose(1, 2), -1) @ v)
        b = self.second(x)
        return x + lin["down"](F.silu(lin["gate"](b)) * lin["up"](b))


class Model(nn.Module):
    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.last = nn.RMSNorm(WIDTH) if checkpointed else nn.Identity()
        self.checkpointed = checkpointed

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.last(x)


def gradients(call, model):
    model.zero_grad(set_to_none=True)
    x = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()
    call(x).square().mean().backward()
    return [x.grad, *(p.grad for p in model.parameters())]


def compare(checkpointed: bool, **compile_options) -> tuple[dict[str, int], float]:
    """Counts of all reports, and the largest difference of a gradient to eager's."""
    torch._dynamo.reset()
    model, total = Model(checkpointed), collections.Counter()
    twin = copy.deepcopy(model)
    with fxfuse.record() as reports:
        if checkpointed:
            got = gradients(torch.compile(model, **compile_options), model)
        else:
            for block in model.blocks:
                block.compile(**compile_options)
            got = gradients(model, model)
    for report in reports:
        total.update(report.counts)
    pairs = zip(got, gradients(twin, twin))
    return dict(total), max((a - b).abs().max().item() for a, b in pairs)


if __name__ == "__main__":
    if sys.argv[1] == "hooks":
        found = [compare(False, options=fxfuse.inductor_options(policy="always"))]
    else:
        backend = fxfuse.make_backend(policy="always")
        found = [compare(checkpointed, backend=backend) for checkpointed in (False, True)]
    print(json.dumps([found, counters["aot_autograd"]["autograd_cache_hit"]]))
