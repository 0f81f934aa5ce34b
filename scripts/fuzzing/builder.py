"""Writes a program line by line, running each line, so that shapes and dtypes are facts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from scripts.fuzzing.program import Input, Program, arguments


def entered(mode: str) -> object:
    """The context around a program that is run in one of its modes."""
    contexts = {
        "train": nullcontext, "no_grad": torch.no_grad, "inference": torch.inference_mode,
        "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    }  # fmt: skip
    return contexts[mode]()


class Rejected(Exception):
    """A line that eager PyTorch does not run."""


@dataclass
class Builder:
    """A program that grows.

    odd: how often a choice takes one of the ways that no pattern should take for its own.
    """

    random: random.Random
    mode: str = "train"
    odd: float = 0.04
    inputs: list[Input] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    values: dict[str, Tensor] = field(default_factory=dict)

    # ---- choices --------------------------------------------------------------------------------

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def pick(self, usual: Sequence, odd: Sequence = ()) -> object:
        """One of the usual ways, rarely one of the odd ones."""
        return self.random.choice(odd if odd and self.chance(self.odd) else usual)

    # ---- lines ----------------------------------------------------------------------------------

    def input(self, stem: str, shape: Sequence[int], dtype: torch.dtype, **flags: object) -> str:
        name = f"{stem}{sum(i.name.startswith(stem) for i in self.inputs) or ''}"
        self.inputs.append(Input(name, tuple(shape), dtype, **flags))
        program = Program(tuple(self.inputs), (), ())
        # Drawn anew: an input that is another's alias needs that one.
        given = arguments(program, seed=0)[-1]
        _, _, other = self.inputs[-1].layout.partition(":")
        with entered(self.mode):
            self.values[name] = self.values[other] if other else given
        return name

    def let(self, expression: str) -> str:
        """Name the value of an expression; raises Rejected where eager PyTorch does."""
        name = f"v{len(self.lines)}"
        self.do(f"{name} = {expression}")
        return name

    def do(self, line: str) -> None:
        """Add a statement; raises Rejected where eager PyTorch does."""
        names = {"torch": torch, "F": F, **self.values}
        try:
            with entered(self.mode):
                exec(line, names)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            raise Rejected(str(error)) from error
        self.lines.append(line)
        self.values |= {k: v for k, v in names.items() if isinstance(v, Tensor)}

    def attempt(self, piece, *operands: object) -> str | None:
        """The result of a piece, or None, and nothing added, where eager PyTorch refuses it."""
        inputs, lines, values = len(self.inputs), len(self.lines), dict(self.values)
        try:
            return piece(self, *operands)
        except Rejected:
            del self.inputs[inputs:], self.lines[lines:]
            self.values = values
            return None

    # ---- what there is --------------------------------------------------------------------------

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.values[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return self.values[name].dtype

    def width(self, name: str) -> int:
        return self.shape(name)[-1] if self.shape(name) else 1

    def like(self, name: str) -> list[str]:
        """All values of the shape of one, the latest last."""
        return [n for n, v in self.values.items() if v.shape == self.values[name].shape]

    def floats(self, dim: int = 1) -> list[str]:
        """All floating-point values of at least so many dimensions, the latest last."""
        return [
            n for n, v in self.values.items() if v.is_floating_point() and v.dim() >= dim
        ]  # fmt: skip
