"""How a silu gate is spelt, and which numerics each spelling means. The patterns share both."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fxfuse.match import Bound, Decline, Expr, maybe_cast, named, same_shape, upcast, var, word
from fxfuse.patterns.norms import FLOATS, HALVES, UNKNOWN, name_of, opmath


def silu_gate_of(x: Expr) -> Expr:
    """x * silu(gate), in any spelling of silu and with casts around each of them."""
    gate = upcast(var("gate"), "gate_cast", or_not=True)
    silu = named("silu", word("silu", gate, var("sigmoid", optional=True)))
    product = named("product_with_gate", x * maybe_cast(silu, "silu_cast"))
    return named("gated", maybe_cast(product, "gated_cast"))


def gate_problem(b: Bound, x: str) -> str | None:
    """Why the gate cannot gate what is bound to the name `x`, or None."""
    for name, what in ((x, "what it gates"), ("gate", "its gate")):
        dtype = b.dtype(name)
        if not b.facts.is_tensor(b.get(name)):
            return f"{what} is a number, not a tensor"
        if dtype is not None and dtype not in FLOATS:
            return f"{what} is {name_of(dtype)}, not a floating-point tensor"
    gate, gated = b.shape("gate"), b.shape(x)
    if gate is not None and gated is not None and not same_shape(gate, gated):
        return f"its gate of shape {tuple(gate)} and what it gates, {tuple(gated)}, broadcast"
    return None


def _is_swapped(b: Bound) -> bool:
    """Whether the silu is the first operand of the product, which decides how that lies."""
    operand = b.term("product_with_gate").args[0]
    while operand is not b.silu:
        term = b.view.see(operand)
        if term is None or term.word not in ("cast", "same"):
            return False
        operand = term.args[0]
    return True


def gating(b: Bound, x: str, dtypes: Mapping[object, str]) -> dict | Decline | None:
    """The attributes of the op: the dtypes to which the graph rounds sigmoid, silu and product.

    x: the name of what is gated. dtypes: nodes whose dtype an attribute can name, without metadata.
    None where the match should be tried in another way.
    """
    known = all(b.facts.value(b.get(name)) is not None for name in (x, "gate", "gated"))
    found = _from_metadata(b, x) if known else _without_metadata(b, x, dtypes)
    return found | {"swapped": True} if isinstance(found, dict) and _is_swapped(b) else found


def _from_metadata(b: Bound, x: str) -> dict | None:
    wide = opmath(b.dtype("gate"))
    inner, product, out = b.dtype("silu"), b.dtype("product_with_gate"), b.dtype("gated")
    if opmath(b.dtype("gate_cast") or b.dtype("gate")) != wide or out not in FLOATS:
        return None
    silu = b.dtype("silu_cast") or inner
    if torch.promote_types(inner, silu) == silu:
        silu = inner
    elif inner != wide or silu not in FLOATS:
        return None  # it is rounded twice
    if product != torch.promote_types(b.dtype(x), silu):
        return None
    return {
        "sigmoid_dtype": _rounding(b.dtype("sigmoid"), wide),
        "silu_dtype": _rounding(silu, wide),
        "out_dtype": name_of(out),
    }


def _rounding(dtype: torch.dtype | None, wide: torch.dtype) -> str:
    return name_of(dtype) if dtype in HALVES or dtype not in (None, wide) else ""


def _without_metadata(b: Bound, x: str, dtypes: Mapping[object, str]) -> dict | Decline | None:
    def cast(name: str) -> str | None:
        """A bound cast as an attribute: "" if there is none, None if its dtype is not known."""
        if not b.has(name):
            return ""
        dtype = b.view.term(b.get(name)).dtype
        return name_of(dtype) if isinstance(dtype, torch.dtype) else dtypes.get(dtype)

    computed, rounded, out, wide_x = map(cast, ("gate_cast", "silu_cast", "gated_cast", "x_cast"))
    if computed == "float64":
        return None  # a gate without the cast may have its silu in float32
    if None in (rounded, out) or rounded not in ("", "gate", "input", "float16", "bfloat16"):
        return Decline(UNKNOWN)
    if rounded not in ("", "gate") and not computed:
        return Decline(UNKNOWN)  # it is rounded twice
    silu = rounded or computed or "gate"
    if wide_x and wide_x != silu:
        return None
    return {
        "sigmoid_dtype": "gate" if b.has("sigmoid") and not computed else "",
        "silu_dtype": silu,
        "out_dtype": out or wide_x,
    }
