"""How RMSNorm is spelt, and which numerics each spelling means. The patterns share both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from fxfuse.match import (
    Bound,
    Decline,
    Derived,
    Expr,
    Viewed,
    is_permuted,
    known_equal,
    maybe_cast,
    mean,
    named,
    order_in_memory,
    reshaped,
    rsqrt,
    same_shape,
    scalar,
    square,
    upcast,
    var,
    word,
)  # fmt: skip
from fxfuse.patterns.centred import CENTRED, is_centred

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
HALVES = FLOATS[:2]


def rms_norm_of(h: Expr, prefix: str = "", views: bool = False) -> Expr:
    """RMSNorm of `h` over the last dimension, with or without a weight, in any spelling.

    It binds its parts under names that begin with `prefix`, the result as "normed". views: its
    parts may be viewed in other shapes on the way, for a norm over groups of columns.
    """

    def part(name: str, inner: Expr) -> Expr:
        return named(prefix + name, inner)

    def viewed(inner: Expr) -> Expr:
        return reshaped(inner) if views else inner

    mean_square = part("mean", mean(part("square", square(upcast(h, prefix + "statistic_cast")))))
    mean_square = mean_square | word("expand", mean_square)
    eps = scalar(prefix + "eps")
    rstd = part("rstd", rsqrt(mean_square + eps) | rsqrt(mean_square))
    vector = var(prefix + "weight")
    weight = upcast(part("spread", word("spread", vector)), prefix + "weight_cast") | upcast(
        viewed(vector), prefix + "weight_cast", or_not=True
    )
    shifted = part("shifted", scalar(prefix + "offset") + weight)
    scale = part("scale", upcast(shifted) | weight)

    scaled = upcast(h, prefix + "scaled_cast")
    root = maybe_cast(rstd, prefix + "rstd_cast") | word("expand", rstd)
    unit = part("unit", scaled * root)
    whole = part("whole", word("rms_norm", upcast(h, prefix + "whole_cast"),
                               upcast(var(prefix + "inner_weight", optional=True)),
                               scalar(prefix + "eps", optional=True)))  # fmt: skip
    product = part("product", viewed(maybe_cast(viewed(unit), prefix + "unit_cast")) * scale)
    weight_first = part(
        "product",
        part("weighted", scaled * scale) * rstd
        | scaled * maybe_cast(part("weighted", rstd * scale), prefix + "weighted_cast"),
    )
    whole_product = part("product", viewed(whole) * scale)
    return part(
        "normed",
        viewed(maybe_cast(viewed(product | weight_first | whole_product), prefix + "out_cast"))
        | viewed(maybe_cast(viewed(unit | whole), prefix + "out_cast")),
    )  # fmt: skip


@dataclass(frozen=True)
class Norm:
    """One RMSNorm of a match: what `rms_norm_of` bound, by the names without their prefix.

    of: the name of what it normalises. columns: how many values its weight has to have, if not one
    for each column of that. own: what the op calls the dtype of its input, None if it has no name
    for it; dtypes: the same for other nodes. Both are asked only without metadata.
    """

    b: Bound
    prefix: str = ""
    of: str = "h"
    columns: object = None
    own: str | None = "input"
    dtypes: Mapping[object, str] = field(default_factory=dict)

    def node(self, name: str) -> object:
        return self.b.get(self.of if name == "h" else self.prefix + name)

    def has(self, name: str) -> bool:
        return self.node(name) is not None

    def number(self, name: str, default: float | None) -> float | None:
        return self.b.get(self.prefix + name, default)

    def dtype(self, name: str) -> torch.dtype | None:
        return self.b.facts.dtype(self.node(name))

    def shape(self, name: str) -> tuple | None:
        return self.b.facts.shape(self.node(name))

    @property
    def weight(self) -> object:
        return self.node("weight" if self.has("product") else "inner_weight")

    @property
    def vector(self) -> object:
        """The weight as an op takes it, where the graph has it as the only row of a tensor."""
        value = self.b.facts.value(self.weight)
        if value is None or value.dim() == 1:
            return self.weight
        return Derived(torch.ops.aten.view.default, (self.weight, [-1]), value.view(-1))


def numerics(norm: Norm, rounds_rstd: bool = False) -> dict | Decline | None:
    """The attributes of the op: eps, weight_offset and the dtypes between which the graph rounds.

    rounds_rstd: whether the op can round rstd, or that times the weight, before it scales. None
    where the match should be tried in another way (a cast that has to stay outside, `1 + w` that is
    rounded before it is used).
    """
    if norm.has("whole") and norm.has("inner_weight") and norm.has("product"):
        return None
    if is_centred(norm.b.view, norm.node("h")):
        return Decline(CENTRED)
    known = norm.b.facts.value(norm.node("h")) is not None
    problem = (known and (_dtype_problem(norm) or _place_problem(norm))) or weight_problem(norm)
    if problem:
        return Decline(problem)
    dtypes = _from_metadata(norm) if known else _without_metadata(norm)
    if not isinstance(dtypes, dict):
        return dtypes
    # Only norms by themselves round what they scale by.
    if not rounds_rstd and any([dtypes.pop("rstd_dtype"), dtypes.pop("scale_dtype")]):
        return None
    eps = norm.number("eps", None if norm.has("whole") else 0.0)
    return {
        "eps": None if eps is None else float(eps),
        "weight_offset": float(norm.number("offset", 0.0)),
        "contiguous": norm.has("whole") or _is_laid_anew(norm),
        **dtypes,
    }


def _place_problem(norm: Norm) -> str | None:
    """Why the result of the op would lie in memory in another way, or None."""
    x, y = (norm.b.facts.value(norm.node(name)) for name in ("h", "normed"))
    permuted = is_permuted(x), is_permuted(y)
    if x.dim() != y.dim() or order_in_memory(x) == order_in_memory(y):
        return None
    if not (any(permuted) if norm.b.facts.dim != -1 else all(permuted)):
        return None
    return "its result lies in memory neither as its input does nor in order"


def _is_laid_anew(norm: Norm) -> bool:
    """Whether rows that lie permuted in memory become a result that lies in order.

    A product lies as its first operand does, and the root is always in order.
    """
    x, y = (norm.b.facts.value(norm.node(name)) for name in ("h", "normed"))
    if norm.b.facts.dim != -1:
        return False
    if x is not None and y is not None:
        return is_permuted(x) and not is_permuted(y)
    first = norm.b.view.see(norm.b.view.term(norm.node("unit")).args[0])
    return first is not None and first.word == "rsqrt"


def weight_problem(norm: Norm) -> str | None:
    """Why the op cannot multiply by the weight of the norm, or None."""
    weight = norm.weight
    if weight is None:
        return None
    shape, dtype = norm.b.facts.shape(weight), norm.b.facts.dtype(weight)
    if dtype is not None and dtype.is_complex:
        return f"the weight is {name_of(dtype)}"
    if shape is None:
        return "the shape of the weight is not known: pass example_inputs to fxfuse.apply"
    if norm.has("spread") and not _fits(norm.shape("spread"), norm.shape("h")):
        return (
            f"the weight is spread to {tuple(norm.shape('spread'))}, which may broadcast its rows"
        )
    if norm.b.facts.dim != -1:
        return _along_problem(norm, shape)
    width = norm.shape("h")
    columns = norm.columns if norm.columns is not None else width[-1] if width else None
    if len(shape) > 1 and _is_one_row(shape, width) and norm.columns is None:
        shape = shape[-1:]
    if len(shape) != 1 or (columns is not None and not known_equal(shape[0], columns)):
        return f"the weight of shape {tuple(shape)} is not one value per column"
    return None


def _is_one_row(weight: tuple, rows: tuple | None) -> bool:
    """Whether a weight is the only row of a tensor, and has no more dimensions than the rows."""
    ones = all(known_equal(size, 1) for size in weight[:-1])
    return rows is not None and len(weight) <= len(rows) and ones


def _along_problem(norm: Norm, weight: tuple) -> str | None:
    """The same for a norm over another dimension than the last."""
    rows, dim = norm.shape("h"), norm.b.facts.dim
    along = [1] * len(rows)
    along[dim] = rows[dim]
    behind = len(rows) - dim
    if behind <= len(weight) <= len(rows) and same_shape(weight, tuple(along[-len(weight) :])):
        return None
    shown = tuple(weight)
    return f"it is over dim {dim}, not the last, and its weight of shape {shown} is not along that"


def _fits(weight: tuple | None, rows: tuple | None) -> bool:
    """Whether rows times a weight of this shape are known to have the shape of the rows."""
    if weight is None or rows is None or len(weight) > len(rows):
        return False
    pairs = zip(weight[::-1], rows[::-1])
    return all(known_equal(one, other) or known_equal(one, 1) for one, other in pairs)


def saved_rstd(norm: Norm, attributes: dict) -> Viewed | None:
    """rstd as a result of an inner op, in the form in which autograd saved it for the backward."""
    b = norm.b
    if not b.facts.after_autograd:
        return None
    rstd = norm.node("rstd") if norm.has("rstd") else _second_result(norm)
    value = b.facts.value(rstd)
    if value is None or not b.is_read_outside(rstd):
        return None
    if norm.has("rstd") and b.view.term(rstd).word != "rsqrt":
        return None  # a root that is divided by
    if name_of(value.dtype) != (attributes["compute_dtype"] or name_of(opmath(norm.dtype("h")))):
        return None
    if not same_shape(tuple(value.shape), (*norm.shape("h")[:-1], 1)):
        return None
    b.nodes.append(rstd)
    b.bind("saved", rstd)
    return Viewed("saved", torch.ops.aten.unsqueeze.default, (-1,), value.squeeze(-1))


def _second_result(norm: Norm) -> object:
    """rstd beside the result of a norm in one piece, where that is a call with two results."""
    source = norm.b.view.term(norm.node("whole")).nodes[-1]
    terms = map(norm.b.view.term, source.users)
    return next((t.nodes[0] for t in terms if t.word == "item" and t.args[1] == 1), None)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---- with metadata: every dtype is a fact -------------------------------------------------------


def _from_metadata(norm: Norm) -> dict | Decline | None:
    compute = _compute_dtype(norm)
    if norm.has("shifted") and norm.dtype("shifted") != compute:
        return None
    rstd = _rounded_rstd(norm, compute)
    unit = norm.dtype("unit_cast") or (norm.dtype("whole") if norm.has("product") else None)
    if rstd and norm.dtype("unit") != compute:
        if unit is not None:
            return None  # it would be rounded twice
        unit = norm.dtype("unit")
    factor = norm.dtype("weighted_cast")
    factor = None if factor == compute else factor
    if norm.has("product") and norm.dtype("product") != _promoted(norm, factor, unit, compute):
        return None
    inner = norm.dtype("product") or norm.dtype("unit") or norm.dtype("whole")
    out = norm.dtype("normed")
    if norm.has("out_cast") and (inner not in (compute, out) or out not in FLOATS):
        return None
    return {
        "compute_dtype": name_of(compute),
        "rstd_dtype": rstd,
        "scale_dtype": name_of(factor) if factor else "",
        "unit_dtype": name_of(unit) if unit not in (None, compute) else "",
        "out_dtype": name_of(out),
    }


def _compute_dtype(norm: Norm) -> torch.dtype:
    whole_input = norm.dtype("whole_cast") or norm.dtype("h")
    return norm.dtype("rstd") if norm.has("rstd") else opmath(whole_input)


def _dtype_problem(norm: Norm) -> str | None:
    """Why the dtypes of the graph are none that the op computes in, or None."""
    if norm.dtype("h") not in FLOATS:
        return f"its input is {name_of(norm.dtype('h'))}, not a floating-point tensor"
    if norm.has("unit") and not same_shape(norm.shape("unit"), norm.shape("h")):
        return f"what it scales, of shape {tuple(norm.shape('h'))}, broadcasts"
    rstd = norm.dtype("rstd_cast")
    if rstd is not None and rstd not in (*HALVES, norm.dtype("rstd")):
        return f"its root is cast to {name_of(rstd)} before it scales"
    return _statistic_problem(norm, _compute_dtype(norm))


def _promoted(
    norm: Norm, factor: torch.dtype | None, unit: torch.dtype | None, compute: torch.dtype
) -> torch.dtype:
    """The dtype in which the op multiplies last: by the weight, or by what `factor` rounds."""
    if factor is not None:
        return torch.promote_types(norm.dtype("scaled_cast") or norm.dtype("h"), factor)
    weight = compute if norm.has("shifted") else norm.b.facts.dtype(norm.weight)
    return torch.promote_types(unit or compute, weight)


def _statistic_problem(norm: Norm, compute: torch.dtype) -> str | None:
    if not norm.has("rstd"):
        return None
    if compute not in FLOATS:
        return UNKNOWN
    if compute in HALVES:
        return f"its statistic is rounded to {name_of(compute)}, the fused op keeps it in float32"
    steps = ("square", "mean", "weighted") + (() if _rounded_rstd(norm, compute) else ("unit",))
    for step in steps:
        if norm.has(step) and norm.dtype(step) != compute:
            return f"its {step} is {name_of(norm.dtype(step))} where its root is {name_of(compute)}"
    return None


def _rounded_rstd(norm: Norm, compute: torch.dtype) -> str:
    """The dtype that rstd is rounded to before it scales, "" if it is not."""
    dtype = norm.dtype("rstd_cast")
    return "" if dtype in (None, compute) else name_of(dtype)


def opmath(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


# ---- without metadata: what the casts say --------------------------------------------------------

UNKNOWN = (
    "its dtypes decide what it computes and are not known: pass example_inputs to fxfuse.apply"
)


def _without_metadata(norm: Norm) -> dict | Decline | None:
    if norm.has("whole"):
        return _whole_without_metadata(norm)
    compute = _cast_dtype(norm, "statistic_cast") or norm.own
    if norm.has("weighted_cast"):
        return Decline(UNKNOWN)
    scaled, rstd = _cast_dtype(norm, "scaled_cast"), _cast_dtype(norm, "rstd_cast")
    if None in (compute, rstd):
        return Decline(UNKNOWN)
    if (rstd and rstd != compute) or compute != (scaled or norm.own):
        return Decline(UNKNOWN)
    if compute == "input" and not _plain(norm):
        return Decline(UNKNOWN)
    if norm.has("shifted") and not _shifts_in(norm, compute):
        return None
    unit, out = _cast_dtype(norm, "unit_cast"), _cast_dtype(norm, "out_cast")
    if None in (unit, out):
        return Decline(UNKNOWN)
    unit = "" if unit == compute else unit
    if unit and out:
        return None
    if norm.has("weight_cast") and not _multiplies_in(norm, compute, unit):
        return None
    return {
        "compute_dtype": compute,
        "rstd_dtype": "",
        "scale_dtype": "",
        "unit_dtype": unit,
        "out_dtype": out,
    }


def _whole_without_metadata(norm: Norm) -> dict | Decline | None:
    if norm.has("out_cast") or (norm.has("product") and norm.has("weight_cast")):
        return None
    if norm.has("shifted") and not _shifts_in(norm, "float32"):
        return None
    compute = _cast_dtype(norm, "whole_cast")
    returned = compute or norm.own
    if returned is None:
        return Decline(UNKNOWN)
    scaled = norm.has("product")
    return {
        "compute_dtype": compute,
        "rstd_dtype": "",
        "scale_dtype": "",
        "unit_dtype": returned if scaled else "",
        "out_dtype": "" if scaled else returned,
    }


def _cast_dtype(norm: Norm, name: str) -> str | None:
    """A bound cast as an attribute: "" if there is none, None if its dtype is not known."""
    if not norm.has(name):
        return ""
    dtype = norm.b.view.term(norm.node(name)).dtype
    if isinstance(dtype, torch.dtype):
        return name_of(dtype)
    return norm.own if dtype is norm.node("h") else norm.dtypes.get(dtype)


def _plain(norm: Norm) -> bool:
    """x * rsqrt(mean(x ** 2) + eps) [* w], which the op repeats step by step in half precision."""
    rstd = norm.b.view.term(norm.node("rstd"))
    one_step = len(rstd.nodes) == 1 and "rsqrt" in str(rstd.nodes[0].target)
    return one_step and not norm.has("weighted")


def _multiplies_in(norm: Norm, compute: str, unit: str) -> bool:
    """True if the weight without its cast gives the same product: all is in the compute dtype."""
    return compute != "input" and not unit and _cast_dtype(norm, "weight_cast") == compute


def _shifts_in(norm: Norm, compute: str) -> bool:
    """True if `1 + w` is computed in the compute dtype."""
    known = norm.b.facts.dtype(norm.weight) or torch.float16
    return (_cast_dtype(norm, "weight_cast") or name_of(known)) == compute
