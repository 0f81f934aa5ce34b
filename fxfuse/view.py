"""What a node means, however it was spelt.

A `View` reads a torch.fx graph as `Term`s over one small vocabulary: Dynamo's torch functions and
methods, leaf modules of a symbolic trace, ATen from export, make_fx and AOTAutograd all come out
as `add`, `mul`, `square`, `mean`, `rsqrt`, `cast`, `rms_norm`, and the rest as `opaque`. The
spellings are in `fxfuse.spellings`. The view never changes a graph.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx

from fxfuse.facts import Facts
from fxfuse.memory import Memory
from fxfuse.powers import simplified
from fxfuse.spellings import read_leaf
from fxfuse.term import READERS, Term, opaque


@dataclass
class View:
    """The terms of one graph, read on demand and remembered.

    dim: the dimension that means, sums and norms are read over, see `Facts`; all else is opaque.
    """

    graph_module: fx.GraphModule
    dim: int = -1
    facts: Facts = field(init=False)
    memory: Memory = field(init=False)
    _terms: dict[fx.Node, Term] = field(default_factory=dict)
    _words: dict[fx.Node, frozenset[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.facts = Facts(self.graph_module, self.dim)
        self.memory = Memory(self.graph_module, self.facts)

    def term(self, node: fx.Node) -> Term:
        known = self._terms.get(node)
        if known is None:
            known = self._terms[node] = self._read(node)
        return known

    def see(self, operand: object) -> Term | None:
        """The term behind an operand; None for a number, None or an `Attr`."""
        if isinstance(operand, fx.Node):
            return self.term(operand)
        return operand if isinstance(operand, Term) else None

    def words(self, operand: object) -> frozenset[str]:
        """The words that an operand is made of, down to what is opaque: all that a match sees."""
        if isinstance(operand, Term):
            return frozenset({operand.word}).union(*map(self.words, operand.args))
        if not isinstance(operand, fx.Node):
            return frozenset()
        known = self._words.get(operand)
        if known is None:
            term = self.term(operand)
            known = frozenset() if term.word == "opaque" else self.words(term)
            self._words[operand] = known
        return known

    def _read(self, node: fx.Node) -> Term:
        if node.kwargs.get("out") is not None:
            return opaque(node)  # it writes to a tensor that somebody else holds
        if node.op == "call_module":
            return read_leaf(self, node)
        reader = None
        if node.op == "call_function":
            reader = READERS.get(node.target)
        elif node.op == "call_method":
            reader = READERS.get("." + node.target)
        return simplified(self, reader(self, node)) if reader else opaque(node)
