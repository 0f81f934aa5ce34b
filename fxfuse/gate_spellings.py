"""How silu and the other activations of gates are spelt.

`g * sigmoid(g)` and `g / (1 + exp(-g))` are read as silu. Its operands are the gate and, where it
is written with a sigmoid, the node of that at which it is rounded: the sigmoid or a cast of it.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from fxfuse.term import Term, ViewLike, arguments, is_number, opaque, spelt

F = torch.nn.functional
aten = torch.ops.aten

_WIDE = (torch.float32, torch.float64)
_UNKNOWN = "its dtypes decide whether it is silu: pass example_inputs to fxfuse.apply"

LEAF_ACTIVATIONS = {
    torch.nn.SiLU: "silu", torch.nn.Sigmoid: "sigmoid", torch.nn.GELU: "gelu",
    torch.nn.Tanh: "tanh", torch.nn.ReLU: "relu",
}  # fmt: skip


def _activation(word: str, *spellings: object) -> None:
    @spelt(*spellings)
    def read(view: ViewLike, node: fx.Node) -> Term:
        return activation(view, node, word, *arguments(node, "input|self"))


def activation(view: ViewLike, node: fx.Node, word: str, x: object) -> Term:
    """An activation of x; one that writes to x is the same if nobody else sees x."""
    if view.memory.writes_of(node) and not is_fresh(view, x):
        return opaque(node)
    return Term(word, (x, None), (node,))


_activation("silu", F.silu, aten.silu.default, aten.silu_.default)
_activation(
    "sigmoid", torch.sigmoid, torch.special.expit, F.sigmoid, ".sigmoid", ".sigmoid_",
    aten.sigmoid.default, aten.sigmoid_.default,
)  # fmt: skip
_activation("gelu", F.gelu, aten.gelu.default)
_activation("tanh", torch.tanh, F.tanh, ".tanh", aten.tanh.default)
_activation("relu", torch.relu, F.relu, ".relu", aten.relu.default)
_activation("neg", operator.neg, torch.neg, ".neg", aten.neg.default)
_activation("exp", torch.exp, ".exp", aten.exp.default)


def is_fresh(view: ViewLike, x: object) -> bool:
    """True for a tensor that has memory of its own and one user, written in place or not."""
    while isinstance(x, fx.Node) and len(x.users) == 1:
        if view.memory.allocates(x):
            return True
        written = [write.target for write in view.memory.writes_of(x)]
        if len(written) != 1 or written[0] is not (x.args or (None,))[0]:
            return False
        x = written[0]
    return False


# ---- products with a sigmoid --------------------------------------------------------------------


def silu_of_product(view: ViewLike, node: fx.Node, x: object, y: object) -> Term | None:
    """g * sigmoid(g) as a silu, and (n * g) * sigmoid(g) as a product with one."""
    for other, share in ((x, y), (y, x)):
        sigmoid = _sigmoid(view, share)
        if sigmoid is not None:
            found = _own_product(view, node, other, sigmoid)
            found = found or _regrouped(view, node, other, sigmoid)
            if found is not None:
                return found
    return None


def _sigmoid(view: ViewLike, share: object) -> Term | None:
    """A sigmoid of its first operand, with one cast of it or none, which are its `nodes`.

    Its second operand is the node of the two that it is rounded at.
    """
    term = view.see(share)
    if term is None or term.word not in ("sigmoid", "cast"):
        return None
    if term.word == "sigmoid":
        return Term("sigmoid", (term.args[0], share), term.nodes)
    inner = view.see(term.args[0])
    if inner is None or inner.word != "sigmoid":
        return None
    before, after = view.facts.dtype(term.args[0]), view.facts.dtype(share)
    if None in (before, after) or (after == torch.float64 != before):
        return None  # the product is in fp64 and its sigmoid is not
    if torch.promote_types(before, after) == after:
        share = term.args[0]
    elif before not in _WIDE:
        return None  # it is rounded twice
    return Term("sigmoid", (inner.args[0], share), (*term.nodes, *inner.nodes))


def _own_product(view: ViewLike, node: fx.Node, gate: object, sigmoid: Term) -> Term | None:
    inside, share = sigmoid.args
    source, casts = _common_source(view, gate, inside)
    if source is None:
        return None
    return Term("silu", (source, share), (node, *sigmoid.nodes, *casts))


def _regrouped(view: ViewLike, node: fx.Node, product: object, sigmoid: Term) -> Term | None:
    """(n * g) * sigmoid(g), where nothing is rounded to half precision on the way."""
    inside, share = sigmoid.args
    inner = view.see(product)
    dtypes = [view.facts.dtype(one) for one in (node, product, share)]
    if inner is None or inner.word != "mul" or dtypes[0] not in _WIDE or len(set(dtypes)) > 1:
        return None
    for n, gate in (inner.args[:2], inner.args[1::-1]):
        source, casts = _common_source(view, gate, inside)
        if source is not None and not is_number(n):
            silu = Term("silu", (source, None), (*sigmoid.nodes, *casts))
            return Term("mul", (n, silu), (node, *inner.nodes))
    return None


def _common_source(
    view: ViewLike, gate: object, inside: object
) -> tuple[object, tuple[fx.Node, ...]]:
    """What the factor and the sigmoid's operand both are, but for casts that lose nothing."""
    if gate is inside:
        return (gate, ()) if isinstance(gate, fx.Node) else (None, ())
    one, casts = _without_casts(view, gate)
    other, more = _without_casts(view, inside)
    dtypes = [view.facts.dtype(operand) for operand in (one, gate, inside)]
    if one is not other or None in dtypes or len({d == torch.float64 for d in dtypes}) > 1:
        return None, ()
    return one, (*casts, *more)


def _without_casts(view: ViewLike, operand: object) -> tuple[object, tuple[fx.Node, ...]]:
    nodes: tuple[fx.Node, ...] = ()
    term = view.see(operand)
    while term is not None and term.word == "cast":
        dtypes = view.facts.dtype(term.args[0]), view.facts.dtype(operand)
        if None in dtypes or torch.promote_types(*dtypes) != dtypes[1]:
            break
        nodes += term.nodes
        operand = term.args[0]
        term = view.see(operand)
    return operand, nodes


# ---- quotients ----------------------------------------------------------------------------------


def silu_of_quotient(view: ViewLike, node: fx.Node, x: object, y: object) -> Term | None:
    """g / (1 + exp(-g)) as a silu, which it is if no step is rounded to half precision."""
    nodes = [node]
    below = view.see(y)
    if below is None or below.word != "add" or not any(is_number(a) for a in below.args):
        return None
    number, inner = below.args if is_number(below.args[0]) else below.args[::-1]
    nodes += below.nodes
    for word in ("exp", "neg"):
        term = view.see(inner)
        if term is None or term.word != word:
            return None
        nodes += term.nodes
        inner = term.args[0]
    if number != 1 or inner is not x:
        return None
    dtypes = {view.facts.dtype(n) for n in nodes}
    flaw = None
    if None in dtypes:
        flaw = _UNKNOWN
    elif len(dtypes) > 1 or not dtypes.issubset(_WIDE):
        names = " and ".join(sorted(str(d).removeprefix("torch.") for d in dtypes))
        flaw = f"the steps of its gate's x / (1 + exp(-x)) are rounded to {names}"
    return Term("silu", (x, None), tuple(nodes), flaw)
