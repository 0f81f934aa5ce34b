"""One model as the graphs of several tracers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import fxfuse


def symbolic(model: nn.Module, args: tuple) -> fx.GraphModule:
    return fx.symbolic_trace(model)


def exported(model: nn.Module, args: tuple) -> fx.GraphModule:
    return torch.export.export(model, args).module()


def core_aten(model: nn.Module, args: tuple) -> fx.GraphModule:
    return torch.export.export(model, args).run_decompositions().module()


def aten(model: nn.Module, args: tuple) -> fx.GraphModule:
    return make_fx(model)(*args)


def functional_aten(model: nn.Module, args: tuple) -> fx.GraphModule:
    return make_fx(torch.func.functionalize(model))(*args)


def inductor_aten(model: nn.Module, args: tuple) -> fx.GraphModule:
    """Decomposed as Inductor does: casts are prims, and silu is a quotient in fp32."""
    from torch._inductor.decomposition import select_decomp_table

    return make_fx(model, decomposition_table=select_decomp_table())(*args)


DIALECTS = {
    "symbolic_trace": symbolic,
    "export": exported,
    "core_aten": core_aten,
    "make_fx": aten,
    "make_fx_functional": functional_aten,
}


def dynamo(model: Callable, args: tuple) -> fx.GraphModule:
    """The graph that Dynamo hands to a backend."""
    graphs = []

    def keep(gm, example_inputs):
        graphs.append(gm)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(model, backend=keep, fullgraph=True)(*args)
    return graphs[0]


def compiled(model: nn.Module, args: tuple, dynamic: bool | None = None) -> tuple:
    """What the model returns compiled by fxfuse, and the sites of each pattern in its graphs."""
    torch._dynamo.reset()
    with fxfuse.record() as reports:
        backend = fxfuse.make_backend("eager")
        found = torch.compile(model, backend=backend, fullgraph=True, dynamic=dynamic)(*args)
    return found, sum((Counter(r.counts) for r in reports), Counter())
