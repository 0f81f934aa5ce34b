"""How RMSNorm is spelt, and which numerics each spelling means. The patterns share both."""

from __future__ import annotations

import torch

from fxfuse.match import (
    Bound,
    Decline,
    Expr,
    known_equal,
    maybe_cast,
    mean,
    named,
    rsqrt,
    scalar,
    square,
    upcast,
    var,
    word,
)  # fmt: skip

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
HALVES = FLOATS[:2]


def rms_norm_of(h: Expr) -> Expr:
    """RMSNorm of `h` over the last dimension, with or without a weight, in any spelling."""
    mean_square = named("mean", mean(named("square", square(upcast(h, "statistic_cast")))))
    rstd = named("rstd", rsqrt(mean_square + scalar("eps")) | rsqrt(mean_square))
    weight = upcast(var("weight"), "weight_cast", or_not=True)
    scale = upcast(named("shifted", scalar("offset") + weight)) | weight

    unit = named("unit", upcast(h, "scaled_cast") * rstd)
    whole = named("whole", word("rms_norm", upcast(h, "whole_cast"),
                                upcast(var("inner_weight", optional=True)),
                                scalar("eps", optional=True)))  # fmt: skip
    product = named("product", maybe_cast(unit, "unit_cast") * scale)
    weight_first = named("product", named("weighted", upcast(h, "scaled_cast") * scale) * rstd)
    return (
        maybe_cast(product | weight_first | named("product", whole * scale), "out_cast")
        | maybe_cast(unit | whole, "out_cast")
    )  # fmt: skip


def numerics(b: Bound) -> dict | Decline | None:
    """The attributes of the op: eps, weight_offset and the dtypes between which the graph rounds.

    None where the match should be tried in another way (a cast that has to stay outside, `1 + w`
    that is rounded before it is used).
    """
    if b.has("whole") and b.has("inner_weight") and b.has("product"):
        return None
    problem = _weight_problem(b)
    if problem:
        return b.decline(problem)
    known = b.facts.value(b.h) is not None
    dtypes = _from_metadata(b) if known else _without_metadata(b)
    if not isinstance(dtypes, dict):
        return dtypes
    default = None if b.has("whole") else 0.0
    eps = b.get("eps", default)
    return {
        "eps": None if eps is None else float(eps),
        "weight_offset": float(b.get("offset", 0.0)),
        "contiguous": b.has("whole"),
        **dtypes,
    }


def weight_of(b: Bound) -> object:
    return b.get("weight") if b.has("product") else b.get("inner_weight")


def _weight_problem(b: Bound) -> str | None:
    weight = weight_of(b)
    if weight is None:
        return None
    shape, width, dtype = b.facts.shape(weight), b.shape("h"), b.facts.dtype(weight)
    if dtype is not None and dtype.is_complex:
        return f"the weight is {_name(dtype)}"
    if shape is None:
        return "the shape of the weight is not known: pass example_inputs to fxfuse.apply"
    columns = width[-1] if width else None
    if len(shape) != 1 or (columns is not None and not known_equal(shape[0], columns)):
        return f"the weight of shape {tuple(shape)} is not one value per column"
    return None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---- with metadata: every dtype is a fact -------------------------------------------------------


def _from_metadata(b: Bound) -> dict | Decline | None:
    if b.dtype("h") not in FLOATS:
        return b.decline(f"its input is {_name(b.dtype('h'))}, not a floating-point tensor")
    whole_input = b.dtype("whole_cast") or b.dtype("h")
    compute = b.dtype("rstd") if b.has("rstd") else _opmath(whole_input)
    problem = _statistic_problem(b, compute)
    if problem:
        return b.decline(problem)
    if b.has("shifted") and b.dtype("shifted") != compute:
        return None
    unit = b.dtype("unit_cast") or (b.dtype("whole") if b.has("product") else None)
    if b.has("product") and b.dtype("product") != _promoted(b, unit or compute, compute):
        return None
    inner = b.dtype("product") or b.dtype("unit") or b.dtype("whole")
    out = b.facts.dtype(b.root)
    if b.has("out_cast") and (inner not in (compute, out) or out not in FLOATS):
        return None
    return {
        "compute_dtype": _name(compute),
        "unit_dtype": _name(unit) if unit not in (None, compute) else "",
        "out_dtype": _name(out),
    }


