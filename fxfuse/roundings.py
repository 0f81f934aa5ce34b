"""Keeps the roundings of our inline code under Inductor. Private PyTorch interfaces live here.

Inductor computes fused half-precision steps in fp32 and drops the roundings between them. On a CPU
our bf16 formulas round by arithmetic that it cannot drop (`kernels/rounding.py`), and so does what
reads a result of theirs in the same kernel, where it would not see it rounded. Elsewhere a node
whose metadata says `low_precision_pointwise_barrier` keeps its own; Inductor sets that for all
nodes under `emulate_precision_casts`, and we set it for ours alone, so the rest of the user's
model keeps its speed.

Tried on torch 2.13; the key and the hook are the same in the sources of 2.10 to 2.14.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass

from fxfuse.fusable import GENERATED, VIEW, kind

_HALVES = (torch.float16, torch.bfloat16)
_BY_ARITHMETIC = (torch.bfloat16, "cpu")
_BARRIER = "low_precision_pointwise_barrier"
_TAG = "partitioner_tag"
# Veltkamp's constant for the 8 bits of bf16, see kernels/rounding.py.
_SPLIT = float((1 << 16) + 1)


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
        for node in () if again else list(graph.nodes):
            if _is_ours(node) and _of(node) == _BY_ARITHMETIC:
                _round_for_readers(node)

    def uuid(self) -> str:
        return f"fxfuse roundings {source_hash()}"


def _is_ours(node: fx.Node) -> bool:
    forward = node.meta.get(_TAG) != "is_backward"
    return forward and node.op == "call_function" and _site(node) is not None


def _site(node: fx.Node) -> str | None:
    """Which op of ours a node came from."""
    return (node.meta.get("custom") or {}).get("fxfuse")


def _is_half(*nodes: fx.Node) -> bool:
    kinds = map(_of, nodes)
    return any(k[0] in _HALVES and k != _BY_ARITHMETIC for k in kinds)


def _of(node: fx.Node) -> tuple[torch.dtype | None, str]:
    value = node.meta.get("val")
    return (value.dtype, value.device.type) if isinstance(value, torch.Tensor) else (None, "")


def _round_for_readers(node: fx.Node) -> None:
    """What Inductor would fuse with a bf16 result of a site reads it rounded by arithmetic."""
    site = _site(node)
    readers = [user for user in node.users if _site(user) != site and _is_generated(user)]
    if not readers:
        return
    aten, cast = torch.ops.aten, torch.ops.prims.convert_element_type.default
    steps = [node]

    def step(target: Callable, *operands: object) -> fx.Node:
        with node.graph.inserting_after(steps[-1]):
            made = node.graph.call_function(target, operands)
        values = [o.meta["val"] if isinstance(o, fx.Node) else o for o in operands]
        made.meta["val"] = target(*values)
        steps.append(made)
        return made

    wide = step(cast, node, torch.float32)
    far = step(aten.mul.Tensor, wide, _SPLIT)
    near = step(aten.add.Tensor, far, step(aten.sub.Tensor, wide, far))
    # what is infinite or overflows stays as it is
    near = step(aten.where.self, step(aten.eq.Tensor, near, near), near, wide)
    rounded = step(cast, near, torch.bfloat16)
    for reader in readers:
        reader.replace_input_with(node, rounded)


def _is_generated(node: fx.Node) -> bool:
    if kind(node) == VIEW:
        return any(map(_is_generated, node.users))
    return kind(node) == GENERATED
