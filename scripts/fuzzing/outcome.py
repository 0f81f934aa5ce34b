"""What a program does in one run: results, gradients, what it wrote, how its tensors lie."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from scripts.fuzzing.builder import entered
from scripts.fuzzing.program import Program, arguments


@dataclass
class Outcome:
    """One run of a program.

    stage: "forward" or "backward", whichever raised `error`, or "". gradients: by the name of the
    input, None where there is none. written: all inputs as they are afterwards.
    """

    stage: str = ""
    error: str = ""
    outputs: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    written: dict[str, Tensor] = field(default_factory=dict)
    facts: dict[str, object] = field(default_factory=dict)


def run(program: Program, call: Callable, seed: int, dtype: torch.dtype | None = None) -> Outcome:
    """Run `call`, which computes the program, on the inputs of a seed. dtype: see `arguments`."""
    given = arguments(program, seed, dtype)
    found = Outcome()
    try:
        with entered(program.mode):
            results = call(*given)
    except Exception as error:
        return Outcome("forward", _said(error))
    results = results if isinstance(results, (tuple, list)) else (results,)
    tensors = [t for t in results if isinstance(t, Tensor)]
    names = (f"output {i} ({name})" for i, name in enumerate(program.returns))
    found.outputs = dict(zip(names, tensors))
    found.facts = _facts(program, given, found.outputs)
    found.written = {i.name: t.detach().clone() for i, t in zip(program.inputs, given)}
    kept = {name: t.detach().clone() for name, t in found.outputs.items()}
    if program.mode == "train":
        _differentiate(program, given, found, seed)
        found.facts |= {f"{n}: can be written": _takes_writes(t) for n, t in found.outputs.items()}
    found.outputs = kept
    return found


def _differentiate(program: Program, given: list[Tensor], found: Outcome, seed: int) -> None:
    leaves = {i.name: t for i, t in zip(program.inputs, given) if i.grad and t.requires_grad}
    results = [t for t in found.outputs.values() if t.requires_grad]
    if not leaves or not results:
        return
    generator = torch.Generator().manual_seed(seed + 1)
    # Drawn for all results, so that one that lost its gradient does not change the others'.
    drawn = {
        n: torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t.dtype)
        for n, t in found.outputs.items() if t.is_floating_point()
    }  # fmt: skip
    dys = [drawn[n] for n, t in found.outputs.items() if t.requires_grad]
    try:
        grads = torch.autograd.grad(results, list(leaves.values()), dys, allow_unused=True)
    except Exception as error:
        found.stage, found.error = "backward", _said(error)
    else:
        found.gradients = dict(zip(leaves, grads))


def _facts(program: Program, given: list[Tensor], outputs: dict[str, Tensor]) -> dict[str, object]:
    """What a caller can see of the results beside their numbers."""
    known = {i.name: t for i, t in zip(program.inputs, given)}
    found: dict[str, object] = {}
    for name, t in outputs.items():
        found[f"{name}: dtype"] = t.dtype
        found[f"{name}: shape"] = tuple(t.shape)
        found[f"{name}: requires_grad"] = t.requires_grad
        found[f"{name}: strides"] = _strides(t)
        found[f"{name}: memory shared"] = sorted(n for n, o in known.items() if _shares(t, o))
        found[f"{name}: identity"] = sorted(n for n, o in known.items() if t is o)
        known[name] = t
    return found


def _strides(t: Tensor) -> tuple:
    """Of the dimensions whose stride says something."""
    return tuple(s if n > 1 and t.numel() else None for n, s in zip(t.shape, t.stride()))


def _takes_writes(t: Tensor) -> bool:
    """Whether autograd lets the caller write to a result."""
    try:
        t.zero_()
    except RuntimeError:
        return False
    return True


def _shares(one: Tensor, other: Tensor) -> bool:
    memory = one.untyped_storage().data_ptr()
    return memory != 0 and memory == other.untyped_storage().data_ptr()


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"
