"""The words that patterns are written in, and how they are found in a graph.

A pattern is an expression over the vocabulary of `fxfuse.view`, written like the mathematics:

    x, w, eps = var("x"), var("weight"), scalar("eps")
    norm = maybe_cast(upcast(x) * rsqrt(mean(square(upcast(x))) + eps)) * w

`+` and `*` match in either order, `|` is a choice. Matching is a search that backtracks: an
expression yields once for each way in which it fits, and the `Bound` holds what the way at hand
has bound.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import fx

from fxfuse.cast_spellings import behind_casts
from fxfuse.errors import BadPattern
from fxfuse.facts import Facts, is_permuted, known_equal, order_in_memory, same_shape
from fxfuse.powers import power_of, width_of
from fxfuse.term import Attr, Term, ViewLike, spelt
from fxfuse.view import View

__all__ = [
    "Bound", "Call", "Decline", "Derived", "Expr", "Fork", "Fusion", "Term", "View",
    "Viewed", "behind_casts", "call_of", "holding", "is_permuted", "item", "known_equal",
    "maybe_cast", "mean", "named", "order_in_memory",
    "power_of", "reshaped", "rsqrt", "same_shape", "scalar",
    "square", "upcast", "var", "width_of", "word",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Decline:
    """A pattern's refusal of a site that has the right form; the reason is for the user."""

    reason: str


@dataclass(frozen=True, slots=True)
class Derived:
    """An operand that no node holds yet: a cheap op on other operands, such as a view.

    value: the fake tensor that stands for it, where those of the operands are known.
    """

    op: torch._ops.OpOverload
    args: tuple
    value: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Viewed:
    """A result that the graph has in another shape: `name` stands for `op(result, *args)`.

    value: the fake tensor that stands for the result itself.
    """

    name: str
    op: torch._ops.OpOverload
    args: tuple
    value: torch.Tensor


@dataclass(frozen=True, slots=True)
class Fork:
    """An op that returns one result more: an alias of its operand `of`, for who reads that later.

    pattern: under which it is counted and chosen, beside the pattern that it belongs to.
    """

    op: torch._ops.OpOverload
    of: str
    pattern: str


@dataclass(frozen=True, slots=True)
class Call:
    """The op call that replaces a site; see `Bound.call`."""

    op: torch._ops.OpOverload
    args: tuple
    kwargs: dict
    outputs: tuple[str | Viewed, ...]
    root: int | None = 0
    like: fx.Node | None = None
    fork: Fork | None = None
    saves: tuple | None = None

    @property
    def operands(self) -> tuple[fx.Node | Attr, ...]:
        """What it reads, also inside of lists and of derived operands."""
        return tuple(_leaves(self.args))


def _leaves(operand: object) -> Iterator[fx.Node | Attr]:
    if isinstance(operand, (list, tuple)):
        for one in operand:
            yield from _leaves(one)
    elif isinstance(operand, Derived):
        yield from _leaves(operand.args)
    elif isinstance(operand, (fx.Node, Attr)):
        yield operand


