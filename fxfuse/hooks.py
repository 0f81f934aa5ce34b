"""Inductor hooks: the rewrite before autograd and after it, and lists of passes as one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass

from fxfuse import compilation, stored
from fxfuse.compilation import Compilation
from fxfuse.options import Settings
from fxfuse.report import Report
from fxfuse.rewrite import rewrite
from fxfuse.roundings import source_hash


class FuseBeforeAutograd(CustomGraphPass):
    """A `pre_grad_custom_pass`: the graph is still Dynamo's, so the ops own their gradients.

    publisher: makes the function that publishes the reports of one compilation. compilations: by
    key, shared with the hook after autograd.
    """

    def __init__(
        self,
        settings: Settings,
        publisher: Callable[[], Callable[[Report], None]],
        compilations: dict[str, Compilation],
    ) -> None:
        self.settings, self.publisher, self.compilations = settings, publisher, compilations

    def __call__(self, graph: fx.Graph) -> None:
        gm = graph.owning_module
        if gm is not None:
            key = stored.key_of(gm, self.settings.identity)
            report = rewrite(gm, **self.settings.choices, compiled=True)
            compilation.mark(gm, key)
            self.compilations[key] = Compilation(key, self.publisher())
            self.compilations[key].first(report)

    def uuid(self) -> str:
        return f"fxfuse before autograd, {self.settings.identity} {source_hash()}"


class FuseAfterAutograd(CustomGraphPass):
    """A `post_grad_custom_pre_pass` for backward graphs: what autograd put around our backward ops.

    find: gives the compilation of a key that was left in the graph, or None.
    """

    def __init__(
        self,
        settings: Settings,
        find: Callable[[str | None], Compilation | None],
    ) -> None:
        self.settings, self.find = settings, find

    def __call__(self, graph: fx.Graph) -> None:
        gm = graph.owning_module
        if gm is not None:
            fuse_after_autograd(gm, self.settings, self.find)

    def uuid(self) -> str:
        return f"fxfuse after autograd, {self.settings.identity} {source_hash()}"


def fuse_after_autograd(
    gm: fx.GraphModule,
    settings: Settings,
    find: Callable[[str | None], Compilation | None],
) -> None:
    """Apply the backward patterns and tell the compilation of the graph."""
    report = rewrite(gm, **settings.choices, compiled=True, backward_only=True)
    told = find(compilation.key_in(gm.graph))
    if told is not None:
        told.later(report)


def aot_eager(settings: Settings, find: Callable) -> Callable:
    """PyTorch's backend of this name, with the backward patterns on its backward graphs.

    Private PyTorch interface, tried on torch 2.10 to 2.14.
    """
    from torch._dynamo.backends.debugging import aot_eager, boxed_nop

    def backward_compiler(gm: fx.GraphModule, example_inputs: object) -> Callable:
        fuse_after_autograd(gm, settings, find)
        return boxed_nop(gm, example_inputs)

    return functools.partial(aot_eager, bw_compiler=backward_compiler)


class Sequenced(CustomGraphPass):
    """Several passes as one. If one has no uuid Inductor skips its caches, as for it alone."""

    def __init__(self, passes: Sequence[Callable]) -> None:
        self.passes = tuple(passes)

    def __call__(self, graph: fx.Graph) -> None:
        for one in self.passes:
            one(graph)

    def uuid(self) -> object | None:
        ids = [p.uuid() if isinstance(p, CustomGraphPass) else None for p in self.passes]
        return None if None in ids else tuple(ids)