def _promoted(b: Bound, unit: torch.dtype, compute: torch.dtype) -> torch.dtype:
    """The dtype in which the op multiplies by the weight."""
    weight = compute if b.has("shifted") else b.facts.dtype(weight_of(b))
    return torch.promote_types(unit, weight)


def _statistic_problem(b: Bound, compute: torch.dtype) -> str | None:
    if not b.has("rstd"):
        return None
    if compute not in FLOATS:
        return _UNKNOWN
    if compute in HALVES:
        return f"its statistic is rounded to {_name(compute)}, the fused op keeps it in float32"
    for step in ("square", "mean", "unit", "weighted"):
        if b.has(step) and b.dtype(step) != compute:
            return f"its {step} is {_name(b.dtype(step))} where its root is {_name(compute)}"
    return None


def _opmath(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


# ---- without metadata: what the casts say --------------------------------------------------------

_UNKNOWN = (
    "its dtypes decide what it computes and are not known: pass example_inputs to fxfuse.apply"
)


def _without_metadata(b: Bound) -> dict | Decline | None:
    if b.has("whole"):
        return _whole_without_metadata(b)
    compute = _cast_dtype(b, "statistic_cast") or "input"
    if compute != (_cast_dtype(b, "scaled_cast") or "input"):
        return b.decline(_UNKNOWN)
    if compute == "input" and not _plain(b):
        return b.decline(_UNKNOWN)
    if b.has("shifted") and not _shifts_in(b, compute):
        return None
    unit, out = _cast_dtype(b, "unit_cast"), _cast_dtype(b, "out_cast")
    if None in (unit, out):
        return b.decline(_UNKNOWN)
    unit = "" if unit == compute else unit
    if unit and out:
        return None
    if b.has("weight_cast") and not _multiplies_in(b, compute, unit):
        return None
    return {
        "compute_dtype": compute,
        "unit_dtype": unit,
        "out_dtype": out,
    }


def _whole_without_metadata(b: Bound) -> dict | Decline | None:
    if b.has("out_cast") or (b.has("product") and b.has("weight_cast")):
        return None
    if b.has("shifted") and not _shifts_in(b, "float32"):
        return None
    compute = _cast_dtype(b, "whole_cast")
    returned = compute or "input"
    scaled = b.has("product")
    return {
        "compute_dtype": compute,
        "unit_dtype": returned if scaled else "",
        "out_dtype": "" if scaled else returned,
    }


def _cast_dtype(b: Bound, name: str) -> str | None:
    """A bound cast as an attribute: "" if there is none, "input" for h's dtype, None: unknown."""
    if not b.has(name):
        return ""
    dtype = b.view.term(b.get(name)).dtype
    if isinstance(dtype, torch.dtype):
        return _name(dtype)
    return "input" if dtype is b.get("h") else None


def _plain(b: Bound) -> bool:
    """x * rsqrt(mean(x ** 2) + eps) [* w], which the op repeats step by step in half precision."""
    rstd = b.view.term(b.get("rstd"))
    return len(rstd.nodes) == 1 and "rsqrt" in str(rstd.nodes[0].target) and not b.has("weighted")


def _multiplies_in(b: Bound, compute: str, unit: str) -> bool:
    """True if the weight without its cast gives the same product: all is in the compute dtype."""
    return compute != "input" and not unit and _cast_dtype(b, "weight_cast") == compute


def _shifts_in(b: Bound, compute: str) -> bool:
    """True if `1 + w` is computed in the compute dtype."""
    dtype = _cast_dtype(b, "weight_cast") or _name(b.facts.dtype(weight_of(b)) or torch.float16)
    return dtype == compute