class Bound:
    """What one way of matching bound: names, and the nodes that the match covers."""

    def __init__(self, view: View, root: fx.Node) -> None:
        self.view = view
        self.root = root
        self.names: dict[str, object] = {}
        self.nodes: list[fx.Node] = []
        self._trail: list[str] = []

    @property
    def facts(self) -> Facts:
        return self.view.facts

    def __getattr__(self, name: str) -> object:
        try:
            return self.__dict__["names"][name]
        except KeyError:
            raise AttributeError(f"this match bound no {name!r}") from None

    def has(self, name: str) -> bool:
        return self.names.get(name) is not None

    def get(self, name: str, default: object = None) -> object:
        return self.names.get(name, default)

    def dtype(self, name: str) -> torch.dtype | None:
        return self.facts.dtype(self.names.get(name))

    def shape(self, name: str) -> tuple | None:
        return self.facts.shape(self.names.get(name))

    def call(
        self,
        op: torch._ops.OpOverload,
        *args: object,
        outputs: tuple[str | Viewed, ...],
        root: int | None = 0,
        like: fx.Node | None = None,
        fork: Fork | None = None,
        saves: tuple | None = None,
        **kwargs: object,
    ) -> Call:
        """The op to put there: always an overload, since a Python function would miss every cache.

        outputs: what its results stand for, in order. The one at `root` is the last node of the
        match, the others are names that the pattern keeps; a name that is not bound is a result
        that nobody uses. root None: the last node is itself a call with the same results. like: the
        call that this one makes larger, with the metadata of the results. fork: the op to take
        where x is read after the match. saves: the operands that the op keeps for its backward,
        None for all; it keeps its results besides the one at `root` in any case.
        """
        return Call(op, args, kwargs, outputs, root, like, fork, saves)

    def decline(self, reason: str) -> Decline:
        return Decline(reason)

    def term(self, name: str) -> Term:
        """What a bound node means, behind steps that change nothing."""
        term = self.view.term(self.names[name])
        while _changes_nothing(self.facts, term):
            term = self.view.term(term.args[0])
        return term

    def is_read_outside(self, node: fx.Node) -> bool:
        """Whether the graph uses a node elsewhere than in the match."""
        return bool(self.readers_outside(node))

    def readers_outside(self, node: fx.Node) -> list[fx.Node]:
        """Who uses a node elsewhere than in the match."""
        return [u for u in node.users if u not in self.nodes and (u.users or u.op == "output")]

    # ---- used by expressions ----

    def mark(self) -> tuple[int, int]:
        return len(self.nodes), len(self._trail)

    def undo(self, mark: tuple[int, int]) -> None:
        del self.nodes[mark[0] :]
        while len(self._trail) > mark[1]:
            del self.names[self._trail.pop()]

    def bind(self, name: str, value: object) -> bool:
        """Bind a name, or check that it is bound to the same thing already."""
        if name in self.names:
            known = self.names[name]
            return known is value or (not isinstance(value, fx.Node) and known == value)
        self.names[name] = value
        self._trail.append(name)
        return True


class Expr:
    """Base of all expressions. `words`: what the outermost term can be, None for anything."""

    words: frozenset[str] | None = None

    def match(self, operand: object, b: Bound) -> Iterator[None]:
        raise NotImplementedError

    def needs(self) -> set[frozenset[str]]:
        """Sets of words, one of which has to be there for a match to be possible."""
        return {frozenset()}

    def __add__(self, other: Expr) -> Expr:
        return Word("add", self, other, commutes=True)

    def __mul__(self, other: Expr) -> Expr:
        return Word("mul", self, other, commutes=True)

    def __or__(self, other: Expr) -> Expr:
        return Either(self, other)


class Word(Expr):
    """A term of the vocabulary with the given operands."""

    def __init__(self, word: str, *parts: Expr, commutes: bool = False) -> None:
        self.word, self.words = word, frozenset({word})
        self.orders = (parts, parts[::-1]) if commutes else (parts,)

    def match(self, operand: object, b: Bound) -> Iterator[None]:
        term = _look_through(operand, b)
        if term is None or term.word != self.word or term.flaw:
            return
        mark = b.mark()
        b.nodes.extend(term.nodes)
        for parts in self.orders:
            yield from self._operands(parts, term.args, b)
        b.undo(mark)

    def needs(self) -> set[frozenset[str]]:
        found = {frozenset({self.word})}
        for part in self.orders[0]:
            found = {one | other for one in found for other in part.needs()}
        return _smallest(found)

    def _operands(self, parts: tuple, operands: tuple, b: Bound) -> Iterator[None]:
        if not parts:
            yield
            return
        for _ in parts[0].match(operands[0], b):
            yield from self._operands(parts[1:], operands[1:], b)


class Either(Expr):
    def __init__(self, *choices: Expr) -> None:
        self.choices = choices
        sets = [c.words for c in choices]
        self.words = None if None in sets else frozenset().union(*sets)

    def match(self, operand: object, b: Bound) -> Iterator[None]:
        for choice in self.choices:
            yield from choice.match(operand, b)

    def needs(self) -> set[frozenset[str]]:
        return _smallest(set().union(*(c.needs() for c in self.choices)))


class Var(Expr):
    """Any tensor; the same tensor wherever the name stands."""

    def __init__(self, name: str, optional: bool) -> None:
        self.name, self.optional = name, optional

    def match(self, operand: object, b: Bound) -> Iterator[None]:
        if not isinstance(operand, (fx.Node, Attr)) and not (self.optional and operand is None):
            return
        mark = b.mark()
        if b.bind(self.name, operand):
            yield
        b.undo(mark)


