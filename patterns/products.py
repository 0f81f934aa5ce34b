"""A value as a product of powers: `2.0 * g * r ** 3 / N`, whichever way a graph multiplies it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

import torch
from torch import fx

from fxfuse.match import Bound, Term

_DEEPEST = 12  # no gradient of a norm goes as deep
_WORDS = {"mul", "square", "power", "div", "cast", "expand"}


@dataclass(frozen=True)
class Product:
    """factor * (the atoms to their powers); nodes: what computes it from the atoms."""

    factor: float = 1.0
    powers: Counter = field(default_factory=Counter)
    nodes: tuple[fx.Node, ...] = ()

    def __mul__(self, other: Product) -> Product:
        powers = self.powers + other.powers
        return Product(self.factor * other.factor, powers, (*self.nodes, *other.nodes))

    def through(self, nodes: tuple[fx.Node, ...]) -> Product:
        return Product(self.factor, self.powers, (*nodes, *self.nodes))


def bare(b: Bound, node: object) -> tuple[object, tuple[fx.Node, ...]]:
    """A value without the casts that lose nothing, and the nodes that were passed."""
    passed: list[fx.Node] = []
    term = b.view.see(node)
    while term is not None and (term.word in ("same", "detach") or _loses_nothing(b, term)):
        passed.extend(term.nodes)
        node = term.args[0]
        term = b.view.see(node)
    return node, tuple(passed)


def product(b: Bound, operand: object, stops: Collection = (), depth: int = 0) -> Product:
    """What `operand` is a product of, down to `stops` and to what is no product.

    Casts inside of it may round: it is a gradient, which is more exact without them.
    """
    number = b.facts.number(operand)
    if number is not None:
        return Product(float(number))
    atom, passed = bare(b, operand)
    stop = next((s for s in stops if s is atom or b.facts.same_memory(s, atom)), None)
    found = None
    if stop is None and depth < _DEEPEST:
        found = _factors(b, b.view.see(atom), stops, depth + 1)
    if found is None:
        found = Product(powers=Counter([atom if stop is None else stop]))
    return found.through(passed)


def _factors(b: Bound, term: Term | None, stops: Collection, depth: int) -> Product | None:
    if term is None or term.flaw or term.word not in _WORDS:
        return None
    first, found = product(b, term.args[0], stops, depth), None
    if term.word == "mul":
        found = first * product(b, term.args[1], stops, depth)
    elif term.word == "square":
        found = first * first
    elif term.word == "power" and term.args[1] in (1, 3):
        found = first if term.args[1] == 1 else first * first * first
    elif term.word == "div" and b.facts.number(term.args[1]):
        found = first * Product(1 / b.facts.number(term.args[1]))
    elif term.word in ("cast", "expand") and first.powers.total() > 1:
        found = first
    return found and found.through(term.nodes)


def _loses_nothing(b: Bound, term: Term) -> bool:
    if term.word != "cast":
        return False
    source, target = b.facts.dtype(term.args[0]), term.dtype
    if not isinstance(target, torch.dtype) or source is None or not source.is_floating_point:
        return False
    return torch.promote_types(source, target) == target
