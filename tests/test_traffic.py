"""scripts/traffic.py, which counts without a GPU what Inductor and our ops would move on one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "traffic.py"
ROWS, WIDTH, HEAD, MLP = 32, 256, 32, 512
SIZE = f"2x16x{WIDTH}x{HEAD}x{MLP}"


def run(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True)


def counted(block: str, policy: str, *more: str) -> tuple[list[dict], list[dict]]:
    """Forward and backward of torch.compile alone, and of fxfuse by a policy."""
    ran = run("--json", "--policy", policy, *more, block)
    assert ran.returncode == 0, ran.stderr[-3000:]
    (found,) = json.loads(ran.stdout).values()
    assert list(found) == ["torch.compile", f"fxfuse {policy}"]
    return tuple(found.values())


def test_the_bytes_of_our_ops():
    """By hand: rows of bf16, the weight, and rstd in fp32."""
    row, weight, rstd, gated = 2 * ROWS * WIDTH, 2 * WIDTH, 4 * ROWS, 2 * ROWS * MLP
    alone, (forward, backward) = counted("llama", "always", "--size", SIZE)
    norm, add_norm = 2 * row + weight + rstd, 4 * row + weight + rstd
    assert (forward["ops"], forward["op_bytes"]) == (3, norm + add_norm + 3 * gated)
    # two gradients of y and three of them, the input, the residual's gradient, and what comes out
    norms = (2 + 3) * row + 3 * 2 * row + 2 * (2 * weight + rstd)
    assert (backward["ops"], backward["op_bytes"]) == (3, norms + 5 * gated)
    assert all(one["ops"] == one["op_bytes"] == 0 < one["kernel_bytes"] for one in alone)
    assert [one["others"] for one in alone] == [forward["others"], backward["others"]]


@pytest.mark.parametrize("block", ["llama", "gated"])
def test_auto_moves_no_more_than_torch_compile(block):
    """In either direction, at full size: nothing is computed, so it takes no longer."""
    alone, auto = counted(block, "auto")
    for without, fused in zip(alone, auto):
        assert fused["ops"] > 0
        assert fused["kernel_bytes"] + fused["op_bytes"] <= without["kernel_bytes"]


def test_a_size_that_has_no_such_heads():
    ran = run("--size", "2x16x256x100x512", "llama")
    assert ran.returncode == 2 and "even number of heads" in ran.stderr
