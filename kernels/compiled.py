"""The reference on a CPU, compiled by Inductor: what the inner ops run there in eager graphs.

Inductor turns a formula into one or two passes over the rows. A function is compiled once for each
width, dtypes and attributes, for any number of rows, and gives the same roundings as the reference.
Where it cannot be compiled (no C++ compiler, say) the reference itself runs, after one warning; and
it runs where a first call shows that Inductor does not round as it does.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from types import FunctionType

import torch
from torch import Tensor

from fxfuse.kernels import gate_reference, reference, sandwich_reference

# Below this many elements the reference is done before a compiled function has checked its guards.
SMALLEST = 1 << 16

# Without it Inductor keeps an fp16 value in fp32 from one step to the next and drops its roundings;
# those to bf16 are arithmetic in what it sees (see `rounding`).
_KEEP_CASTS = {"emulate_precision_casts": True}

# The order of a sum decides the last bit of few elements; a rounding that is dropped, of many.
_EQUAL = 0.98

_log = logging.getLogger("fxfuse")
_functions: dict[tuple, Callable | None] = {}
_warned = False


def compiled(formula: Callable, operands: str, results: str) -> Callable:
    """`formula`, compiled where that pays; its results are contiguous then.

    operands, results: a letter for each: "r" a tensor of rows [..., N] or None, "l" a list of them,
    "s" one value for each row [...], "w" a weight [N] or None.
    """

    def run(*given: object, **attributes: object) -> Tensor | tuple:
        rows = [t for kind, value in zip(operands, given) for t in _of_rows(kind, value)]
        if not _pays(rows):
            return formula(*given, **attributes)
        packed = tuple(_pack(kind, value) for kind, value in zip(operands, given))
        found = _run(formula, packed, attributes)
        shape = rows[0].shape[:-1]
        if isinstance(found, Tensor):
            return _unpack(results, found, shape)
        return tuple(_unpack(kind, t, shape) for kind, t in zip(results, found))

    return functools.wraps(formula)(run)


def _of_rows(kind: str, value: object) -> Sequence[Tensor]:
    if kind == "l":
        return value
    return [value] if kind == "r" and value is not None else []


def _pays(rows: Sequence[Tensor]) -> bool:
    x = rows[0]
    return (
        x.numel() >= SMALLEST
        and x.numel() > x.shape[-1]
        and all(t.shape[:-1] == x.shape[:-1] for t in rows)
        and not torch.compiler.is_compiling()
        and torch._guards.TracingContext.try_get() is None
    )


def _pack(kind: str, value: object) -> object:
    if value is None:
        return None
    if kind == "l":
        return [_rows(t, t.shape[-1:]) for t in value]
    if kind == "w":
        return value.detach()  # or Dynamo would compile anew for a frozen weight
    return _rows(value, value.shape[-1:] if kind == "r" else ())


def _unpack(kind: str, result: Tensor | None, shape: tuple[int, ...]) -> Tensor | None:
    if kind == "w" or result is None:
        return result
    return result.view(*shape, result.shape[-1]) if kind == "r" else result.view(shape)


def _rows(x: Tensor, columns: tuple[int, ...]) -> Tensor:
    """`x` as contiguous runs of rows, a new tensor; their number may change from call to call.

    Shape [M / run, run, *columns] for the shortest of `reference.RUNS`, or [M, *columns] where the
    rows do not make whole ones.
    """
    rows = x.detach().reshape(-1, *columns).contiguous()
    run = reference.RUNS[-1]
    whole = rows.shape[0] % run == 0
    rows = rows.view(-1, run, *columns) if whole else rows.view(rows.shape)
    torch._dynamo.maybe_mark_dynamic(rows, 0)
    return rows


def _run(function: Callable, operands: tuple, attributes: dict) -> Tensor | tuple:
    key = (function.__name__, _describe(operands), *_frozen(attributes))
    if key not in _functions:
        return _run_first(key, function, operands, attributes)
    compiled = _functions[key]
    if compiled is None:
        return function(*operands, **attributes)
    with torch.no_grad():
        return compiled(*operands, **attributes)


def _run_first(key: tuple, function: Callable, operands: tuple, attributes: dict) -> object:
    """Compile a function and run it; forget it if it fails or computes something else."""
    with torch.no_grad():
        expected = function(*operands, **attributes)
        _functions[key] = compiled = _compile(function, len(_functions), _options(operands))
        try:
            found = compiled(*operands, **attributes)
        except Exception as error:
            _functions[key] = None
            _warn_once(error)
            return expected
    if not _has_its_roundings(found, expected):
        _functions[key] = None
        _log.debug("%s runs uncompiled: this Inductor drops roundings", function.__name__)
        return expected
    return found


def _has_its_roundings(found: Tensor | tuple, expected: Tensor | tuple) -> bool:
    """Whether nearly all bits of half-precision results are those of the uncompiled function.

    Not all Inductors (those of torch 2.10 and 2.11, for some) keep them.
    """
    if isinstance(found, Tensor):
        found, expected = (found,), (expected,)
    return all(
        _equal_share(one, other) >= _EQUAL
        for one, other in zip(found, expected)
        if one is not None and one.dtype in reference.HALVES and one.numel() >= SMALLEST
    )


def _equal_share(one: Tensor, other: Tensor) -> float:
    same = (one == other) | (one.isnan() & other.isnan())
    return same.float().mean().item()


def _describe(operands: Sequence) -> tuple:
    """What of the operands a compiled function depends on: all but the number of rows."""
    return tuple(
        _describe(t) if isinstance(t, list) else t is not None and (t.dtype, t.shape[1:], t.dim())
        for t in operands
    )


def _frozen(attributes: dict) -> tuple:
    return tuple((k, _frozen(v) if isinstance(v, dict) else v) for k, v in attributes.items())


def _options(operands: tuple) -> dict:
    tensors = [t for o in operands for t in (o if isinstance(o, list) else [o])]
    return _KEEP_CASTS if any(t is not None and t.dtype == torch.float16 for t in tensors) else {}


def _compile(function: Callable, number: int, options: dict) -> Callable:
    # Dynamo counts recompilations by code object: a copy for each key has a count of its own.
    code = function.__code__.replace(co_name=f"{function.__name__}_{number}")
    copy = FunctionType(code, function.__globals__, code.co_name, function.__defaults__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return torch.compile(copy, fullgraph=True, options=options)


def _warn_once(error: Exception) -> None:
    global _warned
    if not _warned:
        _warned = True
        reason = str(error).strip().partition("\n")[0]
        _log.warning("the CPU norms run uncompiled, since Inductor failed: %s", reason)


rms_norm = compiled(reference.rms_norm, "rw", "rs")
add_rms_norm = compiled(reference.add_rms_norm, "rrw", "rrs")
rms_norm_bwd = compiled(reference.rms_norm_bwd, "lrwsr", "rw")
silu_gate = compiled(gate_reference.silu_gate, "rr", "r")
silu_gate_bwd = compiled(gate_reference.silu_gate_bwd, "lrr", "rr")
rms_norm_silu_gate = compiled(gate_reference.rms_norm_silu_gate, "rrw", "rs")
rms_norm_silu_gate_bwd = compiled(gate_reference.rms_norm_silu_gate_bwd, "lrrwsr", "rrw")
silu_gate_rms_norm = compiled(gate_reference.silu_gate_rms_norm, "rrw", "rr")
silu_gate_rms_norm_bwd = compiled(gate_reference.silu_gate_rms_norm_bwd, "lrrwr", "rrw")
rms_norm_add_rms_norm = compiled(sandwich_reference.rms_norm_add_rms_norm, "rrww", "rrss")
rms_norm_add_rms_norm_bwd = compiled(
    sandwich_reference.rms_norm_add_rms_norm_bwd, "lrrwwssr", "rrww"
)
