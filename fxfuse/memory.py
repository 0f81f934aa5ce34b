"""Whose memory a node's value may share, and which nodes write to memory that others see."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field

import torch
from torch import fx
from torch.utils import _pytree as pytree

from fxfuse.facts import Facts

F = torch.nn.functional

# Functions and methods that return memory of their own. Whatever is in no list and has no schema is
# taken to share memory with its inputs.
_ALLOCATING_FUNCTIONS = {
    operator.add, operator.sub, operator.mul, operator.truediv, operator.pow, operator.neg,
    operator.matmul, torch.add, torch.sub, torch.mul, torch.div, torch.pow, torch.neg,
    torch.matmul, torch.mm, torch.bmm, torch.addmm, torch.cat, torch.stack, torch.mean, torch.sum,
    torch.sqrt, torch.rsqrt, torch.square, torch.sigmoid, torch.tanh, torch.rms_norm,
    torch.layer_norm, torch.softmax, torch.exp, torch.where, F.linear, F.embedding, F.silu, F.gelu,
    F.softmax, F.layer_norm, F.rms_norm, F.scaled_dot_product_attention, F.one_hot,
    torch.empty, torch.zeros, torch.ones, torch.full, torch.arange, torch.empty_like,
    torch.zeros_like, torch.ones_like, torch.full_like, torch.argsort, torch.sort, torch.topk,
    torch.cumsum, torch.gather, torch.index_select, torch.bincount, torch.histc, torch.clone,
    torch.sin, torch.cos, torch.log, torch.log2, torch.log1p, torch.exp2, torch.expm1, torch.abs,
    torch.clamp, torch.erf, torch.maximum, torch.minimum, torch.addcmul, torch.addcdiv, torch.roll,
    torch.flip, torch.reciprocal, torch.var, torch.std, torch.lerp,
}  # fmt: skip
_ALLOCATING_METHODS = {
    "add", "sub", "mul", "div", "pow", "neg", "matmul", "mean", "sum", "sqrt", "rsqrt", "square",
    "sigmoid", "tanh", "softmax", "exp", "clone", "rsub", "bmm", "mm", "argsort", "sort", "topk",
    "cumsum", "gather", "index_select", "new_empty", "new_zeros", "new_ones", "new_full",
    "scatter", "scatter_add", "index_add", "masked_fill", "repeat", "sin", "cos", "log", "abs",
    "clamp", "roll", "flip", "reciprocal", "var", "std", "norm",
}  # fmt: skip
_ALLOCATING_MODULES = (torch.nn.Linear, torch.nn.Embedding, torch.nn.RMSNorm, torch.nn.LayerNorm)

_ALLOCATING_COMPOSITES = {
    "linear", "matmul", "rms_norm", "layer_norm", "group_norm", "batch_norm", "softmax",
    "log_softmax", "scaled_dot_product_attention", "square", "multiply", "divide", "true_divide",
    "subtract", "conv1d", "conv2d", "conv3d", "cross_entropy_loss", "one_hot", "outer", "silu",
    "argsort", "concat", "hstack", "vstack", "isfinite",
}  # fmt: skip

# Like what writes to its first operand they return that; the other tensor has a dtype or a shape.
_LIKE_ANOTHER = {"to", "type_as", "view_as", "expand_as", "reshape_as"}

_WRITING_OPERATORS = {
    operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv,
    operator.imod, operator.ipow, operator.iand, operator.ior, operator.ixor, operator.imatmul,
    operator.ilshift, operator.irshift, operator.setitem,
}  # fmt: skip
_WRITING_METHODS = {f"__{function.__name__}__" for function in _WRITING_OPERATORS}
# What they write to, by position and name: rows that are too long, running statistics.
_KEEPING_RECORDS = {
    F.embedding: ((1, "weight"),), F.embedding_bag: ((1, "weight"),),
    F.batch_norm: ((1, "running_mean"), (2, "running_var")),
    F.instance_norm: ((1, "running_mean"), (2, "running_var")),
}  # fmt: skip
_KNOWN_MODULES = ("torch", "_operator", "builtins", "math", "einops")


@dataclass(frozen=True)
class Write:
    """`node` writes to the memory of `target`. sure: False if it is only not known to be pure."""

    node: fx.Node
    target: fx.Node
    sure: bool = True


@dataclass
class Memory:
    """The memory of one graph. A root stands for an allocation: a node, or a module's tensor."""

    graph_module: fx.GraphModule
    facts: Facts
    _roots: dict[fx.Node, frozenset[Hashable]] = field(default_factory=dict)

    def allocates(self, node: fx.Node) -> bool:
        """True if a node returns memory of its own, shared with none of its inputs."""
        target = node.target
        if node.kwargs.get("out") is not None:
            return False
        if isinstance(target, torch._ops.OpOverload):
            return not any(r.alias_info for r in target._schema.returns) and _keeps_schema(target)
        if target is operator.getitem and node.op == "call_function":
            return self._picks(node.args[1])
        if node.op == "call_function":
            return target in _ALLOCATING_FUNCTIONS
        if node.op == "call_method":
            return target in _ALLOCATING_METHODS
        if node.op == "call_module":
            return isinstance(self.graph_module.get_submodule(target), _ALLOCATING_MODULES)
        return False

    def _picks(self, index: object) -> bool:
        """True if an index holds a tensor of indices, so that what it picks is copied.

        A tensor of no dimension counts as a number, with which indexing returns a view.
        """
        items = index if isinstance(index, tuple) else (index,)
        values = [self.facts.value(i) for i in items if isinstance(i, fx.Node)]
        return any(v is not None and v.dim() > 0 for v in values)

    def roots(self, node: fx.Node) -> frozenset[Hashable]:
        """The roots whose memory a node's value may lie in."""
        stack = [node]
        while stack:
            top = stack[-1]
            if top in self._roots:
                stack.pop()
                continue
            inputs = [] if self.allocates(top) else _sources(top)
            waiting = [i for i in inputs if i not in self._roots]
            if waiting:
                stack.extend(waiting)
                continue
            own = self.root_of(top.target) if top.op == "get_attr" else top
            self._roots[top] = frozenset({own}).union(*(self._roots[i] for i in inputs))
            stack.pop()
        return self._roots[node]

    def root_of(self, target: str) -> Hashable:
        """The root of a parameter or buffer: one for all the names that it has."""
        tensor = self.facts.attribute(target)
        if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided:
            return ("memory", tensor.untyped_storage()._cdata)
        return ("attribute", target)

    def writes(self) -> list[Write]:
        return [w for node in self.graph_module.graph.nodes for w in self.writes_of(node)]

    def writes_of(self, node: fx.Node) -> list[Write]:
        if node.op == "call_method":
            name = node.target
            in_place = name in _WRITING_METHODS or (name.endswith("_") and not name.endswith("__"))
            return _to(node, node.args[:1]) if in_place else []
        if node.op == "call_module":
            return self._module_writes(node)
        return self._function_writes(node) if node.op == "call_function" else []

    def writes_to_inputs(self) -> bool:
        """True if the graph may write to what it is given."""
        return any(
            isinstance(root, tuple) or root.op == "placeholder"
            for write in self.writes()
            for root in self.roots(write.target)
        )

    def _module_writes(self, node: fx.Node) -> list[Write]:
        module = self.graph_module.get_submodule(node.target)
        if isinstance(module, fx.GraphModule):
            return self._nested_writes(node, [module])
        if getattr(module, "inplace", False) is True:
            return _to(node, node.args[:1])
        known = type(module).__module__.startswith("torch.nn.")
        return [] if known else _to(node, node.all_input_nodes, sure=False)

    def _function_writes(self, node: fx.Node) -> list[Write]:
        target = node.target
        if isinstance(target, torch._ops.OpOverload):
            return _by_schema(node, target._schema) if target._schema.is_mutable else []
        if isinstance(target, torch._ops.OpOverloadPacket):
            schemas = [getattr(target, name)._schema for name in target.overloads()]
            return [w for schema in schemas for w in _by_schema(node, schema)]
        if isinstance(target, torch._ops.HigherOrderOperator):
            fetched = [n.target for n in node.all_input_nodes if n.op == "get_attr"]
            inner = [m for m in map(self.facts.attribute, fetched) if isinstance(m, fx.GraphModule)]
            return self._nested_writes(node, inner)
        manner = _manner(target)
        found = _to(node, [node.kwargs["out"]]) if "out" in node.kwargs else []
        if target in _KEEPING_RECORDS:
            found += _to(node, _records(node))
        if manner.in_place or _given(node, manner.inplace_at):
            found += _to(node, node.args[:1])
        return found if found or manner.known else _to(node, node.all_input_nodes, sure=False)

    def _nested_writes(self, node: fx.Node, graphs: list[fx.GraphModule]) -> list[Write]:
        """A call of graphs writes to its inputs if one of them does, or if none can be seen."""
        pure = graphs and not any(Memory(g, Facts(g)).writes_to_inputs() for g in graphs)
        return [] if pure else _to(node, node.all_input_nodes)


