"""Inductor hooks: the rewrite as a pass before autograd, and lists of passes as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass

from fxfuse.report import Report
from fxfuse.rewrite import rewrite
from fxfuse.roundings import chained_uuid


class FuseBeforeAutograd(CustomGraphPass):
    """A `pre_grad_custom_pass`: the graph is still Dynamo's, so the ops own their gradients."""

    def __init__(
        self, policy: str, publish: Callable[[Report], None], before: Callable | None = None
    ) -> None:
        self.policy, self.publish, self.before = policy, publish, before

    def __call__(self, graph: fx.Graph) -> None:
        if self.before is not None:
            self.before(graph)
        gm = graph.owning_module
        if gm is not None:
            self.publish(rewrite(gm, policy=self.policy, compiled=True))

    def uuid(self) -> object | None:
        return chained_uuid(f"before autograd, {self.policy}", self.before)


class Sequenced(CustomGraphPass):
    """Several passes as one."""

    def __init__(self, passes: Sequence[Callable]) -> None:
        self.passes = tuple(passes)

    def __call__(self, graph: fx.Graph) -> None:
        for one in self.passes:
            one(graph)

    def uuid(self) -> object | None:
        ids = [p.uuid() if isinstance(p, CustomGraphPass) else None for p in self.passes]
        return None if None in ids else tuple(ids)
