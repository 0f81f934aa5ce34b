"""Makes a program that fails smaller: fewer lines, simpler expressions, plainer inputs.

It works on the source, piece by piece, and knows no norm: a line goes, an expression gives way to a
part of itself, a region to what is in it. What is no program any more fails in another way, and so
is not kept.
"""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Iterator
from dataclasses import replace

import torch

from scripts.fuzzing.check import Failure, check
from scripts.fuzzing.program import Input, Program


def shrink(failure: Failure, trials: int = 400) -> Failure:
    """The smallest program found that fails along the same route, in one of the same ways.

    trials: how many programs to run at most.
    """
    left = [trials]

    def fails(program: Program) -> Failure | None:
        left[0] -= 1
        found = check(program, [failure.route]).failures
        return found[0] if found and found[0].kinds & failure.kinds else None

    def better(smallest: Failure) -> Failure | None:
        seen = set()
        for smaller in _smaller(smallest.program):
            if left[0] <= 0:
                return None
            if smaller.source in seen or not _is_whole(smaller):
                continue
            seen.add(smaller.source)
            found = fails(smaller)
            if found:
                return found
        return None

    smallest = failure
    while (found := better(smallest)) is not None:
        smallest = found
    return smallest


def _is_whole(program: Program) -> bool:
    """Whether every name is bound before it is read, so that it can be a program at all."""
    known = {"torch", "F", "range"} | {i.name for i in program.inputs}
    names = {i.name for i in program.inputs}
    if any(":" in i.layout and i.layout.partition(":")[2] not in names for i in program.inputs):
        return False
    tree = ast.parse("\n".join((*program.body, f"({', '.join(program.returns)},)")))
    names = [n for n in ast.walk(tree) if isinstance(n, ast.Name)]
    bound = known | {n.id for n in names if isinstance(n.ctx, ast.Store)}
    return all(n.id in bound for n in names)


def _smaller(program: Program) -> Iterator[Program]:
    """Simpler programs, those that leave out most first."""
    yield from _shorter(program)
    yield from _fewer_results(program)
    yield from _without_lines(program)
    yield from _fewer_inputs(program)
    yield from _plainer_inputs(program)
    yield from _simpler_lines(program)
    if program.mode != "train":
        yield replace(program, mode="train")


