"""What is known about the tensors of a graph: dtype, shape, device, and whose memory they share."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field

import torch
from torch import fx

F = torch.nn.functional

_CASTS = {
    "float": torch.float32, "half": torch.float16,
    "bfloat16": torch.bfloat16, "double": torch.float64,
}  # fmt: skip

# Functions and methods that return memory of their own. Whatever is in neither list and has no
# schema is taken to share memory with its inputs.
_ALLOCATING_FUNCTIONS = {
    operator.add, operator.sub, operator.mul, operator.truediv, operator.pow, operator.neg,
    operator.matmul, torch.add, torch.sub, torch.mul, torch.div, torch.pow, torch.neg,
    torch.matmul, torch.mm, torch.bmm, torch.addmm, torch.einsum, torch.cat, torch.stack,
    torch.mean, torch.sum, torch.sqrt, torch.rsqrt, torch.square, torch.sigmoid, torch.tanh,
    torch.rms_norm, torch.layer_norm, torch.softmax, torch.exp, torch.where,
    F.linear, F.embedding, F.silu, F.gelu, F.softmax, F.layer_norm, F.rms_norm,
    F.scaled_dot_product_attention, torch.rms_norm,
}  # fmt: skip
_ALLOCATING_METHODS = {
    "add", "sub", "mul", "div", "pow", "neg", "matmul", "mean", "sum", "sqrt", "rsqrt", "square",
    "sigmoid", "tanh", "softmax", "exp", "clone", "rsub", "bmm", "mm",
}  # fmt: skip
_ALLOCATING_MODULES = (torch.nn.Linear, torch.nn.Embedding, torch.nn.RMSNorm, torch.nn.LayerNorm)


@dataclass
class Facts:
    """Facts about the nodes of one graph module. `None` always means "not known"."""

    graph_module: fx.GraphModule
    _roots: dict[fx.Node, frozenset[fx.Node]] = field(default_factory=dict)

    def value(self, operand: object) -> torch.Tensor | None:
        """The tensor, usually a fake one, that stands for an operand."""
        if isinstance(operand, fx.Node):
            found = operand.meta.get("example_value")
            if found is None:
                found = operand.meta.get("val")
            if found is None and operand.op == "get_attr":
                found = _attribute(self.graph_module, operand.target)
        else:
            target = getattr(operand, "target", None)
            found = _attribute(self.graph_module, target) if isinstance(target, str) else None
        return found if isinstance(found, torch.Tensor) else None

    def dtype(self, operand: object) -> torch.dtype | None:
        value = self.value(operand)
        return value.dtype if value is not None else self.static_dtype(operand)

    def static_dtype(self, operand: object) -> torch.dtype | None:
        """The dtype that a cast names, without metadata."""
        if not isinstance(operand, fx.Node) or operand.op != "call_method":
            return None
        if operand.target in _CASTS:
            return _CASTS[operand.target]
        if operand.target == "to":
            named = [
                a for a in (*operand.args, *operand.kwargs.values()) if isinstance(a, torch.dtype)
            ]
            return named[0] if named else None
        return None

    def shape(self, operand: object) -> tuple | None:
        value = self.value(operand)
        if value is not None:
            return tuple(value.shape)
        return self.shape(operand.args[0]) if self.static_dtype(operand) else None

    def device(self, operand: object) -> torch.device | None:
        value = self.value(operand)
        return value.device if value is not None else None

    def same_device(self, a: object, b: object) -> bool:
        one, other = self.device(a), self.device(b)
        return one is not None and one == other

    def allocates(self, node: fx.Node) -> bool:
        """True if a node returns memory of its own, shared with none of its inputs."""
        target = node.target
        if isinstance(target, torch._ops.OpOverload):
            return not any(r.alias_info for r in target._schema.returns)
        if node.op == "call_function":
            return target in _ALLOCATING_FUNCTIONS
        if node.op == "call_method":
            return target in _ALLOCATING_METHODS
        if node.op == "call_module":
            return isinstance(self.graph_module.get_submodule(target), _ALLOCATING_MODULES)
        return False

    def roots(self, node: fx.Node) -> frozenset[fx.Node]:
        """The nodes whose memory this one may be a view of, itself among them."""
        stack = [node]
        while stack:
            top = stack[-1]
            if top in self._roots:
                stack.pop()
                continue
            inputs = [] if self.allocates(top) else top.all_input_nodes
            waiting = [i for i in inputs if i not in self._roots]
            if waiting:
                stack.extend(waiting)
                continue
            self._roots[top] = frozenset({top}).union(*(self._roots[i] for i in inputs))
            stack.pop()
        return self._roots[node]


def known_equal(a: object, b: object) -> bool:
    """Equality of two sizes, without adding a guard where they are symbolic."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(a == b)


def same_shape(a: tuple, b: tuple) -> bool:
    return len(a) == len(b) and all(known_equal(m, n) for m, n in zip(a, b))


def _attribute(module: torch.nn.Module, target: str) -> object:
    for name in target.split("."):
        module = getattr(module, name, None)
    return module
