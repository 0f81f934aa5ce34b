"""One number a row, (scale * total + shift) ** exponent, of a sum or mean of that row.

Constants may stand anywhere in such a number, and in what it scales: under the root or outside of
it, on the sum, the root, the row. `simplified` moves them to where patterns look for them, so that
sqrt(N) * x / sqrt(sum(x * x)) becomes x * rsqrt(mean(x * x)).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import fx

from fxfuse.cast_spellings import behind_casts
from fxfuse.facts import Facts
from fxfuse.term import Term, ViewLike

_WIDE = (torch.float32, torch.float64)
_DEEPEST = 10  # steps that one number is followed through
_EXPONENTS = (0.125, 8.0)


@dataclass(frozen=True)
class Power:
    """(scale * total + shift) ** exponent, or the logarithm of that.

    total: a mean or a sum over the last dimension. nodes: of the steps, outermost first.
    """

    total: Term
    nodes: tuple[fx.Node, ...] = ()
    scale: float = 1.0
    shift: float = 0.0
    exponent: float = 1.0
    is_log: bool = False

    def times(self, factor: float) -> Power | None:
        if self.is_log:
            return self._with_exponent(self.exponent * factor)
        if factor <= 0:
            return None
        inner = factor ** (1 / self.exponent)
        return replace(self, scale=self.scale * inner, shift=self.shift * inner)

    def plus(self, number: float) -> Power | None:
        if self.is_log or self.exponent != 1:
            return None
        return replace(self, shift=self.shift + number)

    def to_the(self, exponent: float) -> Power | None:
        if self.is_log or (self.shift < 0 and self.exponent != 1):
            return None
        return self._with_exponent(self.exponent * exponent)

    def logarithm(self) -> Power | None:
        return None if self.is_log else replace(self, is_log=True)

    def exponential(self) -> Power | None:
        return replace(self, is_log=False) if self.is_log else None

    def _with_exponent(self, exponent: float) -> Power | None:
        least, most = _EXPONENTS
        return replace(self, exponent=exponent) if least <= abs(exponent) <= most else None

    def of_mean(self, facts: Facts) -> float | None:
        """What a mean is multiplied by in it, None if that is not known."""
        if self.total.word == "mean":
            return self.scale
        width = width_of(facts, self.total)
        return self.scale * width if isinstance(width, int) else None

    def root(self, facts: Facts) -> Term | None:
        """The same as a (reciprocal) root of a mean plus a number, where it is one."""
        word = {0.5: "sqrt", -0.5: "rsqrt"}.get(self.exponent)
        scale = self.of_mean(facts)
        if word is None or self.is_log or scale is None or abs(scale - 1) > 1e-9:
            return None
        mean = Term("mean", self.total.args, self.total.nodes)
        below = Term("add", (mean, self.shift), self.total.nodes) if self.shift else mean
        return Term(word, (below,), self.nodes)


# By word: what becomes of a power, with the number that the step has. Of two operands the power is
# the second in the word "under".
STEPS: dict[str, Callable[[Power, float | None], Power | None]] = {
    "same": lambda power, _: power,
    "sqrt": lambda power, _: power.to_the(0.5),
    "rsqrt": lambda power, _: power.to_the(-0.5),
    "reciprocal": lambda power, _: power.to_the(-1),
    "square": lambda power, _: power.to_the(2),
    "log": lambda power, _: power.logarithm(),
    "exp": lambda power, _: power.exponential(),
    "neg": lambda power, _: power.times(-1),
    "power": lambda power, number: power.to_the(number),
    "add": lambda power, number: power.plus(number),
    "mul": lambda power, number: power.times(number),
    "div": lambda power, number: power.times(1 / number) if number else None,
    "under": lambda power, number: _inverse(power, number),
}
_WITH_NUMBER = ("power", "add", "mul", "div", "under")


def _inverse(power: Power, number: float) -> Power | None:
    inverse = power.to_the(-1)
    return inverse and inverse.times(number)


def power_of(view: ViewLike, operand: object, inside: bool = False, deep: int = 0) -> Power | None:
    """An operand as a power of a sum or a mean, None for all others.

    inside: whether to look for constants in what is squared too.
    """
    term = view.see(operand)
    if term is None or term.flaw or deep > _DEEPEST:
        return None
    if term.word in ("mean", "sum"):
        return _total(view, term, inside)
    word, inner, number = term.word, term.args[0] if term.args else None, None
    if word not in STEPS:
        return None
    if word in _WITH_NUMBER:
        word, inner, number = _one_number(view, term)
        if number is None:
            return None
    power = power_of(view, inner, inside, deep + 1)
    found = STEPS[word](power, number) if power else None
    return found and replace(found, nodes=(*term.nodes, *power.nodes))


def _one_number(view: ViewLike, term: Term) -> tuple[str, object, float | None]:
    """The word, the operand and the number of a step with one constant; no number in others."""
    first, second = term.args
    number = view.facts.constant(second)
    if number is not None or term.word == "power":
        return term.word, first, number
    return "under" if term.word == "div" else term.word, second, view.facts.constant(first)


def _total(view: ViewLike, total: Term, inside: bool) -> Power:
    """A sum or mean, less the constants that each of its elements is multiplied by or has added."""
    scale, shift, nodes, operand = 1.0, 0.0, (), total.args[0]
    while (step := _constant_step(view, operand)) is not None:
        inner, factor, number, more = step
        if number and total.word == "sum":
            break
        scale, shift, nodes, operand = (
            scale * factor, shift + scale * number, (*nodes, *more), inner
        )  # fmt: skip
    square = view.see(operand)
    step = _constant_step(view, square.args[0]) if inside and square.word == "square" else None
    if step is not None and not step[2]:
        inner, factor, _, more = step
        operand = Term("square", (inner,), (*square.nodes, *more))
        scale *= factor**2
    return Power(Term(total.word, (operand,), (*total.nodes, *nodes)), (), scale, shift)


_Step = tuple[object, float, float, tuple[fx.Node, ...]]


def _constant_step(view: ViewLike, operand: object) -> _Step | None:
    """inner, factor, number and nodes of an operand that is factor * inner + number."""
    term = view.see(operand)
    if term is None or term.flaw or term.word not in ("mul", "div", "add"):
        return None
    if view.facts.dtype(term.nodes[0]) not in _WIDE:
        return None  # a half is rounded on the way
    word, inner, number = _one_number(view, term)
    if not number or word == "under":
        return None
    factor = {"mul": number, "div": 1 / number, "add": 1.0}[word]
    return inner, factor, number if word == "add" else 0.0, term.nodes


def width_of(facts: Facts, total: Term) -> object:
    """How many values a sum or mean is of, None if that is not known."""
    inner = total.args[0]
    while isinstance(inner, Term):
        inner = inner.args[0]
    shape = facts.shape(inner)
    return shape[facts.dim] if shape else None


# ---- what patterns are to see -------------------------------------------------------------------


def simplified(view: ViewLike, term: Term) -> Term:
    """The same with constants moved, if that makes a root of a mean, or a product with one."""
    if term.word in ("mul", "div"):
        return _root(view, term) or _product(view, term) or term
    if term.word in STEPS and term.word not in ("same", "add", "neg"):
        return _root(view, term) or term
    return term


def _root(view: ViewLike, term: Term) -> Term | None:
    if _is_plain(view, term):
        return None
    for inside in (False, True):
        power = power_of(view, term, inside)
        root = power.root(view.facts) if power else None
        if root is not None and _in_one_dtype(view, root.nodes):
            return root
    return None


def _is_plain(view: ViewLike, root: Term) -> bool:
    """Whether it is a root of a mean of squares, or of that plus a number, as it stands."""
    below = view.see(root.args[0]) if root.word in ("sqrt", "rsqrt") else None
    if below is not None and below.word == "add":
        below = next((t for t in map(view.see, below.args) if t is not None), None)
    squares = view.see(below.args[0]) if below is not None and below.word == "mean" else None
    return squares is not None and squares.word == "square"


@dataclass(frozen=True)
class _Product:
    """The product of its rows, constants and power; nodes: the steps that are taken apart."""

    rows: tuple[object, ...] = ()
    constants: tuple[float, ...] = ()
    power: Power | None = None
    nodes: tuple[fx.Node, ...] = ()

    def over(self) -> _Product | None:
        """1 / the same, of what has no rows."""
        power = self.power and self.power.to_the(-1)
        if self.rows or (self.power and not power):
            return None
        return replace(self, constants=tuple(1 / c for c in self.constants), power=power)

    def times(self, other: _Product) -> _Product | None:
        if self.power and other.power:
            return None
        return _Product(
            self.rows + other.rows,
            self.constants + other.constants,
            self.power or other.power,
            self.nodes + other.nodes,
        )


def _product(view: ViewLike, term: Term) -> Term | None:
    """row * rsqrt(mean + eps), or that times another row, whatever constants were in between."""
    for product in _products(view, term):
        if product.power is None or not 1 <= len(product.rows) <= 2:
            continue
        if not product.constants or not _has_its_row(view, product):
            continue  # there is nothing to move, or to no avail
        power = product.power.times(math.prod(product.constants))
        root = power.root(view.facts) if power else None
        if root is None or root.word != "rsqrt" or not _in_one_dtype(view, product.nodes):
            continue
        unit = Term("mul", (product.rows[0], root), product.nodes)
        return Term("mul", (unit, product.rows[1]), product.nodes) if product.rows[1:] else unit
    return None


def _products(view: ViewLike, term: Term, deep: int = 0) -> Iterator[_Product]:
    """Ways to read a product or quotient, the plainest first."""
    for left in _readings(view, term.args[0], deep):
        for right in _readings(view, term.args[1], deep):
            by = right.over() if term.word == "div" else right
            product = by and left.times(by)
            if product:
                yield replace(product, nodes=term.nodes + product.nodes)


def _readings(view: ViewLike, operand: object, deep: int) -> Iterator[_Product]:
    number = view.facts.constant(operand)
    if number is not None:
        if number > 0:
            yield _Product(constants=(number,))
        return
    term = view.see(operand)
    spread = term.nodes if term is not None and term.word == "expand" else ()
    power = power_of(view, term.args[0] if spread else operand)
    if power is not None:
        yield _Product(power=replace(power, nodes=spread + power.nodes))
        return
    yield _Product(rows=(operand,))
    # A half would be rounded before it is scaled.
    wide = term is not None and view.facts.dtype(operand) in _WIDE
    if wide and deep < 2 and term.word in ("mul", "div") and not term.flaw:
        yield from _products(view, term, deep + 1)


def _has_its_row(view: ViewLike, product: _Product) -> bool:
    """Whether one of the rows is that whose squares are summed."""
    square = view.see(product.power.total.args[0])
    if square is None or square.word != "square":
        return False
    source = behind_casts(view, square.args[0])
    return any(behind_casts(view, row) is source for row in product.rows)


def _in_one_dtype(view: ViewLike, nodes: tuple[fx.Node, ...]) -> bool:
    """Whether no step can be rounded more than the others: all are fp32, or fp64, or unknown."""
    dtypes = {view.facts.dtype(node) for node in nodes} - {None}
    return len(dtypes) <= 1 and dtypes.issubset(_WIDE)
