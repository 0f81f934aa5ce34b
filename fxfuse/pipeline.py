"""fxfuse inside a pipeline of your own: a function, and a pass for torch.fx's PassManager."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from fxfuse import policy as policies, registry
from fxfuse.backends import Patterns
from fxfuse.errors import BadExampleInputs, BadGraph
from fxfuse.rewrite import rewrite


def apply(
    gm: fx.GraphModule | ExportedProgram,
    example_inputs: Sequence[object] | None = None,
    *,
    patterns: Patterns = None,
    policy: str = "auto",
) -> fx.GraphModule | ExportedProgram:
    """Fuse what matches, in place; returns what it was given, with the report in meta["fxfuse"].

    gm: a traced model: torch.fx.symbolic_trace, make_fx, a graph that Dynamo handed to a backend,
    or an ExportedProgram (the report is then in `program.graph_module.meta`). example_inputs:
    where the graph has no metadata, inputs from which shapes and dtypes are worked out on fake
    tensors; without them the sites fuse whose meaning needs none, and the ops check when they run.
    patterns: names to use, None for all. policy: "auto", "always" or "never".

    Raises BadGraph, BadExampleInputs, UnknownPattern, BadOption; nothing is changed then.
    """
    graph_module = gm.graph_module if isinstance(gm, ExportedProgram) else gm
    if not isinstance(graph_module, fx.GraphModule):
        raise BadGraph(kind=type(gm).__name__)
    registry.select(patterns)
    policies.check(policy)
    if example_inputs is not None and not _has_metadata(graph_module):
        _propagate(graph_module, example_inputs)
    graph_module.meta["fxfuse"] = rewrite(graph_module, patterns=patterns, policy=policy)
    return gm


class FusePass(PassBase):
    """`fxfuse.apply` as a pass: `PassManager(passes=[fxfuse.FusePass()])`."""

    def __init__(self, patterns: Patterns = None, policy: str = "auto") -> None:
        super().__init__()
        registry.select(patterns)
        self.patterns, self.policy = patterns, policies.check(policy)

    def call(self, graph_module: fx.GraphModule) -> PassResult:
        apply(graph_module, patterns=self.patterns, policy=self.policy)
        return PassResult(graph_module, graph_module.meta["fxfuse"].modified)


def _has_metadata(gm: fx.GraphModule) -> bool:
    inputs = gm.graph.find_nodes(op="placeholder")
    return all("val" in n.meta or "example_value" in n.meta for n in inputs)


def _propagate(gm: fx.GraphModule, example_inputs: Sequence[object]) -> None:
    """Write shapes and dtypes into a graph; its tensors, buffers included, are not touched."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    given, taken = len(example_inputs), len(gm.graph.find_nodes(op="placeholder"))
    if isinstance(example_inputs, torch.Tensor) or given > taken:
        raise BadExampleInputs(problem=f"it takes a tuple of at most {taken} inputs")
    shapes = ShapeEnv(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=True)
    mode = torch._guards.detect_fake_mode(example_inputs) or FakeTensorMode(
        shape_env=shapes, allow_non_fake_inputs=True
    )
    fake = functools.partial(mode.from_tensor, static_shapes=True)
    twin = copy.deepcopy(gm, {id(t): fake(t) for t in (*gm.parameters(), *gm.buffers())})
    try:
        fakes = [fake(t) if torch.is_tensor(t) else t for t in example_inputs]
        with torch.no_grad():
            FakeTensorProp(twin, mode).propagate_dont_convert_inputs(*fakes)
    except Exception as error:
        problem = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        raise BadExampleInputs(problem=problem) from error
    for node, traced in zip(gm.graph.nodes, twin.graph.nodes):
        node.meta.update({k: traced.meta[k] for k in ("val", "tensor_meta") if k in traced.meta})
