"""Check fxfuse's RMSNorm ops on a GPU: numbers against fp64, repeatability, and bandwidth.

    python scripts/gpu_check.py                                    checks and timings
    python scripts/gpu_check.py --output scripts/results/NAME.md   the same, kept as Markdown
    python scripts/gpu_check.py --dry-run                          tiny, on the CPU, no kernels

Exit code 1 when a check fails.
"""

import argparse
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tabulate import tabulate
from torch import Tensor

import fxfuse.kernels.ops  # noqa: F401 (defines the ops)

EPS = 1e-6
ROWS = (1, 3, 257, 4096)
WIDTHS = {
    torch.bfloat16: (64, 96, 128, 512, 1000, 1024, 2880, 4096, 5120, 8192, 16384),
    torch.float16: (96, 4096),
    torch.float32: (128, 1000, 4096, 16384),
}
TIMED_WIDTHS = (128, 1024, 2048, 4096, 5120, 8192, 16384)
TIMED_ELEMENTS = 1 << 26

# The relative RMS error against fp64 may be this many times eager's, or so many fp32 steps.
FACTOR = 1.1
FACTOR_FP32_DWEIGHT = 2.0
FP32_STEPS = 4


def fused(x: Tensor, residual: Tensor | None, weight: Tensor) -> tuple[Tensor, ...]:
    """y, or y and h, from fxfuse's ops; x and residual [M, N], weight [N]."""
    if residual is None:
        return (torch.ops.fxfuse.rms_norm(x, weight, eps=EPS, out_dtype="input"),)
    return torch.ops.fxfuse.add_rms_norm(x, residual, weight, eps=EPS, out_dtype="input")


def eager(x: Tensor, residual: Tensor | None, weight: Tensor) -> tuple[Tensor, ...]:
    """The same from PyTorch's functions."""
    h = x if residual is None else x + residual
    y = torch.nn.functional.rms_norm(h, h.shape[-1:], weight, EPS)
    return (y,) if residual is None else (y, h)


# --- correctness ---------------------------------------------------------------------------


@dataclass
class Inputs:
    """x, residual or None, dy, dres or None: [M, N]; weight: [N]; all of one dtype."""

    x: Tensor
    residual: Tensor | None
    weight: Tensor
    dy: Tensor
    dres: Tensor | None

    @classmethod
    def random(cls, M: int, N: int, dtype: torch.dtype, device: str, with_residual: bool):
        generator = torch.Generator(device).manual_seed(M * 100003 + N)

        def normal(*shape):
            return torch.randn(*shape, generator=generator, device=device).to(dtype)

        x, dy, weight = normal(M, N), normal(M, N), normal(N)
        more = (normal(M, N), normal(M, N)) if with_residual else (None, None)
        return cls(x, more[0], weight, dy, more[1])

    def leaves(self) -> list[Tensor]:
        return [t for t in (self.x, self.residual, self.weight) if t is not None]

    def gradients(self) -> list[Tensor]:
        return [t for t in (self.dy, self.dres) if t is not None]


def run(compute: Callable, inputs: Inputs) -> dict[str, Tensor]:
    """Outputs and gradients by name."""
    leaves = [leaf.detach().requires_grad_() for leaf in inputs.leaves()]
    x, *middle, weight = leaves
    outputs = compute(x, middle[0] if middle else None, weight)
    gradients = torch.autograd.grad(outputs, leaves, inputs.gradients())
    found = dict(zip(("y", "h"), (output.detach() for output in outputs)))
    return found | {"dx": gradients[0], "dweight": gradients[-1]}


def exact(inputs: Inputs) -> dict[str, Tensor]:
    """The same in fp64; only the sum h is rounded, as the graph says."""
    h = inputs.x if inputs.residual is None else inputs.x + inputs.residual
    leaf = h.double().requires_grad_()
    weight = inputs.weight.double().requires_grad_()
    y = leaf * torch.rsqrt(leaf.square().mean(-1, keepdim=True) + EPS) * weight
    dh, dweight = torch.autograd.grad(y, (leaf, weight), inputs.dy.double())
    if inputs.dres is not None:
        dh = dh + inputs.dres.double()
    found = {"y": y.detach(), "dx": dh, "dweight": dweight}
    return found if inputs.residual is None else found | {"h": h.double()}


def distance(found: Tensor, reference: Tensor) -> float:
    """Relative RMS error."""
    scale = reference.square().mean().sqrt().clamp_min(torch.finfo(torch.float64).tiny)
    return ((found.double() - reference).square().mean().sqrt() / scale).item()


