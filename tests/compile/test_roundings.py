"""The pass that keeps roundings marks our own half-precision steps, and nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from fxfuse.roundings import KeepRoundings, source_hash

BARRIER = "low_precision_pointwise_barrier"


def graph() -> tuple[fx.Graph, dict[str, fx.Node]]:
    made = fx.Graph()
    x = made.placeholder("x")
    nodes = {"x": x}
    for name, dtype, meta in (
        ("ours", torch.bfloat16, {"custom": {"fxfuse": "fxfuse::rms_norm"}}),
        ("wide", torch.float32, {"custom": {"fxfuse": "fxfuse::rms_norm"}}),
        ("theirs", torch.bfloat16, {}),
        ("backward", torch.bfloat16,
         {"custom": {"fxfuse": "fxfuse::rms_norm"}, "partitioner_tag": "is_backward"}),
        ("by_arithmetic", torch.bfloat16, {"custom": {"fxfuse": "fxfuse::rms_norm"}}),
    ):  # fmt: skip
        node = made.call_function(torch.ops.aten.neg.default, (x,), name=name)
        device = "cpu" if name == "by_arithmetic" else "meta"
        node.meta.update(meta, val=torch.empty(2, dtype=dtype, device=device))
        nodes[name] = node
    x.meta["val"] = torch.empty(2, device="meta")
    made.output(tuple(nodes.values()))
    return made, nodes


def test_only_our_forward_half_steps_are_marked():
    made, nodes = graph()
    KeepRoundings()(made)
    assert [name for name, n in nodes.items() if n.meta.get(BARRIER)] == ["ours"]


@pytest.mark.parametrize("tag, marked", [("is_forward", True), ("is_backward", False)])
def test_what_our_steps_read_is_rounded_in_the_forward_only(tag, marked):
    made = fx.Graph()
    half = made.placeholder("half")
    wide, other = (made.call_function(torch.ops.aten.neg.default, (half,)) for _ in range(2))
    half.meta["val"] = torch.empty(2, dtype=torch.bfloat16, device="meta")
    wide.meta.update(val=torch.empty(2, device="meta"), custom={"fxfuse": "fxfuse::rms_norm"})
    other.meta.update(val=half.meta["val"], partitioner_tag=tag)
    made.output((wide, other))
    KeepRoundings()(made)
    assert wide.meta.get(BARRIER, False) == marked


def test_the_sources_are_part_of_the_identity():
    assert source_hash() in KeepRoundings().uuid() and len(source_hash()) == 64
