"""What is known about the values of a graph: dtype, shape, device, and numbers."""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass, field

import torch
from torch import fx

_CASTS = {
    "float": torch.float32, "half": torch.float16,
    "bfloat16": torch.bfloat16, "double": torch.float64,
}  # fmt: skip


@dataclass
class Facts:
    """Facts about the nodes of one graph module. `None` always means "not known".

    dim: what norms are looked for over: the last dimension (-1), or another one counted from the
    front. others: over which else the graph has been seen to reduce.
    """

    graph_module: fx.GraphModule
    dim: int = -1
    others: set[int] = field(default_factory=set)

    def value(self, operand: object) -> torch.Tensor | None:
        """The tensor, usually a fake one, that stands for an operand."""
        if isinstance(operand, fx.Node):
            found = operand.meta.get("example_value")
            if found is None:
                found = operand.meta.get("val")
            if found is None and operand.op == "get_attr":
                found = self.attribute(operand.target)
        else:
            target = getattr(operand, "target", None)
            found = self.attribute(target) if isinstance(target, str) else None
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

    def number(self, operand: object) -> int | float | None:
        """The value of a number that is known now. A float that Dynamo keeps symbolic (an eps under
        dynamic=True) is fixed to its value, as PyTorch's own norm does; what is computed from a
        symbolic size is not.
        """
        if isinstance(operand, fx.Node):
            known = operand.meta.get("example_value", operand.meta.get("val"))
            operand = self._size(operand) if known is None else known
            if isinstance(operand, torch.SymFloat) and _is_input(operand):
                operand = float(operand)
        is_number = isinstance(operand, (int, float)) and not isinstance(operand, bool)
        return operand if is_number else None

    def constant(self, operand: object) -> int | float | None:
        """`number`, but of one that is symbolic None: nothing is fixed."""
        if isinstance(operand, fx.Node):
            value = operand.meta.get("example_value", operand.meta.get("val"))
            if isinstance(value, torch.SymFloat):
                return None
        return self.number(operand)

    def is_number(self, operand: object) -> bool:
        """Whether an operand is a number, known or symbolic."""
        if isinstance(operand, fx.Node):
            value = operand.meta.get("example_value", operand.meta.get("val"))
            if isinstance(value, (torch.SymFloat, torch.SymInt)):
                return True
        return self.number(operand) is not None

    def _size(self, node: fx.Node) -> int | None:
        """What `x.size(dim)`, `x.shape[dim]`, `x.dim()` and `x.ndim` give for a tensor of known
        sizes.
        """
        source, index = (*node.args, None, None)[:2]
        if node.target is operator.getitem and isinstance(source, fx.Node):
            asks = source.target is getattr and source.args[1] == "shape" and isinstance(index, int)
            source = source.args[0] if asks else None
        else:
            asks = node.op == "call_method" and node.target == "size" and isinstance(index, int)
        if node.op == "call_method" and node.target == "dim":
            asks = True
        if node.target is getattr and index == "ndim":
            asks, index = True, None
        shape = self.shape(source) if asks else None
        if shape is None:
            return None
        size = len(shape) if index is None else shape[index]
        return size if isinstance(size, int) else None

    @functools.cached_property
    def after_autograd(self) -> bool:
        """Whether AOTAutograd cut the graph from a joint one: autograd does not see it again."""
        return any("partitioner_tag" in n.meta for n in self.graph_module.graph.nodes)

    def same_memory(self, a: fx.Node, b: fx.Node) -> bool:
        """Whether two inputs are one tensor, such as a value and its detached alias, both saved."""
        one, other = self.value(a), self.value(b)
        if one is None or other is None or not a.op == b.op == "placeholder":
            return False
        return one is other or (
            one.untyped_storage()._cdata == other.untyped_storage()._cdata
            and one.dtype == other.dtype
            and same_shape(tuple(one.shape), tuple(other.shape))
            and same_shape(one.stride(), other.stride())
            and known_equal(one.storage_offset(), other.storage_offset())
        )

    def is_tensor(self, operand: object) -> bool:
        """False if an operand is known to be something else, such as a size."""
        if not isinstance(operand, fx.Node):
            return True
        if operand.op == "call_method" and operand.target in ("size", "dim", "numel", "item"):
            return False
        if "example_value" in operand.meta or "val" in operand.meta:
            return self.value(operand) is not None
        return not (operand.target is operator.getitem and not self.is_tensor(operand.args[0]))

    def attribute(self, target: str) -> object:
        """What the root module has under a dotted path, or None."""
        found = self.graph_module
        for name in target.split("."):
            found = getattr(found, name, None)
        return found


def _is_input(number: torch.SymFloat) -> bool:
    """Whether a symbolic float is an input of the graph, fixed or not, and not computed."""
    expression = number.node.expr
    return number.node.has_hint() and (expression.is_symbol or expression.is_number)


def known_equal(a: object, b: object) -> bool:
    """Equality of two sizes, without adding a guard where they are symbolic."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(a == b)


def is_permuted(value: torch.Tensor) -> bool:
    """Whether a dimension is known to lie closer in memory than one behind it."""
    strides = [s for s, size in zip(value.stride(), value.shape) if not known_equal(size, 1)]
    return any(known_less(a, b) for i, a in enumerate(strides) for b in strides[i + 1 :])


def order_in_memory(value: torch.Tensor) -> tuple[int, ...] | None:
    """Its dimensions of more than one value from the widest stride to the closest, if known."""
    if not all(isinstance(n, int) for n in (*value.shape, *value.stride())):
        return None
    dims = [d for d in range(value.dim()) if value.shape[d] != 1]
    return tuple(sorted(dims, key=lambda d: -value.stride(d)))


def known_less(a: object, b: object) -> bool:
    """a < b of two sizes, as far as that is known without a guard."""
    if isinstance(a, int) and isinstance(b, int):
        return a < b
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(a < b)


def same_shape(a: tuple, b: tuple) -> bool:
    return len(a) == len(b) and all(known_equal(m, n) for m, n in zip(a, b))
