"""What a site costs as a kernel of ours and as code that Inductor writes: bytes and launches.

All figures are published ones; none of ours was measured. They rank two ways to compute the same
thing, and are no forecast of a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fxfuse import folding


@dataclass(frozen=True)
class GPU:
    """terabytes: memory bandwidth in TB/s. cache: MB of the last cache before memory."""

    terabytes: float
    cache: int


# From the makers' data sheets: A100, H100 (an H200 has 4.8 TB/s), B200, RTX PRO 6000, MI300X.
GPUS = {
    "sm_80": GPU(2.0, 40),
    "sm_90": GPU(3.35, 50),
    "sm_100": GPU(8.0, 126),
    "sm_120": GPU(1.8, 128),
    "gfx942": GPU(5.3, 256),
}
LAUNCH_US = 3.0  # one kernel after another; 2 to 4 are published
CALL_US = 15.0  # the host, for an op that is registered from Python; 15 to 30 are published
CACHED = 0.5  # the weight of a byte that is read again, and found in a cache

# Up to this width Inductor keeps a row in registers; a wider one it reads again for each norm.
# Published for add + norm of 4096 columns on H100: 2.3 TB/s with it, 2.9 TB/s without.
PERSISTENT_COLUMNS = 1024
# The share of the bandwidth that a kernel reaches. Forward: Triton kernels of one row a program, on
# H100. Backward: persistent kernels like ours reach 64 to 85 % on H100 (QuACK), Inductor's 30 to
# 55 % on GB200 at 8192 columns, where registers run out (pytorch#185534).
FORWARD_SHARE, BACKWARD_SHARE, WIDE_BACKWARD_SHARE = 0.85, 0.7, 0.5
WIDE_COLUMNS = 4096
# The backward stage hands a kernel at most so many gradients of one result.
MOST_GRADIENTS = 3
_MORE = f"the sum of all but {MOST_GRADIENTS - 1} of its gradients"


@dataclass(frozen=True)
class Barrier:
    """An op beside a site that Inductor would fuse with it, and an opaque op keeps apart.

    forward, backward: the bytes an element that are then written and read in between.
    """

    op: str
    forward: int
    backward: int


@dataclass(frozen=True)
class Flow:
    """What goes in and out of a site, in bytes for each of its elements.

    unused: results that only the kernel writes. saved: operands and results that are kept for the
    backward, each of which has a gradient of its own. dy: one gradient of the result; dys: how many
    are to be added. dres: gradients of the other results. norms: how often the site reduces its
    rows. weighted: whether a value per column gets a gradient. in_backward: whether the site is
    itself the backward of one.
    """

    reads: int
    writes: int
    unused: int = 0
    saved: int = 0
    dy: int = 0
    dys: int = 1
    dres: int = 0
    norms: int = 1
    weighted: bool = True
    barriers: tuple[Barrier, ...] = ()
    in_backward: bool = False


@dataclass(frozen=True)
class Cost:
    """bytes: moved for each element. apart: what an opaque op adds to them, since it keeps its
    neighbours apart. cached: bytes that are read again soon, and found in a cache. calls: of ops
    that are registered from Python. note: how it goes about it.
    """

    bytes: int
    apart: int = 0
    cached: int = 0
    launches: int = 1
    calls: int = 0
    share: float = FORWARD_SHARE
    note: str = ""

    @property
    def moved(self) -> int:
        """All bytes for each element, wherever they come from."""
        return self.bytes + self.apart + self.cached

    def time(self, gpu: GPU, elements: int | None) -> float:
        """In microseconds; for one of very many elements where their number is not known."""
        weight = self.moved - (1 - CACHED) * self.cached
        each = weight / (gpu.terabytes * self.share * 1e6)
        if elements is None:
            return each
        return max(each * elements + LAUNCH_US * self.launches, CALL_US * self.calls)


def forward(flow: Flow, columns: int | None) -> tuple[Cost, list[Cost]]:
    """The kernel, and Inductor's code for the same."""
    moved, apart = flow.reads + flow.writes, _apart((b.op, b.forward) for b in flow.barriers)
    kernel = Cost(moved + flow.unused, **apart, calls=1)
    return kernel, [Cost(moved, **_looped(flow, columns, flow.reads))]


def backward(
    flow: Flow, rows: int | None, columns: int | None, gpu: GPU
) -> tuple[Cost, list[Cost]]:
    """The kernel, and Inductor's code for the same: one cost for each form that it may take."""
    reads = flow.reads if flow.in_backward else flow.dy * flow.dys + flow.saved
    moved = reads + (flow.writes if flow.in_backward else flow.dres + flow.saved)
    apart = [(b.op, b.backward) for b in flow.barriers]
    apart += [(_MORE, 2 * flow.dy)] * (flow.dys > MOST_GRADIENTS)
    kernel = Cost(moved, **_apart(apart, 1 + flow.weighted), calls=1, share=BACKWARD_SHARE)
    moved += flow.dy * max(flow.norms - 1, 0)  # what one norm's backward hands to the next
    wide = flow.norms and (columns or 0) > WIDE_COLUMNS
    share = WIDE_BACKWARD_SHARE if wide else BACKWARD_SHARE
    if not (flow.weighted and flow.norms):
        return kernel, [Cost(moved, share=share, **_looped(flow, columns, reads))]
    forms = []
    for gate in folding.gates(rows, columns):
        again, cached = reads, _looped(flow, columns, reads)["cached"]
        note = f"in two passes ({gate})"
        if gate is None:
            again, cached, note = 0, 0, "in one pass"
            if wide:
                note += f", which is slow for rows wider than {WIDE_COLUMNS}"
        known = rows is not None and columns is not None
        if known and moved * rows * columns <= gpu.cache * 1_000_000:
            again, cached = 0, cached + again
        forms.append(Cost(moved + again, 0, cached, launches=3, share=share, note=note))
    return kernel, forms


def _apart(ops: Iterable[tuple[str, int]], launches: int = 1) -> dict:
    """What it adds to the cost of a kernel that `ops` run beside it, with their bytes."""
    kept = [(op, moved) for op, moved in ops if moved]
    names = " and ".join(dict.fromkeys(op for op, _ in kept))
    note = f"keeping apart {names}" if kept else ""
    return {"apart": sum(n for _, n in kept), "launches": launches + len(kept), "note": note}


def _looped(flow: Flow, columns: int | None, reads: int) -> dict:
    """Rows that are too wide to be kept are read again."""
    if not flow.norms or (columns is not None and columns <= PERSISTENT_COLUMNS):
        return {"cached": 0}
    return {"cached": flow.norms * reads, "note": f"(rows wider than {PERSISTENT_COLUMNS})"}
