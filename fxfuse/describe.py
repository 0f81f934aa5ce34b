"""A planned site in words and numbers: the `Match` of the report."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from fxfuse import origin
from fxfuse.facts import Facts
from fxfuse.match import Call, Derived
from fxfuse.policy import Choice
from fxfuse.report import Match
from fxfuse.site import Site


def describe(facts: Facts, pattern: str, site: Site, call: Call, choice: Choice) -> Match:
    """module is the root's and where the line of the first node: of the add, if there is one."""
    schema = call.op._schema
    operands = dict(_named(schema, call.args))
    shapes = {k: _shape(facts, a) for k, a in operands.items()}
    dtypes = {k: _dtype(facts, a) for k, a in operands.items()}
    return Match(
        pattern=pattern,
        op=schema.name,
        nodes=tuple(n.name for n in site.nodes),
        module=origin.module_path(site.root) or origin.module_path(site.nodes[0]),
        where=origin.code_line(site.nodes[0]),
        shapes={k: tuple(map(_size, s)) for k, s in shapes.items() if s is not None},
        dtypes={k: str(d).removeprefix("torch.") for k, d in dtypes.items() if d is not None},
        attributes=dict(call.kwargs),
        policy=_sides(choice),
        bytes_saved=_bytes_saved(facts, site),
    )


def _named(schema: torch.FunctionSchema, args: tuple) -> Iterator[tuple[str, object]]:
    """Operands by name; those of a list are numbered."""
    for parameter, given in zip(schema.arguments, args):
        many = isinstance(given, (list, tuple))
        for i, one in enumerate(given if many else [given]):
            if one is not None:
                name = f"{parameter.name}[{i}]" if many else parameter.name
                yield name, one


def _shape(facts: Facts, operand: object) -> tuple | None:
    if isinstance(operand, Derived):
        return None if operand.value is None else tuple(operand.value.shape)
    return facts.shape(operand)


def _dtype(facts: Facts, operand: object) -> torch.dtype | None:
    if isinstance(operand, Derived):
        return None if operand.value is None else operand.value.dtype
    return facts.dtype(operand)


def _size(size: object) -> object:
    return size if isinstance(size, int) else str(size)


def _sides(choice: Choice) -> str:
    if choice.forward == choice.backward:
        return f"{choice.forward}: {choice.why}"
    return f"forward {choice.forward}, backward {choice.backward}: {choice.why}"


def _bytes_saved(facts: Facts, site: Site) -> int | None:
    """Forward traffic of the replaced nodes one by one, less that of the op."""
    if len(site.nodes) == 1:
        return None
    one_by_one = [_bytes(facts, n) for node in site.nodes for n in (node, *node.all_input_nodes)]
    fused = [_bytes(facts, n) for n in (*site.inputs, *site.outputs)]
    if None in one_by_one or None in fused:
        return None
    return max(0, sum(one_by_one) - sum(fused))


def _bytes(facts: Facts, node: fx.Node) -> int | None:
    value = facts.value(node)
    if value is None or not all(isinstance(size, int) for size in value.shape):
        return None
    return value.numel() * value.element_size()
