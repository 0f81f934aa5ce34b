"""The memory of a training step under torch.compile, with fxfuse beside torch.compile alone."""

from __future__ import annotations

import functools

import pytest
import torch

import fxfuse
from scripts import traffic_blocks
from scripts.step_memory import Allocated, Memory, of_call, of_step
from scripts.traffic_blocks import Size, make

SIZE = Size(batch=2, tokens=512, width=128, head=32, mlp=344)  # activations outweigh parameters


@functools.cache
def measured(block: str, dtype: torch.dtype, policy: str | None) -> Memory:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(make(block, SIZE, dtype) for _ in range(2)))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    x, dy = torch.randn(2, SIZE.batch, SIZE.tokens, SIZE.width).to(dtype).unbind()
    backend = "inductor" if policy is None else fxfuse.make_backend(policy=policy)
    compiled = torch.compile(model, backend=backend, dynamic=False)
    return of_step(compiled, [x.requires_grad_(), *model.parameters()], dy)


FP32, BF16 = torch.float32, torch.bfloat16
ROWS = SIZE.batch * SIZE.tokens
# What the gradients of two weights are gathered in: sums of runs of 128 rows in fp32, and these in
# fp64. A thousandth of the peak here, and less of a wider or deeper model's.
PARTIAL_SUMS = 2 * (ROWS // 128 * 4 + 8) * SIZE.width

BLOCKS = [(block, dtype) for block in traffic_blocks.BLOCKS for dtype in (FP32, BF16)]


@pytest.mark.parametrize("block, dtype", BLOCKS, ids=str)
def test_no_more_is_saved(block, dtype):
    assert measured(block, dtype, "auto").saved <= measured(block, dtype, None).saved


@pytest.mark.parametrize("block, dtype", BLOCKS, ids=str)
def test_the_peak_is_no_higher(block, dtype):
    alone = measured(block, dtype, None).peak
    assert measured(block, dtype, "auto").peak <= alone + PARTIAL_SUMS


@pytest.mark.parametrize("block", ["llama", "gated"])
def test_ops_save_no_more(block):
    assert measured(block, FP32, "always").saved <= measured(block, FP32, None).saved


@pytest.mark.parametrize("returned, most", [(1, 2), (2, 3)])
def test_what_is_kept_in_vain_is_seen(returned, most):
    """Of a chain of products two are alive at a time, and one more if the first is returned."""
    torch._dynamo.reset()

    @torch.compile
    def chain(x, w):
        first = x @ w
        last = first @ w @ w
        return (last, first)[:returned]

    x, w = torch.randn(256, 64), torch.randn(64, 64)
    chain(x, w)
    product = x.nbytes
    assert of_call(lambda: chain(x, w)) == Allocated(most * product, returned * product)
