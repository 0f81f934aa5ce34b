"""What looks like a gate that a pattern knows and is another one: one sentence for each."""

from __future__ import annotations

from torch import fx

from fxfuse.match import Bound, Decline, Expr, Fusion, Term, View, maybe_cast, upcast, var, word
from fxfuse.patterns.norms import Norm, rms_norm_of, weight_problem

normed = upcast(rms_norm_of(var("h")))


def _activated(name: str) -> Expr:
    return maybe_cast(word(name, var("gate")), "activation_cast")


def _unlike(reason: str, expression: Expr) -> Fusion:
    """A pattern that fits what must not be fused, and says why."""

    def build(b: Bound) -> Decline | None:
        shape = b.shape("gate")
        if shape is not None and len(shape) < 2:
            return None  # one value for each column is a weight
        return None if weight_problem(Norm(b)) else b.decline(reason)

    return Fusion(reason, expression, build)


LOOK_ALIKES = (
    _unlike("its gate is a sigmoid: only silu gates are fused", normed * _activated("sigmoid")),
    _unlike("its gate is a gelu: only silu gates are fused", normed * _activated("gelu")),
    _unlike("its gate is a tanh: only silu gates are fused", normed * _activated("tanh")),
    _unlike("its gate is a relu: only silu gates are fused", normed * _activated("relu")),
    _unlike(
        "its gate is added to the norm: only a gate that multiplies it is fused",
        normed + _activated("silu"),
    ),
)


def other_gate(view: View, node: fx.Node) -> str | None:
    """Why a norm with something like a gate is not taken for one with a silu gate, or None."""
    return reason_of(LOOK_ALIKES, view, node)


def reason_of(look_alikes: tuple[Fusion, ...], view: View, node: fx.Node) -> str | None:
    """The reason of the first look-alike that fits at a node, or None."""
    word = view.term(node).word
    for fusion in look_alikes:
        if word in fusion.expression.words:
            for b in fusion.ways(view, node):
                found = fusion.build(b)
                if found is not None:
                    return found.reason
    return None


def rounded_silu(view: View, node: fx.Node) -> str | None:
    """Why a factor that is almost a silu is none, or None for other nodes."""
    term = view.term(node)
    if term.word != "mul":
        return None
    factors = [view.see(factor) for factor in term.args]
    flaws = [f.flaw for f in factors if f is not None and f.word == "silu" and f.flaw]
    return flaws[0] if flaws else _scaled_sigmoid(view, term)


def _scaled_sigmoid(view: View, product: Term) -> str | None:
    """Of g * sigmoid(c * g)."""
    for gate, factor in (product.args, product.args[::-1]):
        sigmoid = view.see(factor)
        inner = view.see(sigmoid.args[0]) if sigmoid and sigmoid.word == "sigmoid" else None
        if inner is not None and inner.word == "mul" and gate in inner.args:
            other = inner.args[1] if inner.args[0] is gate else inner.args[0]
            scale = view.facts.number(other)
            if scale is not None:
                return f"its sigmoid is of its gate times {scale:g}: that is no silu"
    return None
