"""Transformer blocks through torch.compile, plain and with fxfuse: numbers, times, kernels, memory.

A block is norm, attention, add, norm, gated MLP, add; a last norm follows them.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from gpu_time import synchronize
from op_cases import BF16, EPS
from torch import Tensor, nn
from torch.nn import functional as F

import fxfuse

LAYERS = 2
ROUNDS, WARM_UP = 21, 3
# Gradients may be so many times as far from fp32 as those of eager or of torch.compile, whichever
# is farther; the loss so far, relative to itself.
FACTOR, LOSS = 1.2, 1e-3
Step = Callable[[], Tensor]


@dataclass(frozen=True)
class Size:
    """Of the model: batch, tokens, and the widths of rows, heads and the MLP."""

    batch: int
    tokens: int
    width: int
    head: int
    mlp: int


FULL, DRY = Size(4, 2048, 4096, 128, 11008), Size(2, 16, 64, 16, 128)


class Block(nn.Module):
    """Causal attention and a gated MLP over x [batch, tokens, width], each behind a norm."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.head = size.head
        self.first, self.second = (nn.RMSNorm(size.width, EPS) for _ in range(2))
        self.q, self.k, self.v, self.o = (
            nn.Linear(size.width, size.width, bias=False) for _ in range(4)
        )
        self.gate, self.up = (nn.Linear(size.width, size.mlp, bias=False) for _ in range(2))
        self.down = nn.Linear(size.mlp, size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        a = self.first(x)
        q, k, v = (self.heads(layer(a)) for layer in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(-2))
        b = self.second(x)
        return x + self.down(F.silu(self.gate(b)) * self.up(b))

    def heads(self, t: Tensor) -> Tensor:
        """[batch, tokens, width] as [batch, heads, tokens, head]."""
        return t.unflatten(-1, (-1, self.head)).transpose(1, 2)


def make_model(size: Size, device: str) -> nn.Module:
    torch.manual_seed(0)
    blocks = [Block(size) for _ in range(LAYERS)]
    return nn.Sequential(*blocks, nn.RMSNorm(size.width, EPS)).to(device, BF16)


class Side:
    """A copy of the model, and what runs one training step of it."""

    def __init__(self, model: nn.Module, call: Callable, size: Size, device: str) -> None:
        self.model, self.call = model, call
        dtype = next(model.parameters()).dtype
        generator = torch.Generator(device).manual_seed(1)
        shape = (2, size.batch, size.tokens, size.width)
        x, self.target = torch.randn(*shape, generator=generator, device=device).to(BF16).unbind()
        self.x = x.to(dtype).requires_grad_()

    def step(self) -> Tensor:
        """The loss, with new gradients of x and the parameters."""
        self.x.grad = None
        self.model.zero_grad(set_to_none=True)
        loss = F.mse_loss(self.call(self.x).float(), self.target.float())
        loss.backward()
        return loss.detach()

    def gradients(self) -> list[Tensor]:
        return [self.x.grad, *(p.grad for p in self.model.parameters())]


def backends(dry: bool) -> dict[str, Callable | str]:
    """torch.compile alone, and with fxfuse by both policies."""
    inner = "aot_eager" if dry else "inductor"
    fused = {f"fxfuse, {p}": fxfuse.make_backend(inner, policy=p) for p in ("auto", "always")}
    return {"torch.compile": inner, **fused}


def compiled_side(model: nn.Module, backend: Callable | str, size: Size, device: str) -> Side:
    twin = copy.deepcopy(model)
    return Side(twin, torch.compile(twin, backend=backend, dynamic=False), size, device)


def prepare(name: str, device: str, dry: bool) -> None:
    """Fill the caches of Triton and Inductor with what `measure` runs of one side."""
    size = DRY if dry else FULL
    compiled_side(make_model(size, device), backends(dry)[name], size, device).step()


# --- numbers -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Errors:
    """How far from fp32: the loss, relative to it; the farthest gradient, by relative RMS."""

    loss: float
    gradient: float


def errors(side: Side, exact_loss: Tensor, exact: list[Tensor]) -> Errors:
    loss = ((side.step() - exact_loss).abs() / exact_loss).item()
    apart = [
        ((found.float() - right).norm() / right.norm()).item()
        for found, right in zip(side.gradients(), exact)
    ]
    return Errors(loss, max(apart))


def exact_step(model: nn.Module, size: Size, device: str) -> tuple[Tensor, list[Tensor]]:
    """Loss and gradients of the same weights in eager fp32."""
    twin = copy.deepcopy(model).float()
    side = Side(twin, twin, size, device)
    return side.step(), side.gradients()


# --- costs ---------------------------------------------------------------------------------


def medians(steps: list[Step], device: str, rounds: int) -> list[float]:
    """Milliseconds of each step, run in turn."""
    times: list[list[float]] = [[] for _ in steps]
    for i in range(WARM_UP + rounds):
        for step, kept in zip(steps, times):
            synchronize(device)
            begin = time.perf_counter()
            step()
            synchronize(device)
            if i >= WARM_UP:
                kept.append(1e3 * (time.perf_counter() - begin))
    return [statistics.median(kept) for kept in times]


def count_kernels(step: Step, device: str) -> int:
    """Kernels of one step, copies and fills among them; on a CPU, calls of ops."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    cuda = device == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as profiler:
        step()
        synchronize(device)
    kind = DeviceType.CUDA if cuda else DeviceType.CPU
    events = (e for e in profiler.events() if not getattr(e, "is_user_annotation", False))
    return sum(event.device_type == kind for event in events)


def peak_memory(side: Side, device: str) -> float | None:
    """GB that a step takes beyond what is there before it; None on a CPU."""
    side.x.grad = None
    side.model.zero_grad(set_to_none=True)
    if device == "cpu":
        return None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    side.step()
    synchronize(device)
    return (torch.cuda.max_memory_allocated() - before) / 1e9


# --- the table -----------------------------------------------------------------------------


def measure(device: str, dry: bool) -> tuple[list[dict[str, object]], list[str]]:
    """The rows of the table, and what is wrong."""
    size = DRY if dry else FULL
    model = make_model(size, device)
    exact = exact_step(model, size, device)
    eager = errors(Side(model, model, size, device), *exact)
    sides = {
        name: compiled_side(model, backend, size, device) for name, backend in backends(dry).items()
    }
    found, counts, failures = first_steps(sides, exact)
    failures += too_far(found, eager)
    ms = medians([sides[name].step for name in found], device, 2 if dry else ROUNDS)
    rows = [row("eager", eager)]
    for (name, one), time_ in zip(found.items(), ms):
        costs = {
            "ms a step": time_,
            "kernels": count_kernels(sides[name].step, device),
            "peak GB": peak_memory(sides[name], device),
        }
        rows.append(row(name, one) | costs | {"fused": counts[name]})
    return rows, failures


def first_steps(
    sides: dict[str, Side], exact: tuple[Tensor, list[Tensor]]
) -> tuple[dict[str, Errors], dict[str, str], list[str]]:
    """Errors and what was fused, of each side that works, and what is wrong with the others."""
    found, counts, failures = {}, {}, []
    for name, side in sides.items():
        with fxfuse.record() as reports:
            try:
                found[name] = errors(side, *exact)
            except Exception as error:
                text = str(error).partition("\n")[0]
                failures.append(f"block, {name}: {type(error).__name__}: {text}")
        sites = sum((Counter(report.counts) for report in reports), Counter())
        counts[name] = ", ".join(f"{n} {pattern}" for pattern, n in sorted(sites.items()))
        if name.startswith("fxfuse") and not sites["add_rms_norm"]:
            failures.append(f"block, {name}: no add_rms_norm was fused")
    return found, counts, failures


def too_far(found: dict[str, Errors], eager: Errors) -> Iterator[str]:
    most = FACTOR * max(one.gradient for one in (eager, found.get("torch.compile", eager)))
    for name, one in found.items():
        if not one.loss <= LOSS:
            yield f"block, {name}: the loss is {one.loss:.1e} from fp32, allowed are {LOSS:.1e}"
        if not one.gradient <= most:
            yield f"block, {name}: a gradient is {one.gradient:.1e} from fp32, allowed {most:.1e}"


def row(name: str, found: Errors) -> dict[str, object]:
    return {
        "": name,
        "loss from fp32": f"{found.loss:.1e}",
        "farthest gradient": f"{found.gradient:.2e}",
    }