class Scalar(Expr):
    """A number that is known when the graph is rewritten."""

    def __init__(self, name: str, optional: bool) -> None:
        self.name, self.optional = name, optional

    def match(self, operand: object, b: Bound) -> Iterator[None]:
        value = b.facts.number(operand)
        if value is None and not (self.optional and operand is None):
            return
        mark = b.mark()
        if b.bind(self.name, value):
            yield
        b.undo(mark)


class Named(Expr):
    """An inner expression whose node is bound too: to ask about it, or to return its value."""

    def __init__(self, name: str, inner: Expr) -> None:
        self.name, self.inner, self.words = name, inner, inner.words

    def needs(self) -> set[frozenset[str]]:
        return self.inner.needs()

    def match(self, operand: object, b: Bound) -> Iterator[None]:
        node = operand.nodes[0] if isinstance(operand, Term) else operand
        if not isinstance(node, fx.Node):
            return
        if self.name in b.names:
            if b.names[self.name] is node:
                yield
            return
        mark = b.mark()
        b.bind(self.name, node)
        yield from self.inner.match(operand, b)
        b.undo(mark)


class MaybeCast(Expr):
    """The inner expression, or one cast of it, which is bound to `name`."""

    def __init__(self, inner: Expr, name: str) -> None:
        self.inner, self.name = inner, name
        self.words = None if inner.words is None else inner.words | {"cast"}

    def needs(self) -> set[frozenset[str]]:
        return self.inner.needs()

    def match(self, operand: object, b: Bound) -> Iterator[None]:
        term = _look_through(operand, b)
        if term is not None and term.word == "cast" and self.name not in b.names:
            mark = b.mark()
            b.nodes.extend(term.nodes)
            b.bind(self.name, term.nodes[0])
            yield from self.inner.match(term.args[0], b)
            b.undo(mark)
        yield from self.inner.match(operand, b)


class Upcast(Expr):
    """The inner expression behind any casts that lose nothing; the outermost is bound to `name`.

    or_not: try the operand with its casts as well.
    """

    def __init__(self, inner: Expr, name: str | None, or_not: bool) -> None:
        self.inner, self.name, self.or_not = inner, name, or_not

    def needs(self) -> set[frozenset[str]]:
        return self.inner.needs()

    def match(self, operand: object, b: Bound) -> Iterator[None]:
        mark = b.mark()
        term = b.view.see(operand)
        first, cast = operand, None
        while term is not None and _keeps(b.facts, term):
            b.nodes.extend(term.nodes)
            cast = cast or term.nodes[0]
            operand = term.args[0]
            term = b.view.see(operand)
        if cast is not None and self.name and self.name not in b.names:
            b.bind(self.name, cast)
        yield from self.inner.match(operand, b)
        b.undo(mark)
        if self.or_not and operand is not first:
            yield from self.inner.match(first, b)


class Reshaped(Expr):
    """The inner expression behind any views, which keep the elements and their order."""

    def __init__(self, inner: Expr) -> None:
        self.inner = inner
        self.words = None if inner.words is None else inner.words | {"view"}

    def needs(self) -> set[frozenset[str]]:
        return self.inner.needs()

    def match(self, operand: object, b: Bound) -> Iterator[None]:
        yield from self.inner.match(operand, b)
        mark = b.mark()
        term = _look_through(operand, b)
        while term is not None and term.word == "view":
            b.nodes.extend(term.nodes)
            yield from self.inner.match(term.args[0], b)
            term = _look_through(term.args[0], b)
        b.undo(mark)


class Holding(Expr):
    """The inner expression, whose node is made of all of the given words, at whatever depth."""

    def __init__(self, inner: Expr, holds: frozenset[str]) -> None:
        self.inner, self.holds, self.words = inner, holds, inner.words

    def needs(self) -> set[frozenset[str]]:
        return {need | self.holds for need in self.inner.needs()}

    def match(self, operand: object, b: Bound) -> Iterator[None]:
        if self.holds <= b.view.words(operand):
            yield from self.inner.match(operand, b)


def _smallest(sets: set[frozenset[str]]) -> set[frozenset[str]]:
    return {one for one in sets if not any(other < one for other in sets)}


def _look_through(operand: object, b: Bound) -> Term | None:
    term = b.view.see(operand)
    while term is not None and _changes_nothing(b.facts, term):
        b.nodes.extend(term.nodes)
        term = b.view.see(term.args[0])
    return term


