"""A random program for a seed: the same one every time."""

from __future__ import annotations

import random
import re

import torch

from scripts.fuzzing.builder import Builder, entered
from scripts.fuzzing.pieces import PIECES, tensor
from scripts.fuzzing.program import MODES, Program, arguments

SHAPES = ((2, 5), (3, 4), (4, 3), (7,), (1, 6), (2, 2, 3), (12,), (2, 1), (1, 1), (0, 3))
WIDTHS = (8, 16, 16, 32, 48, 6, 2, 1)
# Rarely is a program that eager PyTorch refuses kept: the fused one has to refuse it too.
REFUSED = 0.1


def generate(seed: int) -> Program:
    """The program of a seed."""
    choices = random.Random(seed)
    mode = choices.choices(MODES, (16, 2, 1.5, 0.5))[0]
    odd = choices.choice((0.0, 0.02, 0.05, 0.15))
    b = Builder(choices, mode, odd)
    dtype = choices.choices(
        (torch.float32, torch.bfloat16, torch.float16, torch.float64), (8, 6, 3, 2)
    )[0]
    rows = choices.choices(SHAPES, (6, 6, 4, 2, 2, 2, 2, 1, 0.5, 0.3))[0]
    shape = (*rows, choices.choices(WIDTHS, (5, 5, 3, 3, 2, 2, 0.5, 0.5))[0])
    x = tensor(b, "x", shape, dtype)
    if b.chance(0.6):
        x = b.let(choices.choice((f"{x} * 1.5", f"torch.sin({x})", f"{x}.clone()")))
    for _ in range(choices.choice((1, 2, 2, 3, 3, 4, 6, 9))):
        (piece,) = choices.choices(list(PIECES), PIECES.values())
        x = b.attempt(piece, x) or x
    program = Program(tuple(b.inputs), tuple(b.lines), _results(b, x), mode)
    return _tidy(_in_regions(program, choices))


def _results(b: Builder, last: str) -> tuple[str, ...]:
    """What the program returns: the last value, others, views of them."""
    unread = [n for n in b.values if n.startswith("v") and not _is_read(n, b.lines)]
    others = [n for n in (*unread, *b.values) if n not in (last, "torch", "F")]
    found = [last]
    for name in others:
        if b.chance(0.6 if name in unread else 0.06):
            found.append(name)
    if b.chance(0.08):
        found.append(b.pick([f"{last}.view(-1)", f"{last}[..., :1]", last, f"{last}.detach()"]))
    b.random.shuffle(found)
    return tuple(found[:6])


def _is_read(name: str, lines: list[str]) -> bool:
    return sum(len(re.findall(rf"\b{name}\b", line)) for line in lines) > 1


def _in_regions(program: Program, choices: random.Random) -> Program:
    """Put a run of lines into a region of another grad mode or autocast, in few programs."""
    if choices.random() > 0.12 or not program.body:
        return program
    begin = choices.randrange(len(program.body))
    end = begin + choices.choice((1, 2, 3, 5, 8))
    kind = choices.choice((
        "torch.no_grad()", "torch.enable_grad()", 'torch.autocast("cpu", dtype=torch.bfloat16)',
        'torch.autocast("cpu", enabled=False)', "torch.set_grad_enabled(False)",
    ))  # fmt: skip
    inside = "\n".join(f"    {line}" for line in program.body[begin:end])
    body = (*program.body[:begin], f"with {kind}:\n{inside}", *program.body[end:])
    found = Program(program.inputs, body, program.returns, program.mode)
    return found if choices.random() < REFUSED or runs(found) else program


def runs(program: Program) -> bool:
    """Whether eager PyTorch runs the forward of a program."""
    try:
        with entered(program.mode):
            program.function()(*arguments(program, 0))
    except Exception:
        return False
    return True


def _tidy(program: Program) -> Program:
    """Leave out inputs that nothing reads."""
    text = "\n".join((*program.body, *program.returns))
    layouts = {i.layout.partition(":")[2] for i in program.inputs}
    used = tuple(
        i for i in program.inputs if re.search(rf"\b{i.name}\b", text) or i.name in layouts
    )
    return Program(used, program.body, program.returns, program.mode)