def _shorter(program: Program) -> Iterator[Program]:
    """Only the first lines, or only the last ones on an input in the place of a value."""
    body = program.body
    for end in (len(body) // 2, len(body) * 3 // 4):
        kept = body[:end]
        value = _assigned(kept[-1]) if kept else None
        if value:
            yield _used(replace(program, body=kept, returns=(value,)))


def _fewer_results(program: Program) -> Iterator[Program]:
    for i in range(len(program.returns) if len(program.returns) > 1 else 0):
        yield replace(program, returns=program.returns[:i] + program.returns[i + 1 :])


def _without_lines(program: Program) -> Iterator[Program]:
    """Leave a line out; who read its value reads a value that it read."""
    for i in reversed(range(len(program.body))):
        line, rest = program.body[i], (program.body[:i], program.body[i + 1 :])
        if line.startswith("with "):
            yield replace(program, body=(*rest[0], *_inside(line), *rest[1]))
        value = _assigned(line)
        if value is None:
            yield _used(replace(program, body=rest[0] + rest[1]))
            continue
        for other in _read(line) or [i.name for i in program.inputs][:1]:
            after = tuple(_renamed(text, value, other) for text in rest[1])
            returns = tuple(_renamed(text, value, other) for text in program.returns)
            yield _used(replace(program, body=rest[0] + after, returns=returns))


def _fewer_inputs(program: Program) -> Iterator[Program]:
    """One input in the place of another of the same shape."""
    for one in program.inputs:
        for other in program.inputs:
            if other is not one and other.shape == one.shape:
                body = tuple(_renamed(text, one.name, other.name) for text in program.body)
                returns = tuple(_renamed(t, one.name, other.name) for t in program.returns)
                yield _used(replace(program, body=body, returns=returns))
                break


def _plainer_inputs(program: Program) -> Iterator[Program]:
    def with_input(i: int, one: Input) -> Program:
        return replace(program, inputs=(*program.inputs[:i], one, *program.inputs[i + 1 :]))

    for i, one in enumerate(program.inputs):
        if one.layout != "contiguous":
            yield with_input(i, replace(one, layout="contiguous"))
        if one.small:
            yield with_input(i, replace(one, small=False))
        if one.grad:
            yield with_input(i, replace(one, grad=False))
        if one.parameter:
            yield with_input(i, replace(one, parameter=False))
        if one.dtype != torch.float32:
            yield with_input(i, replace(one, dtype=torch.float32))
    dtypes = {i.dtype for i in program.inputs}
    if dtypes != {torch.float32}:
        inputs = tuple(replace(i, dtype=torch.float32) for i in program.inputs)
        yield replace(program, inputs=inputs)


def _simpler_lines(program: Program) -> Iterator[Program]:
    """A part of an expression in the place of the whole."""
    for i in reversed(range(len(program.body))):
        for line in _simpler(program.body[i]):
            yield _used(replace(program, body=(*program.body[:i], line, *program.body[i + 1 :])))
    for i, result in enumerate(program.returns):
        for simpler in _simpler(result):
            yield replace(
                program, returns=(*program.returns[:i], simpler, *program.returns[i + 1 :])
            )


def _simpler(line: str) -> Iterator[str]:
    tree = ast.parse(line)
    count = sum(isinstance(n, ast.expr) for n in ast.walk(tree))
    for index in range(count):
        for part in range(3):
            found = _replaced(tree, index, part)
            if found and found != ast.unparse(tree):
                yield found


def _replaced(tree: ast.Module, index: int, part: int) -> str | None:
    """The line where its expression of this index is one of its own parts."""
    tree = copy.deepcopy(tree)
    nodes = [n for n in ast.walk(tree) if isinstance(n, ast.expr)]
    parts = _parts(nodes[index])
    if part >= len(parts):
        return None
    for parent in ast.walk(tree):
        for field, value in ast.iter_fields(parent):
            if value is nodes[index]:
                setattr(parent, field, parts[part])
                return ast.unparse(tree)
            if isinstance(value, list) and nodes[index] in value:
                value[value.index(nodes[index])] = parts[part]
                return ast.unparse(tree)
    return None


def _parts(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BinOp):
        return [node.left, node.right]
    if isinstance(node, ast.UnaryOp):
        return [node.operand]
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
        return [node.value]
    if isinstance(node, ast.Call):
        method = isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value)
        own = [] if not method or method in ("torch", "F", "torch.linalg") else [node.func.value]
        return own + [a for a in node.args if not isinstance(a, ast.Constant)]
    return []


# ---- lines as text ------------------------------------------------------------------------------


def _assigned(line: str) -> str | None:
    match = re.match(r"(v\d+) = ", line)
    return match.group(1) if match else None


def _read(line: str) -> list[str]:
    """The values that a line reads."""
    names = [n.id for n in ast.walk(ast.parse(line)) if isinstance(n, ast.Name)]
    return [n for n in dict.fromkeys(names) if n not in (_assigned(line), "torch", "F", "range")]


def _renamed(text: str, name: str, other: str) -> str:
    return re.sub(rf"\b{name}\b", other, text)


def _inside(region: str) -> tuple[str, ...]:
    return tuple(map(ast.unparse, ast.parse(region).body[0].body))


def _used(program: Program) -> Program:
    """Without the inputs that nothing reads."""
    text = "\n".join((*program.body, *program.returns))
    aliased = {i.layout.partition(":")[2] for i in program.inputs}
    kept = tuple(
        i for i in program.inputs if re.search(rf"\b{i.name}\b", text) or i.name in aliased
    )
    return replace(program, inputs=kept)
