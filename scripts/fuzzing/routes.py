"""The ways in which a program reaches fxfuse, each beside the same way without it."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.fx import symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx

import fxfuse
from scripts.fuzzing.builder import entered
from scripts.fuzzing.program import Program, arguments


class NoRoute(Exception):
    """A program that this tracer cannot trace, with fxfuse or without."""


@dataclass(frozen=True)
class Prepared:
    """A program made ready: the function as it would be without fxfuse, and with it.

    The plain one is only made where it is asked for. counts: sites by pattern, complete after a
    backward.
    """

    reference: Callable
    plain: Callable[[], Callable]
    fused: Callable
    counts: Callable[[], Counter]


@dataclass(frozen=True)
class Route:
    """One way. exact: neighbours of the fused ops compute as in the reference, bit for bit."""

    name: str
    prepare: Callable[[Program], Prepared]
    exact: bool = True


def compiled(inner: str, policy: str) -> Callable[[Program], Prepared]:
    """torch.compile with a backend of ours in front of `inner`."""

    def prepare(program: Program) -> Prepared:
        torch._dynamo.reset()
        reports: list = []
        fused = torch.compile(
            program.function(), backend=fxfuse.make_backend(inner, policy=policy), fullgraph=True
        )

        def call(*args: object) -> object:
            with fxfuse.record() as found:
                reports.append(found)
                return fused(*args)

        def plain() -> Callable:
            torch._dynamo.reset()
            return torch.compile(program.function(), backend=inner, fullgraph=True)

        def counts() -> Counter:
            return sum((Counter(r.counts) for found in reports for r in found), Counter())

        return Prepared(program.function(), plain, call, counts)

    return prepare


def traced(trace: Callable, give_inputs: bool = False) -> Callable[[Program], Prepared]:
    """fxfuse.apply on the graph of a tracer."""

    def prepare(program: Program) -> Prepared:
        try:
            with entered(program.mode):
                graph = trace(program.function(), tuple(arguments(program, 0)))
        except Exception as error:
            raise NoRoute(str(error)) from error
        gm = copy.deepcopy(graph)
        with entered(program.mode):
            fxfuse.apply(gm, arguments(program, 0) if give_inputs else None, policy="always")
        counts = Counter(gm.meta["fxfuse"].counts)
        return Prepared(graph, lambda: graph, gm, lambda: counts)

    return prepare


class _Of(nn.Module):
    def __init__(self, function: Callable) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: torch.Tensor) -> object:
        return self.function(*args)


def _exported(function: Callable, args: tuple) -> nn.Module:
    return torch.export.export(_Of(function), args).module()


ROUTES = {
    route.name: route
    for route in (
        Route("eager", compiled("eager", "always")),
        Route("aot_eager", compiled("aot_eager", "always")),
        Route("inductor auto", compiled("inductor", "auto"), exact=False),
        Route("inductor always", compiled("inductor", "always"), exact=False),
        Route("symbolic_trace", traced(lambda f, args: symbolic_trace(f))),
        Route("symbolic_trace with inputs", traced(lambda f, args: symbolic_trace(f), True)),
        Route("make_fx", traced(lambda f, args: make_fx(f)(*args))),
        Route("export", traced(_exported)),
    )
}
