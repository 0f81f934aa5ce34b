"""`Term`: what a node means, in one word with its operands; and who reads which node."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import fx

from fxfuse.facts import Facts
from fxfuse.memory import Memory


@dataclass(frozen=True, slots=True)
class Attr:
    """A parameter of a leaf module that no node fetches yet, by its path in the root module."""

    target: str


@dataclass(frozen=True, slots=True, eq=False)
class Term:
    """One word of the vocabulary.

    word: the meaning, such as "add".
    args: operands: nodes, numbers, None, an `Attr`, or a `Term` that no single node stands for.
    nodes: the graph nodes that this term stands for, outermost first.
    flaw: why a term with the right word is still not what patterns mean by it, or None.
    dtype: of a cast: the dtype, or the node whose dtype it takes where that is not known.
    """

    word: str
    args: tuple = ()
    nodes: tuple[fx.Node, ...] = ()
    flaw: str | None = None
    dtype: object = None


class ViewLike(Protocol):
    """What a reader may ask of the view that it reads for."""

    graph_module: fx.GraphModule
    facts: Facts
    memory: Memory

    def see(self, operand: object) -> Term | None: ...


Reader = Callable[[ViewLike, fx.Node], Term]
READERS: dict[object, Reader] = {}


def spelt(*spellings: object) -> Callable[[Reader], Reader]:
    """Register a reader for function targets, ATen overloads, and methods written as ".name"."""

    def register(reader: Reader) -> Reader:
        for spelling in spellings:
            READERS[spelling] = reader
        return reader

    return register


def opaque(node: fx.Node) -> Term:
    """A node whose meaning no pattern asks for."""
    return Term("opaque", (), (node,))


def arguments(node: fx.Node, *names: str) -> list:
    """Arguments of a call by name; "a|b" are two names of one; a missing one is None."""
    values = list(node.args[: len(names)])
    for name in names[len(values) :]:
        given = [node.kwargs[alias] for alias in name.split("|") if alias in node.kwargs]
        values.append(given[0] if given else None)
    return values


def is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
