"""What fxfuse finds in two published models, and a small one trained with it and without.

Four parts: a Llama and a Qwen3 of 8 billion parameters inspected on the meta device; a small
Llama compiled by Inductor with and without fxfuse and trained for 20 steps from the same weights;
what was fused there before autograd and after it, by either policy; the time of one residual add +
RMSNorm, forward and backward. Exits with 1 if the losses differ.
"""

from __future__ import annotations

import copy
import statistics
import sys
import time
from collections.abc import Callable

import torch

import fxfuse
from fxfuse import cli, listing

LLAMA_8B = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "dtype": "bfloat16",
}  # fmt: skip
QWEN3_8B = {
    "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    "dtype": "bfloat16",
}  # fmt: skip
# What the patterns of the backward do; of the others it is said where they are kernels.
BACKWARD = {
    "backward_add_rms_norm": "the norm's backward also adds the gradient of the residual stream",
    "backward_sum_rms_norm": "the norm's backward also adds the gradients of its readers",
}
STEPS, TOLERANCE = 20, 1e-4
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def main() -> int:
    """Run the four parts; returns the exit code."""
    sys.stdout.reconfigure(line_buffering=True)
    inspect_published()
    agree = train_both()
    time_sites()
    return 0 if agree else 1


def inspect_published() -> None:
    for name, config in (("llama", LLAMA_8B), ("qwen3", QWEN3_8B)):
        settings = [f"{key}={value}" for key, value in config.items()]
        print(f"$ fxfuse inspect hf:{name} {' '.join(f'--set {s}' for s in settings)}")
        begin = time.perf_counter()
        report = cli.look(f"hf:{name}", settings=settings)
        seconds = time.perf_counter() - begin
        print(f"{listing.misses(report, why=False)}\n{listing.totals(report)}  ({seconds:.1f} s)\n")


def train_both() -> bool:
    """Train with plain Inductor and with fxfuse; True if every loss agrees."""
    model = small_llama()
    print(f"a Llama of 4 layers in fp32 on {DEVICE}, {STEPS} steps of AdamW, compiled")
    plain = train(model, backend="inductor")
    with fxfuse.record() as reports:
        fused = train(model, backend=fxfuse.backend)
    print(f"\n{'step':>4}  {'Inductor':>10}  {'fxfuse':>10}  relative difference")
    apart = [abs(a - b) / abs(a) for a, b in zip(plain, fused)]
    for step, row in enumerate(zip(plain, fused, apart), 1):
        print("{:4}  {:10.6f}  {:10.6f}  {:.1e}".format(step, *row))
    agree = max(apart) <= TOLERANCE
    print(f"largest difference {max(apart):.1e}: {'within' if agree else 'ABOVE'} {TOLERANCE:g}\n")
    show_stages("policy auto, under Inductor", reports)
    with fxfuse.record() as reports:
        train(model, fxfuse.make_backend("aot_eager", policy="always"), steps=1)
    show_stages("policy always, one step without Inductor", reports)
    return agree


def show_stages(how: str, reports: list[fxfuse.Report]) -> None:
    """One line for each kind of site: a graph is fused before autograd, and its backward after."""
    total = fxfuse.Report.merge(reports)
    print(f"fused: {how}")
    for pattern, count in sorted(total.counts.items(), key=lambda one: one[0] in BACKWARD):
        sides = {m.policy.partition(":")[0] for m in total.matches if m.pattern == pattern}
        does = BACKWARD.get(pattern, " or ".join(sorted(sides)))
        print(f"{count:4}  {pattern:24}{does}")
    if DEVICE == "cpu" and "backward_sum_rms_norm" not in total.counts:
        print("      inline, the compiler adds all other gradients itself")
    print()


def small_llama() -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256, intermediate_size=688, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, vocab_size=1024, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(DEVICE)


def train(model: torch.nn.Module, backend: object, steps: int = STEPS) -> list[float]:
    """The losses of a copy of `model`, trained on the same few batches of random tokens."""
    model = copy.deepcopy(model)
    step = torch.compile(model, backend=backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(1024, (4, 4, 128), generator=torch.Generator().manual_seed(1))
    losses = []
    for i in range(steps):
        batch = tokens[i % len(tokens)].to(DEVICE)
        loss = step(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


class AddNorm(torch.nn.Module):
    """The norm site of a Llama layer: a residual add, and the norm of its sum."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(width, dtype=dtype))

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = x + residual
        wide = h.float()
        unit = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * unit.to(h.dtype), h


def time_sites() -> None:
    rows, width = (16384, 4096) if DEVICE == "cuda" else (2048, 2048)
    print(f"add + norm, forward and backward, {rows} x {width}, median of alternating runs in ms")
    print("(fxfuse: a graph from fxfuse.apply, run by itself)")
    print(f"{'':10}{'eager':>10}{'Inductor':>10}{'fxfuse':>10}{'fxfuse under Inductor':>24}")
    for dtype in (torch.float32, torch.bfloat16):
        model = AddNorm(width, dtype).to(DEVICE)
        ways = (
            model,
            torch.compile(copy.deepcopy(model)),
            fxfuse.apply(torch.fx.symbolic_trace(copy.deepcopy(model))),
            torch.compile(copy.deepcopy(model), backend=fxfuse.backend),
        )
        times = medians([training_step(way, rows, width, dtype) for way in ways])
        name = str(dtype).removeprefix("torch.")
        print("{:10}{:10.2f}{:10.2f}{:10.2f}{:24.2f}".format(name, *times))


def training_step(model: Callable, rows: int, width: int, dtype: torch.dtype) -> Callable:
    """A function that runs the site once, forward and backward."""
    torch.manual_seed(0)
    x, residual, dy, dh = torch.randn(4, rows, width, device=DEVICE).to(dtype).unbind()
    x.requires_grad_(), residual.requires_grad_()

    def step() -> None:
        torch.autograd.backward(model(x, residual), (dy, dh))
        x.grad = residual.grad = None
        if DEVICE == "cuda":
            torch.cuda.synchronize()

    return step


def medians(steps: list[Callable], rounds: int = 21) -> list[float]:
    """Milliseconds of each step. The first runs compile and are not counted."""
    times = [[] for _ in steps]
    for i in range(rounds + 3):
        for step, kept in zip(steps, times):
            begin = time.perf_counter()
            step()
            if i >= 3:
                kept.append(1e3 * (time.perf_counter() - begin))
    return [statistics.median(kept) for kept in times]


if __name__ == "__main__":
    sys.exit(main())
