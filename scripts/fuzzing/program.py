"""A random model as data: a function of tensors that is printed, and read back, as plain Python.

Its annotations say what it is called with, so that the text alone is the whole counterexample:

    def f(x: "2x5x16 float32 grad", w1: "16 bfloat16 parameter grad") -> "train":
        h = x * 2
        return h * w1
"""

from __future__ import annotations

import ast
import functools
import linecache
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# How a program is run: what the caller has entered around it. Only "train" has gradients.
MODES = ("train", "no_grad", "autocast", "inference")

_NARROW = ("float16", "bfloat16", "float32", "half")
_CASTS = ("float", "half", "bfloat16")


@dataclass(frozen=True)
class Input:
    """One argument of a program.

    layout: "contiguous", "transposed" (of its first two dimensions), "sliced" (every second column
    of a wider tensor), "padded" (the first columns of a wider one), "expanded" (one row for all),
    "same:NAME" (the very tensor given as NAME) or "alias:NAME" (a view of the same memory).
    small: some of its rows are tiny, so that eps decides what they become.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    grad: bool = False
    layout: str = "contiguous"
    parameter: bool = False
    small: bool = False

    def __str__(self) -> str:
        words = ["x".join(map(str, self.shape)), str(self.dtype).removeprefix("torch.")]
        flags = (("parameter", self.parameter), ("grad", self.grad), ("small", self.small))
        words += [word for word, is_set in flags if is_set]
        return " ".join(words + [self.layout] * (self.layout != "contiguous"))

    @classmethod
    def parse(cls, name: str, text: str) -> Input:
        shape, dtype, *words = text.split()
        flags = {"parameter", "grad", "small"}
        layout = next((word for word in words if word not in flags), "contiguous")
        return cls(
            name, tuple(map(int, shape.split("x"))), getattr(torch, dtype),
            layout=layout, **{word: True for word in words if word in flags},
        )  # fmt: skip


@dataclass(frozen=True)
class Program:
    """A function of tensors: lines of Python, indented as in the body of a function."""

    inputs: tuple[Input, ...]
    body: tuple[str, ...]
    returns: tuple[str, ...]
    mode: str = "train"

    @property
    def source(self) -> str:
        """Plain Python source of `f`; `Program.parse` reads it back."""
        arguments = ", ".join(f'{i.name}: "{i}"' for i in self.inputs)
        lines = [*self.body, f"return {', '.join(self.returns)}"]
        text = "\n".join(f"    {line}" for part in lines for line in part.split("\n"))
        return f'def f({arguments}) -> "{self.mode}":\n{text}\n'

    @classmethod
    def parse(cls, source: str) -> Program:
        """The program that a function of annotated arguments writes down."""
        (function,) = (n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef))
        inputs = (Input.parse(a.arg, a.annotation.value) for a in function.args.args)
        *body, last = function.body
        results = last.value.elts if isinstance(last.value, ast.Tuple) else [last.value]
        return cls(
            tuple(inputs), tuple(map(ast.unparse, body)), tuple(map(ast.unparse, results)),
            function.returns.value,
        )  # fmt: skip

    def function(self) -> Callable[..., tuple | Tensor]:
        """The program as a function of its inputs."""
        return _compiled(self.source)

    def twin(self, dtype: torch.dtype) -> Program:
        """The same formula with every cast to a float dtype as one to `dtype`."""
        tree = _In(dtype).visit(ast.parse(self.source))
        return Program.parse(ast.unparse(ast.fix_missing_locations(tree)))

    def dtypes(self) -> set[torch.dtype]:
        """The dtypes of its inputs, and those that its lines name."""
        named = {getattr(torch, d) for d in ("float16", "bfloat16", "float32", "float64")}
        text = "\n".join(self.body)
        found = {i.dtype for i in self.inputs}
        found |= {d for d in named if str(d) in text}
        found |= {torch.float32} if ".float()" in text else set()
        return found | ({torch.bfloat16} if self.mode == "autocast" else set())


class _In(ast.NodeTransformer):
    """Turns casts to float dtypes into casts to one of them; an autocast region keeps its own."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.name = str(dtype).removeprefix("torch.")

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        if node.attr in (*_NARROW, "float64") and isinstance(node.value, ast.Name):
            return ast.Attribute(node.value, self.name, node.ctx)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if isinstance(node.func, ast.Attribute) and node.func.attr == "autocast":
            return node
        self.generic_visit(node)
        _tell_eps(node)
        method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        if method in (*_CASTS, "double") and not node.args:
            kind = ast.Attribute(ast.Name("torch", ast.Load()), self.name, ast.Load())
            return ast.Call(ast.Attribute(node.func.value, "to", ast.Load()), [kind], [])
        return node


def _tell_eps(call: ast.Call) -> None:
    """Of a norm that is called without eps it is the epsilon of fp32, in a wider twin as well."""
    if isinstance(call.func, ast.Attribute) and call.func.attr == "rms_norm":
        fp32 = ast.Constant(torch.finfo(torch.float32).eps)
        if len(call.args) > 3 and ast.unparse(call.args[3]) == "None":
            call.args[3] = fp32
        for keyword in call.keywords:
            if keyword.arg == "eps" and ast.unparse(keyword.value) == "None":
                keyword.value = fp32


@functools.lru_cache(maxsize=256)
def _compiled(source: str) -> Callable:
    name = f"<program {abs(hash(source))}>"
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    names: dict = {"torch": torch, "F": F}
    exec(compile(source, name, "exec"), names)
    names["f"].__annotations__ = {}  # torch.fx would take them for types
    return names["f"]


def arguments(program: Program, seed: int, dtype: torch.dtype | None = None) -> list[Tensor]:
    """Random inputs for a program. dtype: give the same numbers in another dtype."""
    generator = torch.Generator().manual_seed(seed)
    made: dict[str, Tensor] = {}
    for one in program.inputs:
        kind, _, other = one.layout.partition(":")
        if kind == "same":
            made[one.name] = made[other]
        elif kind == "alias":
            made[one.name] = made[other].detach().view(made[other].shape)
        else:
            numbers = _numbers(one, generator).to(dtype or one.dtype)
            value = _laid_out(numbers, kind).requires_grad_(one.grad)
            made[one.name] = nn.Parameter(value, one.grad) if one.parameter else value
    return [made[i.name] for i in program.inputs]


def _numbers(one: Input, generator: torch.Generator) -> Tensor:
    numbers = torch.randn(one.shape, generator=generator, dtype=torch.float64)
    if one.small and len(one.shape) > 1:
        numbers[..., ::3, :] *= 2.0**-9
    return numbers.to(one.dtype)


def _laid_out(numbers: Tensor, layout: str) -> Tensor:
    if layout == "transposed":
        return numbers.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "sliced":
        return torch.stack((numbers, numbers), -1).flatten(-2)[..., ::2]
    if layout == "padded":
        return torch.cat((numbers, numbers), -1)[..., : numbers.shape[-1]]
    if layout == "expanded":
        return numbers[:1].expand(numbers.shape)
    return numbers