def _records(node: fx.Node) -> list[object]:
    """What a function that keeps records may write to."""
    if node.target in (F.embedding, F.embedding_bag):
        limits = [node.kwargs.get("max_norm"), *node.args[3:4]]
        if all(limit is None for limit in limits):
            return []
    places = _KEEPING_RECORDS[node.target]
    return [node.args[i] if i < len(node.args) else node.kwargs.get(name) for i, name in places]


def _sources(node: fx.Node) -> list[fx.Node]:
    """The nodes whose memory a node that does not allocate may return."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        if target.namespace != "aten":
            return node.all_input_nodes
        target = target._schema.name.removeprefix("aten::")
    in_place = target in _WRITING_OPERATORS - {operator.setitem}
    if isinstance(target, str) and node.op != "call_module":
        in_place = (target.endswith("_") and target != "set_") or target in _LIKE_ANOTHER
    first = node.args[:1] if in_place else ()
    return [first[0]] if first and isinstance(first[0], fx.Node) else node.all_input_nodes


@functools.lru_cache(maxsize=4096)
def _keeps_schema(op: torch._ops.OpOverload) -> bool:
    """False of an op of ATen's that is a function of others, and may return what it was given.

    Such as dropout, which outside of training is no op at all, whatever its schema says.
    """
    composite = op.namespace == "aten" and op.has_kernel_for_dispatch_key(
        torch._C.DispatchKey.CompositeImplicitAutograd
    )
    return not composite or op._schema.name.removeprefix("aten::") in _ALLOCATING_COMPOSITES


def _to(node: fx.Node, targets: Iterable[object], sure: bool = True) -> list[Write]:
    found = [leaf for leaf in pytree.tree_leaves(list(targets)) if isinstance(leaf, fx.Node)]
    return [Write(node, target, sure) for target in found]


def _by_schema(node: fx.Node, schema: torch.FunctionSchema) -> list[Write]:
    found = []
    for index, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(
                node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
            )
    return _to(node, found)


@dataclass(frozen=True)
class _Manner:
    """How a function writes: always, where its argument `inplace` says so, or not known."""

    in_place: bool
    inplace_at: int | None
    known: bool


@functools.lru_cache(maxsize=4096)
def _manner(function: Callable) -> _Manner:
    name = getattr(function, "__name__", "")
    module = getattr(function, "__module__", None) or "torch"
    in_place = name.endswith("_") and not name.endswith("__")
    return _Manner(
        in_place=in_place or function in _WRITING_OPERATORS,
        inplace_at=_inplace_position(function) if module == "torch.nn.functional" else None,
        known=module.split(".")[0] in _KNOWN_MODULES,
    )


def _inplace_position(function: Callable) -> int | None:
    try:
        return list(inspect.signature(function).parameters).index("inplace")
    except ValueError:
        return None


def _given(node: fx.Node, at: int | None) -> bool:
    """True if a call sets the argument `inplace`, or may set it."""
    if at is None:
        return False
    value = node.args[at] if at < len(node.args) else node.kwargs.get("inplace")
    return value is not None and value is not False
