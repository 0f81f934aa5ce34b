"""Graphs of any length: one transformer layer's nodes, again and again."""

from __future__ import annotations

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

WIDTH, TOKENS = 64, 8


def norm(x: Tensor, weight: Tensor) -> Tensor:
    h = x.to(torch.float32)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * h.to(x.dtype)


def rotated(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    one, other = q.chunk(2, -1)
    return q * cos + torch.cat([-other, one], -1) * sin


def fused_layer(x, first, second, q, k, v, o, gate, up, down, cos, sin):
    """A layer of Llama's with one head."""
    y = norm(x, first)
    scores = rotated(y @ q, cos, sin) @ rotated(y @ k, cos, sin).transpose(-1, -2)
    x = x + torch.softmax(scores * WIDTH**-0.5, -1) @ (y @ v) @ o
    y = norm(x, second)
    return x + (F.silu(y @ gate) * (y @ up)) @ down


def plain_layer(x, first, second, q, k, v, o, gate, up, down, cos, sin):
    """The same with LayerNorm and gelu: nothing that a pattern begins with."""
    y = F.layer_norm(x, (WIDTH,), first)
    scores = rotated(y @ q, cos, sin) @ rotated(y @ k, cos, sin).transpose(-1, -2)
    x = x + torch.softmax(scores * WIDTH**-0.5, -1) @ (y @ v) @ o
    y = F.layer_norm(x, (WIDTH,), second)
    return x + (F.gelu(y @ gate) * (y @ up)) @ down


def long_graph(nodes: int, fuses: bool) -> fx.GraphModule:
    """A graph of about that many nodes, layer behind layer, each with weights of its own."""
    rows, weight = torch.empty(2, TOKENS, WIDTH), torch.empty(WIDTH)
    matrices, angles = [torch.empty(WIDTH, WIDTH)] * 7, [torch.empty(TOKENS, WIDTH)] * 2
    operands = (rows, weight, weight, *matrices, *angles)
    layer = make_fx(fused_layer if fuses else plain_layer, tracing_mode="fake")(*operands).graph
    graph = fx.Graph()
    inputs = layer.find_nodes(op="placeholder")
    x, *_, cos, sin = (graph.node_copy(node) for node in (inputs[0], *inputs[-2:]))
    while len(graph.nodes) < nodes:
        copies = {inputs[0]: x, inputs[-2]: cos, inputs[-1]: sin}
        for node in layer.nodes:
            if node.op == "output":
                x = copies[node.args[0]]
            elif node not in copies:
                copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(x)
    _inputs_first(graph)
    return fx.GraphModule(torch.nn.Module(), graph)


def _inputs_first(graph: fx.Graph) -> None:
    """Move the inputs to the front, each under a name of its own."""
    first = next(iter(graph.nodes))
    for node in graph.find_nodes(op="placeholder"):
        node.target = node.name
        if node is not first:
            first.append(node)
