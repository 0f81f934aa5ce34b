"""Times of calls on a GPU: one by one behind a flushed cache, and replayed without launch gaps."""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

WARM_UP_MS, MEASURED_MS = 10, 30
# Of a replay: how long it should take, the most calls in it, and how often it is timed.
GRAPH_MS, GRAPH_CALLS, REPLAYS = 4.0, 20, 7
# Input sets together are so many times the L2 cache, so that none is found there again.
CACHES, MOST_SETS = 8, 16
Call = Callable[[], object]


@dataclass(frozen=True)
class Time:
    """Medians in milliseconds.

    alone: one call at a time, launched by Python, the L2 cache flushed before each. replayed: a
    call of a CUDA graph that goes around several input sets; None where no graph was captured.
    """

    alone: float
    replayed: float | None = None

    @property
    def ms(self) -> float:
        """What the GPU works, as near as it was measured."""
        return self.alone if self.replayed is None else self.replayed

    def as_json(self) -> dict[str, float | None]:
        return {"alone_ms": self.alone, "replayed_ms": self.replayed}


def begin(device: str) -> None:
    """Leave the default stream, from which no graph can be captured. Before anything is timed.

    Autograd runs a backward on the stream of its forward, so both must be on the one captured.
    """
    if device == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream())


def input_sets(size: int, device: str) -> int:
    """How many input sets of so many bytes to go around."""
    if device == "cpu":
        return 1
    cache = torch.cuda.get_device_properties().L2_cache_size
    return max(1, min(MOST_SETS, -(-CACHES * cache // size)))


def measure(calls: Sequence[Call], device: str) -> Time:
    """The time of a call; `calls` are the same one on different input sets."""
    if device == "cpu":
        calls[0]()
        start = time.perf_counter()
        calls[0]()
        return Time((time.perf_counter() - start) * 1e3)
    alone = flushed(calls[0])
    try:
        return Time(alone, replayed(calls, alone))
    except RuntimeError as error:  # not everything can be captured
        print(f"no CUDA graph: {str(error).partition(chr(10))[0]}", file=sys.stderr)
        return Time(alone)


def flushed(call: Call, rep: int = MEASURED_MS) -> float:
    """The median of calls behind a flushed L2 cache, in about `rep` milliseconds."""
    from triton.testing import do_bench

    return do_bench(call, warmup=WARM_UP_MS, rep=rep, return_mode="median")


def replayed(calls: Sequence[Call], estimate: float) -> float:
    """The median of a replay of a graph of about `GRAPH_MS`, for one call."""
    for call in calls:
        call()
    count = max(len(calls), min(GRAPH_CALLS, round(GRAPH_MS / estimate)))
    graph = captured(itertools.islice(itertools.cycle(calls), count))
    graph.replay()
    times = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / count)
    return statistics.median(times)


def captured(calls: itertools.islice) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    graph.capture_begin()
    try:
        for call in calls:
            call()
    finally:
        graph.capture_end()
    return graph


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