def _changes_nothing(facts: Facts, term: Term) -> bool:
    """True of a cast to the dtype that its operand is known to have, and of no step at all."""
    if term.word != "cast":
        return term.word == "same"
    dtype = facts.dtype(term.args[0])
    return dtype is not None and dtype == term.dtype


_WIDER = {
    torch.float16: (torch.float16, torch.float32, torch.float64),
    torch.bfloat16: (torch.bfloat16, torch.float32, torch.float64),
    torch.float32: (torch.float32, torch.float64),
    torch.float64: (torch.float64,),
}


def _keeps(facts: Facts, cast: Term) -> bool:
    """True of a cast that loses no bits; of an unknown dtype only to fp32 or fp64 is one."""
    if cast.word != "cast":
        return False
    source, target = facts.dtype(cast.args[0]), cast.dtype
    if source is None:
        return target in (torch.float32, torch.float64)
    return target in _WIDER.get(source, ())


# ---- the words --------------------------------------------------------------------------------


def var(name: str, optional: bool = False) -> Expr:
    return Var(name, optional)


def scalar(name: str, optional: bool = False) -> Expr:
    return Scalar(name, optional)


def named(name: str, inner: Expr) -> Expr:
    return Named(name, inner)


def maybe_cast(inner: Expr, name: str) -> Expr:
    return MaybeCast(inner, name)


def upcast(inner: Expr, name: str | None = None, or_not: bool = False) -> Expr:
    return Upcast(inner, name, or_not)


def reshaped(inner: Expr) -> Expr:
    return Reshaped(inner)


def holding(inner: Expr, *words: str) -> Expr:
    return Holding(inner, frozenset(words))


def word(name: str, *parts: Expr) -> Expr:
    """A term by its word in the vocabulary, for words that have no function here."""
    return Word(name, *parts)


def call_of(word: str, *ops: torch._ops.OpOverload) -> Expr:
    """A call of one of `ops`, which from now on are called `word` in the vocabulary."""

    @spelt(*ops)
    def read(view: ViewLike, node: fx.Node) -> Term:
        return Term(word, (), (node,))

    return Word(word)


def item(source: Expr, index: Expr) -> Expr:
    """One result of a call with several."""
    return Word("item", source, index)


def square(x: Expr) -> Expr:
    return Word("square", x)


def mean(x: Expr) -> Expr:
    return Word("mean", x)


def rsqrt(x: Expr) -> Expr:
    return Word("rsqrt", x)


# ---- fusions ----------------------------------------------------------------------------------

Builder = Callable[[Bound], "Call | Decline | None"]
NearMiss = Callable[[View, fx.Node], "str | None"]


@dataclass(frozen=True)
class Fusion:
    """A pattern: what to look for and what to put there.

    build returns the op call, a `Decline` with the reason, or None: "not in this way", on which the
    search goes on without a word. keep: bound names whose nodes may be used outside of the match,
    because the op returns them. size: of two patterns that fit one node the larger is tried first.
    near_miss: for a node that no pattern took, the reason if it looks like this pattern, or None.
    backward: it is about backward ops; such patterns are tried last, again and again.
    any_dim: its norms may be over another dimension than the last; `b.facts.dim` says which.
    """

    name: str
    expression: Expr
    build: Builder
    keep: tuple[str, ...] = ()
    size: int = 0
    near_miss: NearMiss | None = None
    backward: bool = False
    any_dim: bool = False

    @functools.cached_property
    def needs(self) -> set[frozenset[str]]:
        return self.expression.needs()

    def built(self, b: Bound) -> Call | Decline | None:
        """What `build` returns; raises BadPattern where it raises anything."""
        with self._named("build"):
            return self.build(b)

    def looks_like(self, view: View, node: fx.Node) -> str | None:
        """What `near_miss` returns; raises BadPattern where it raises anything."""
        with self._named("near_miss"):
            return self.near_miss(view, node) if self.near_miss else None

    @contextlib.contextmanager
    def _named(self, part: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            problem = f"its {part} raised {type(error).__name__}: {error}"
            raise BadPattern(pattern=self.name, problem=problem) from error

    def ways(self, view: View, node: fx.Node) -> Iterator[Bound]:
        """Each way in which the pattern fits with `node` as its last node."""
        words = view.words(node)
        if not any(need <= words for need in self.needs):
            return  # the search would fail, but not as fast
        b = Bound(view, node)
        for _ in self.expression.match(node, b):
            yield b
