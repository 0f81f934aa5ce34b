"""The reference on a CPU, compiled by Inductor: what the inner ops run there in eager graphs.

Inductor turns a formula into one or two passes over the rows. A function is compiled once for each
width, dtypes and attributes, for any number of rows, and gives the same roundings as the reference.
Where it cannot be compiled (no C++ compiler, say) the reference itself runs, after one warning.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from types import FunctionType

import torch
from torch import Tensor

from fxfuse.kernels import reference

# Below this many elements the reference is done before a compiled function has checked its guards.
SMALLEST = 1 << 16

# Without it Inductor keeps a half in fp32 from one step to the next and drops its roundings.
_OPTIONS = {"emulate_precision_casts": True}

_log = logging.getLogger("fxfuse")
_functions: dict[tuple, Callable | None] = {}
_warned = False


def rms_norm(h: Tensor, weight: Tensor | None, **attributes) -> tuple[Tensor, Tensor]:
    """`reference.rms_norm`, compiled where that pays; y and rstd are contiguous."""
    if not _pays(h):
        return reference.rms_norm(h, weight, **attributes)
    y, rstd = _run(reference.rms_norm, (_rows(h, h.shape[-1:]), _detach(weight)), attributes)
    return y.view(h.shape), rstd.view(h.shape[:-1])


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, **attributes
) -> tuple[Tensor, Tensor, Tensor]:
    """`reference.add_rms_norm`, compiled where that pays; y, h and rstd are contiguous."""
    if not _pays(x) or x.shape != residual.shape:
        return reference.add_rms_norm(x, residual, weight, **attributes)
    columns = x.shape[-1:]
    operands = (_rows(x, columns), _rows(residual, columns), _detach(weight))
    y, h, rstd = _run(reference.add_rms_norm, operands, attributes)
    return y.view(x.shape), h.view(x.shape), rstd.view(x.shape[:-1])


def rms_norm_bwd(
    dys: Sequence[Tensor],
    h: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    dres: Tensor | None,
    **attributes,
) -> tuple[Tensor, Tensor | None]:
    """`reference.rms_norm_bwd`, compiled where that pays; dh is contiguous."""
    if not _pays(h):
        return reference.rms_norm_bwd(dys, h, weight, rstd, dres, **attributes)
    columns = h.shape[-1:]
    dys = [_rows(dy, columns) for dy in dys]
    dres = None if dres is None else _rows(dres, columns)
    operands = (dys, _rows(h, columns), _detach(weight), _rows(rstd, ()), dres)
    dh, dweight = _run(reference.rms_norm_bwd, operands, attributes)
    return dh.view(h.shape), dweight


def _pays(x: Tensor) -> bool:
    return (
        x.numel() >= SMALLEST
        and x.numel() > x.shape[-1]
        and not torch.compiler.is_compiling()
        and torch._guards.TracingContext.try_get() is None
    )


def _rows(x: Tensor, columns: tuple[int, ...]) -> Tensor:
    """`x` as contiguous runs of rows, a new tensor; their number may change from call to call.

    Shape [M / RUN, RUN, *columns], or [M, *columns] where the rows do not make whole runs.
    """
    rows = x.detach().reshape(-1, *columns).contiguous()
    whole = rows.shape[0] % reference.RUN == 0
    rows = rows.view(-1, reference.RUN, *columns) if whole else rows.view(rows.shape)
    torch._dynamo.maybe_mark_dynamic(rows, 0)
    return rows


def _detach(weight: Tensor | None) -> Tensor | None:
    # Or Dynamo would compile anew for a frozen weight.
    return None if weight is None else weight.detach()


def _run(function: Callable, operands: tuple, attributes: dict) -> tuple:
    key = (function.__name__, _describe(operands), *attributes.items())
    if key not in _functions:
        _functions[key] = _compile(function, len(_functions))
    compiled = _functions[key]
    if compiled is None:
        return function(*operands, **attributes)
    try:
        with torch.no_grad():
            return compiled(*operands, **attributes)
    except Exception as error:
        _functions[key] = None
        _warn_once(error)
        return function(*operands, **attributes)


def _describe(operands: Sequence) -> tuple:
    """What of the operands a compiled function depends on: all but the number of rows."""
    return tuple(
        _describe(t) if isinstance(t, list) else t is not None and (t.dtype, t.shape[1:], t.dim())
        for t in operands
    )


def _compile(function: Callable, number: int) -> Callable:
    # Dynamo counts recompilations by code object: a copy for each key has a count of its own.
    code = function.__code__.replace(co_name=f"{function.__name__}_{number}")
    copy = FunctionType(code, function.__globals__, code.co_name, function.__defaults__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return torch.compile(copy, fullgraph=True, options=_OPTIONS)


def _warn_once(error: Exception) -> None:
    global _warned
    if not _warned:
        _warned = True
        reason = str(error).strip().partition("\n")[0]
        _log.warning("the CPU norms run uncompiled, since Inductor failed: %s", reason)
