"""The backward patterns behind each way into the compile stack; their reports on warm caches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import fxfuse
from tests.compile.blocks import DEPTH, WIDTH, compare

ROOT = Path(__file__).parents[2]
BY_BLOCK = {
    "add_rms_norm": 1, "rms_norm": 1, "silu_gate": 1,
    "backward_add_rms_norm": 1, "backward_sum_rms_norm": 2,
}  # fmt: skip
BY_LAYER = {
    "add_rms_norm": DEPTH, "rms_norm": DEPTH + 1, "silu_gate": DEPTH,
    "backward_add_rms_norm": DEPTH, "backward_sum_rms_norm": 2 * DEPTH,
}  # fmt: skip


def run_script(how: str, cache: Path) -> tuple[list[tuple[dict[str, int], float]], int]:
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.compile.blocks", how]
    ran = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.parametrize("how", ["backend", "hooks"])
def test_inductor_and_a_second_process(how, tmp_path):
    """The second process finds all it needs in the caches, which call no hook."""
    for process in ("first", "second"):
        found, hits = run_script(how, tmp_path)
        if how == "backend":  # with a pass before autograd, older PyTorch leaves its cache out
            assert (hits > 0) == (process == "second")
        assert [counts for counts, _ in found] == [BY_BLOCK, BY_LAYER][: len(found)]
        assert max(difference for _, difference in found) < 1e-5
    assert list((tmp_path / "fxfuse").glob("*.json"))


@pytest.mark.parametrize("checkpointed", [False, True])
def test_aot_eager(checkpointed):
    backend = fxfuse.make_backend("aot_eager", policy="always")
    counts, difference = compare(checkpointed, backend=backend)
    assert counts == (BY_LAYER if checkpointed else BY_BLOCK)
    assert difference < 1e-5


def test_a_backward_that_is_inline_has_nothing_to_join():
    counts, difference = compare(False, backend=fxfuse.make_backend(policy="auto"))
    assert counts == {k: n for k, n in BY_BLOCK.items() if k != "backward_sum_rms_norm"}
    assert difference < 1e-5


def test_only_the_patterns_that_were_asked_for():
    backend = fxfuse.make_backend(
        "aot_eager", patterns=["rms_norm", "backward_sum_rms_norm"], policy="always"
    )
    counts, _ = compare(False, backend=backend)
    assert counts == {"rms_norm": 2, "backward_sum_rms_norm": 2}


def test_a_report_after_the_recorder_has_ended():
    """The backward is compiled when it first runs; its report belongs to the same recorder."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.RMSNorm(WIDTH)
            self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            y = self.norm(x)
            return self.one(y) + self.two(y).tanh()

    torch._dynamo.reset()
    compiled = torch.compile(Twice(), backend=fxfuse.make_backend("aot_eager", policy="always"))
    with fxfuse.record() as reports:
        out = compiled(torch.randn(3, WIDTH, requires_grad=True))
    assert [r.counts for r in reports] == [{"rms_norm": 1}]
    out.sum().backward()
    assert [r.counts for r in reports] == [{"rms_norm": 1}, {"backward_sum_rms_norm": 1}]
