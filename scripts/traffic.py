"""What training a block would launch on a GPU, and how many bytes would move; needs no GPU.

    python scripts/traffic.py [--arch 80|90|100] [--policy auto|always|never] [MODEL]

Side by side, torch.compile alone and with fxfuse: Inductor's Triton kernels, our ops, all other
calls (matrix products, attention), and the gigabytes that the first two read and write.

Each tensor counts once for a kernel or op that reads it and once for the one that writes it, rstd
(an fp32 number a row) too. So it is what has to move: that a kernel of Inductor's goes over a row
twice is not seen, and no time follows from it. Partial sums of dweight count where Inductor makes
a kernel for them (they are small), but not where they stay behind one launch and a sum, as in our
ops and in Inductor's fused backward: there each program writes an fp32 row that is read once.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import warnings
from collections.abc import Callable, Sequence

import dry_inductor
import torch
from dry_inductor import Graph
from tabulate import tabulate
from traffic_blocks import BLOCKS, Size, make

import fxfuse

ALONE = "torch.compile"


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Of one direction of a step: how many launches, and the bytes that they read and write."""

    kernels: int = 0
    ops: int = 0
    others: int = 0
    kernel_bytes: int = 0
    op_bytes: int = 0

    @classmethod
    def of(cls, graph: Graph) -> Traffic:
        return cls(
            len(graph.kernels), len(graph.ops), len(graph.others),
            sum(c.nbytes for c in graph.kernels), sum(c.nbytes for c in graph.ops),
        )  # fmt: skip

    @property
    def nbytes(self) -> int:
        return self.kernel_bytes + self.op_bytes

    def __add__(self, other: Traffic) -> Traffic:
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other))
        return Traffic(*(a + b for a, b in pairs))


Side = tuple[Traffic, Traffic]  # forward, backward


def measure(name: str, arch: int, policies: Sequence[str], size: Size) -> dict[str, Side]:
    """torch.compile alone and fxfuse by each policy, for the block of this name."""
    sides = {ALONE: _compiled("inductor", {})}
    for policy in policies:
        options = {"fxfuse.policy": policy, "fxfuse.target": f"sm_{arch}"}
        sides[f"fxfuse {policy}"] = _compiled(fxfuse.backend, options)
    return {side: count(compile_, name, arch, size) for side, compile_ in sides.items()}


def _compiled(backend: object, options: dict[str, object]) -> Callable:
    return lambda block: torch.compile(block, backend=backend, options=options, dynamic=False)


def count(compile_: Callable, name: str, arch: int, size: Size) -> Side:
    """One training step of a block: its output, then the gradients of input and parameters."""
    torch._dynamo.reset()
    block = make(name, size)
    shape = (size.batch, size.tokens, size.width)
    x = torch.empty(shape, dtype=torch.bfloat16, requires_grad=True)
    with dry_inductor.on_gpu(arch) as graphs:
        y = compile_(block)(x)
        torch.autograd.grad(y, (x, *block.parameters()), torch.empty_like(y))
    forward, backward = graphs
    return Traffic.of(forward), Traffic.of(backward)


def table(sides: dict[str, Side]) -> str:
    alone = sum(sides[ALONE], Traffic()).nbytes
    rows = []
    for side, directions in sides.items():
        both = sum(directions, Traffic())
        for label, one in zip(("forward", "backward", "both"), (*directions, both)):
            share = f"{one.nbytes / alone:.3f}" if one is both else ""
            rows.append((side if label == "forward" else "", label, *_cells(one), share))
    head = ("", "", "Triton kernels", "ops", "other calls", "kernels, GB", "ops, GB", "GB", "ratio")
    return tabulate(rows, head, floatfmt=".3f")


def _cells(one: Traffic) -> tuple[object, ...]:
    gigabytes = (n / 1e9 for n in (one.kernel_bytes, one.op_bytes, one.nbytes))
    return one.kernels, one.ops, one.others, *gigabytes


def parse_size(text: str) -> Size:
    """Batch, tokens, width, head and MLP as in 2x2048x4096x128x11008."""
    numbers = [int(n) for n in text.split("x")]
    if len(numbers) != 5 or numbers[2] % (2 * numbers[3]):
        raise argparse.ArgumentTypeError(
            "five numbers, batch x tokens x width x head x MLP, with an even number of heads"
        )
    return Size(*numbers)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", choices=tuple(BLOCKS), help="default: each in turn")
    parser.add_argument("--arch", type=int, choices=tuple(dry_inductor.MULTIPROCESSORS), default=90)
    parser.add_argument("--policy", choices=("auto", "always", "never"), help="default: two")
    parser.add_argument(
        "--size", type=parse_size, default=Size(), help="batch x tokens x width x head x MLP"
    )
    parser.add_argument("--json", action="store_true", help="bytes, for other programs")
    options = parser.parse_args(argv)
    warnings.filterwarnings("ignore", message=".*force_disable_caches")
    policies = [options.policy] if options.policy else ["auto", "always"]
    models = [options.model] if options.model else list(BLOCKS)
    size = options.size
    found = {name: measure(name, options.arch, policies, size) for name in models}
    if options.json:
        print(json.dumps(_plain(found)))
        return 0
    for name, sides in found.items():
        print(f"{name}: {size}, sm_{options.arch}, torch {torch.__version__}\n")
        print(table(sides), end="\n\n")
    return 0


def _plain(found: dict[str, dict[str, Side]]) -> dict:
    return {
        name: {side: [dataclasses.asdict(one) for one in both] for side, both in sides.items()}
        for name, sides in found.items()
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
