"""Keeps the roundings of our inline code under Inductor. Private PyTorch interfaces live here.

Inductor computes fused half-precision steps in fp32 and drops the roundings between them. On a CPU
our bf16 formulas round by arithmetic that it cannot drop (`kernels/rounding.py`). Elsewhere a node
whose metadata says `low_precision_pointwise_barrier` keeps its own; Inductor sets that for all
nodes under `emulate_precision_casts`, and we set it for ours alone, so the rest of the user's
model keeps its speed.

Tried on torch 2.13; the key and the hook are the same in the sources of 2.10 to 2.14.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass

_HALVES = (torch.float16, torch.bfloat16)
_BY_ARITHMETIC = (torch.bfloat16, "cpu")
_BARRIER = "low_precision_pointwise_barrier"
_TAG = "partitioner_tag"


@lru_cache(maxsize=1)
def source_hash() -> str:
    """A hash of fxfuse's sources, so that code which another version compiled is not reused."""
    root = Path(__file__).parent
    rooms = [root, root / "patterns", root / "kernels"]
    rooms += [root.parent / "patterns", root.parent / "kernels"] if not rooms[2].is_dir() else []
    digest = hashlib.sha256()
    for file in sorted(f for room in rooms if room.is_dir() for f in room.glob("*.py")):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


class KeepRoundings(CustomGraphPass):
    """A `post_grad_custom_pre_pass` that marks the half-precision steps of our forward code.

    What a backward graph computes again keeps its own roundings, but not those of what it reads:
    each mark counts as work, and Inductor writes a gradient with too much of it to memory in fp32.
    """

    def __call__(self, graph: fx.Graph) -> None:
        again = any(n.meta.get(_TAG) == "is_backward" for n in graph.nodes)
        for node in graph.nodes:
            read = () if again else node.all_input_nodes
            if _is_ours(node) and _is_half(node, *read):
                node.meta[_BARRIER] = True

    def uuid(self) -> str:
        return f"fxfuse roundings {source_hash()}"


def _is_ours(node: fx.Node) -> bool:
    forward = node.meta.get(_TAG) != "is_backward"
    return forward and node.op == "call_function" and "fxfuse" in (node.meta.get("custom") or {})


def _is_half(*nodes: fx.Node) -> bool:
    values = [v for n in nodes if isinstance(v := n.meta.get("val"), torch.Tensor)]
    return any(v.dtype in _HALVES and (v.dtype, v.device.type) != _BY_ARITHMETIC for v in values)
