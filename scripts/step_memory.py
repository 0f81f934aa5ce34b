"""Bytes that a training step allocates on the CPU, exactly: every allocation, Inductor's too.

PyTorch's allocator tells the profiler of each allocation and each release. What lives outside of
it, such as an array inside a C++ kernel, is not seen.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile


@dataclass(frozen=True)
class Memory:
    """Of one training step, in bytes beside inputs and parameters.

    saved: what is alive between forward and backward, the output included; peak: the most that is
    alive at any time, with the gradients.
    """

    saved: int
    peak: int


def of_step(function: Callable, inputs: Sequence[Tensor], dy: Tensor) -> Memory:
    """One step of `function(inputs[0])` and the gradients of all the inputs.

    It is run twice before, so that what is compiled or allocated once is not counted.
    """

    def step() -> None:
        torch.autograd.grad(function(inputs[0]), inputs, dy)

    for _ in range(2):
        step()
    return Memory(saved=of_call(lambda: function(inputs[0])).left, peak=of_call(step).peak)


@dataclass(frozen=True)
class Allocated:
    """Of one call, in bytes: the most that was alive, and what its result holds on to."""

    peak: int
    left: int


def of_call(call: Callable[[], object]) -> Allocated:
    gc.collect()
    gc.disable()
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            result = call()
    finally:
        gc.enable()
    del result
    live = peak = 0
    for nbytes in _changes(profiler):
        live += nbytes
        peak = max(peak, live)
    return Allocated(peak, live)


def _changes(profiler: profile) -> list[int]:
    """Bytes of each allocation, negative for a release, in order of time."""
    events = profiler.profiler.kineto_results.events()
    found = [event for event in events if event.name() == "[memory]"]
    return [event.nbytes() for event in sorted(found, key=lambda event: event.start_ns())]
