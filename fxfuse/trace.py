"""`explain`: what fxfuse would do to a model. Dynamo traces it; nothing of it is run or changed.

In one graph, Dynamo works on fake tensors and its graph is never called. Where the model cannot
be traced in one graph, the pieces have to run, since the code between them needs their values:
then a copy of the model runs without gradients, and every call of a piece counts. Weights on the
meta device have no values, so tracing ends at the first line that reads one.
"""

from __future__ import annotations

import contextlib
import inspect
import types
from collections.abc import Callable

import torch
from torch._dynamo.exc import TorchDynamoException, Unsupported, UserError

from fxfuse import copies, places
from fxfuse.report import Miss, Report
from fxfuse.rewrite import rewrite

_BREAKS = (Unsupported, UserError)  # what Dynamo says where it would break the graph
TRACING = "(tracing)"  # stands where a Miss names its pattern: no pattern of ours was at fault


def explain(
    model: Callable,
    *args: object,
    policy: str = "auto",
    patterns: list | None = None,
    train: bool | None = None,
    target: str | None = None,
    **kwargs: object,
) -> Report:
    """Report what would be fused in `model(*args, **kwargs)`, without running or changing it.

    model: an `nn.Module` or a function of tensors, on any device; the meta device will do.
    train: trace with gradients or without; by default as grad mode is. `model.training` stays.
    target: decide for this device (`cpu` or a GPU such as `sm_90`), not for the tensors' own.
    Where the model breaks into several graphs, the report covers them all, and a miss names the
    line of the first break. An error of the model itself is raised as it is. A model with an input
    of the name of one of these options is explained through a function that calls it.
    """
    model = uncompiled(model)
    tracer = _Tracer(patterns=patterns, policy=policy, target=target)
    with torch.set_grad_enabled(torch.is_grad_enabled() if train is None else train):
        if any(t.is_meta for t in copies.tensors(model, args, kwargs)):
            try:
                return tracer.whole(model, args, kwargs)
            except (TorchDynamoException, RuntimeError):
                if tracer.failed:
                    raise
            # It may make tensors on the default device as it runs, which then has to be meta as
            # well. That comes second, since Dynamo is several times slower in this context.
            with torch.device("meta"):
                return tracer.report(model, args, kwargs)
        return tracer.report(model, args, kwargs)


class _Traced(Exception):
    """Raised in place of running the graph, when all of the model is in it."""


class _Tracer:
    """A Dynamo backend that keeps the reports; a graph that is to run is rewritten as a copy."""

    def __init__(self, **options: object) -> None:
        self.options = options
        self.reports: list[Report] = []
        self.failed: BaseException | None = None
        self.in_pieces = False

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: object) -> Callable:
        try:
            edited = copies.of_graph(gm) if self.in_pieces else gm
            report = rewrite(edited, compiled=True, **self.options)
        except BaseException as error:
            self.failed = error
            raise

        def graph(*inputs: object) -> object:
            self.reports.append(report)
            if not self.in_pieces:
                raise _Traced
            with torch.no_grad():
                return gm(*inputs)

        return graph

    def report(self, model: Callable, args: tuple, kwargs: dict) -> Report:
        try:
            return self.whole(model, args, kwargs)
        except _BREAKS as broken:
            return self.pieces(model, args, kwargs, broken)

    def whole(self, model: Callable, args: tuple, kwargs: dict) -> Report:
        self.reports, self.failed = [], None
        with contextlib.suppress(_Traced):
            self.run(model, args, kwargs, fullgraph=True)
        return Report.merge(self.reports)

    def pieces(
        self, model: Callable, args: tuple, kwargs: dict, broken: TorchDynamoException
    ) -> Report:
        self.in_pieces, self.reports = True, []
        reason = f"the graph breaks here: {_first_line(broken)}"
        misses = [Miss(TRACING, "", "", places.of_error(broken), reason)]
        model, args, kwargs = copies.of_call(model, args, kwargs)
        try:
            # Each layer may be a piece of its own, specialised on what that layer holds.
            with (
                torch.random.fork_rng(),
                torch._dynamo.config.patch(
                    recompile_limit=1 << 16, accumulated_recompile_limit=1 << 16
                ),
            ):
                self.run(model, args, kwargs, fullgraph=False)
        except (RuntimeError, NotImplementedError) as error:
            if "meta" not in str(error) or self.failed:
                raise
            reason = f"tracing ended here, since weights on the meta device hold no values: {error}"
            misses.append(Miss(TRACING, "", "", places.of_error(error), reason))
        report = Report.merge(self.reports)
        report.misses += misses
        return report

    def run(self, model: Callable, args: tuple, kwargs: dict, fullgraph: bool) -> None:
        options = {"fullgraph": fullgraph, "dynamic": False, "backend": self}
        if "isolate_recompiles" in inspect.signature(torch.compile).parameters:  # torch 2.13
            options["isolate_recompiles"] = True  # or pieces crowd the caller's own compilations
        try:
            torch.compile(wrapped(model), **options)(*args, **kwargs)
        except _BREAKS:
            raise
        except TorchDynamoException as error:
            raise self.failed or original(error) from error


def uncompiled(model: Callable) -> Callable:
    """What `torch.compile` was given, where `model` is what it made."""
    if isinstance(model, torch._dynamo.OptimizedModule):
        return uncompiled(model._orig_mod)
    return getattr(model, "_torchdynamo_orig_callable", model)


def wrapped(model: Callable) -> Callable:
    """A call of the model in a function of its own.

    Dynamo keeps what it compiled on the code object, so a shared one would fill up in time.
    """

    def call(*args: object, **kwargs: object) -> object:
        return model(*args, **kwargs)

    return types.FunctionType(call.__code__.replace(), globals(), "call", None, call.__closure__)


def original(error: BaseException) -> BaseException:
    """The error that Dynamo wrapped, or Dynamo's own."""
    inner = error
    while isinstance(inner, TorchDynamoException):
        inner = inner.__cause__ or inner.__context__
    return inner or error


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".")