def failures_of(inputs: Inputs) -> Iterator[str]:
    found, again, plain = run(fused, inputs), run(fused, inputs), run(eager, inputs)
    for name, reference in exact(inputs).items():
        if found[name].dtype != plain[name].dtype:
            yield f"{name} is {found[name].dtype}, eager's is {plain[name].dtype}"
        if not torch.equal(found[name], again[name]):
            yield f"{name} differs between two runs"
        error, allowed = distance(found[name], reference), distance(plain[name], reference)
        allowed *= FACTOR
        if inputs.x.dtype == torch.float32:
            allowed *= FACTOR_FP32_DWEIGHT / FACTOR if name == "dweight" else 1.0
            allowed = max(allowed, FP32_STEPS * torch.finfo(torch.float32).eps)
        if not error <= allowed:
            yield f"{name} is {error:.3e} from fp64, allowed are {allowed:.3e}"


def check(device: str, dry: bool) -> tuple[int, list[str]]:
    """The number of checked cases, and what was wrong with them."""
    count, failures = 0, []
    for dtype, widths in WIDTHS.items():
        for N in widths[:3] if dry else widths:
            for M in ROWS[:3] if dry else ROWS:
                for with_residual in (False, True):
                    inputs = Inputs.random(M, N, dtype, device, with_residual)
                    op = "add_rms_norm" if with_residual else "rms_norm"
                    label = f"{op} {M}x{N} {str(dtype).removeprefix('torch.')}"
                    failures += [f"{label}: {text}" for text in failures_of(inputs)]
                    count += 1
    return count, failures


# --- bandwidth -----------------------------------------------------------------------------


def milliseconds(call: Callable[[], object], device: str) -> float:
    """The median time of a call."""
    if device == "cpu":
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e3
    from triton.testing import do_bench

    return do_bench(call, warmup=25, rep=100, return_mode="median")


def measure(compute: Callable, inputs: Inputs, device: str) -> tuple[float, float]:
    """GB/s of the forward and of the backward with a residual gradient, autograd included.

    The bytes are the least that must move: four tensors [M, N] each way.
    """
    smallest = 4 * inputs.x.numel() * inputs.x.element_size() / 1e6
    leaves = [leaf.detach().requires_grad_() for leaf in inputs.leaves()]
    outputs = compute(*leaves)

    def backward():
        return torch.autograd.grad(outputs, leaves, inputs.gradients(), retain_graph=True)

    return (
        smallest / milliseconds(lambda: compute(*leaves), device),
        smallest / milliseconds(backward, device),
    )


def bandwidths(device: str, dry: bool) -> list[dict[str, object]]:
    rows = []
    for N in TIMED_WIDTHS[:1] if dry else TIMED_WIDTHS:
        M = 8 if dry else TIMED_ELEMENTS // N
        inputs = Inputs.random(M, N, torch.bfloat16, device, with_residual=True)
        torch.compiler.reset()
        providers = {"fxfuse": fused, "eager": eager}
        if not dry:
            providers["compile"] = torch.compile(eager, dynamic=False)
        row: dict[str, object] = {"rows": M, "columns": N}
        for name, compute in providers.items():
            row[f"{name} forward"], row[f"{name} backward"] = measure(compute, inputs, device)
        rows.append(dict(sorted(row.items(), key=order)))
    return rows


def order(item: tuple[str, object]) -> int:
    """Sizes, then all forwards, then all backwards; stable within."""
    name = item[0]
    return 1 if name.endswith("forward") else 2 if name.endswith("backward") else 0


# --- report --------------------------------------------------------------------------------


def describe(device: str) -> str:
    import triton

    name = torch.cuda.get_device_name() if device == "cuda" else f"CPU ({platform.machine()})"
    return f"{name}, PyTorch {torch.__version__}, Triton {triton.__version__}"


def report(device: str, dry: bool) -> tuple[str, bool]:
    """The report as Markdown, and whether all checks passed."""
    started = time.perf_counter()
    count, failures = check(device, dry)
    rows = bandwidths(device, dry)
    parts = ["# RMSNorm on " + describe(device)]
    if dry:
        parts.append(
            "Dry run: tiny sizes on the CPU, where the ops take their CPU path. "
            "No kernel ran and no figure below says anything about one."
        )
    parts.append(f"Correctness: {count - len({f.split(':')[0] for f in failures})} of {count}.")
    parts += [f"* {failure}" for failure in failures]
    parts.append("add + norm in bf16, GB/s by the fewest bytes that must move; medians:")
    parts.append(tabulate(rows, headers="keys", tablefmt="github", floatfmt=".0f"))
    parts.append(f"{time.perf_counter() - started:.0f} seconds.")
    return "\n\n".join(parts) + "\n", not failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument("--output", type=Path, help="also write the report to this file")
    options = parser.parse_args()
    if not options.dry_run and not torch.cuda.is_available():
        print("There is no GPU here; --dry-run runs the script on the CPU.", file=sys.stderr)
        return 2
    text, passed = report("cpu" if options.dry_run else "cuda", options.dry_run)
    print(text)
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(text)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
