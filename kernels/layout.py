"""Where the outputs of the norms lie in memory: where eager PyTorch would put them.

Elementwise ATen ops keep the strides of a dense input and give any other input's order of dims to
a dense output. The kernels know contiguous rows only. So they are run on the rows in the order of
memory, as a view, and their outputs are viewed in the caller's order again: nothing is copied.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

# run(x, residual, weight, attributes) -> y, h, rstd, all contiguous; no residual: h is not used.
Forward = Callable[..., tuple[Tensor, Tensor, Tensor]]


def like(h: Tensor, dtype: torch.dtype) -> Tensor:
    """An empty tensor where an elementwise op would put its result for `h`."""
    return torch.empty_like(h, dtype=dtype)


def like_rows(h: Tensor, dtype: torch.dtype) -> Tensor:
    """An empty tensor with one value for each row of `h` [..., N], the rows in the same order."""
    if h.dim() == 0 or h.shape[-1] == 0:
        return h.new_empty(h.shape[:-1], dtype=dtype)
    column = torch.empty_like(h).select(-1, 0)
    # The strides of an elementwise result, which unlike those of empty_like are always dense ones.
    return torch.empty_like(column != 0, dtype=dtype)


def contiguous(t: Tensor) -> Tensor:
    """`t` with the strides of a new tensor, also for dims of size 1."""
    t = t.contiguous()
    if min(t.shape, default=2) > 1:
        return t
    strides, step = [], 1
    for size in reversed(t.shape):
        strides.append(step)
        step *= max(size, 1)
    strides = tuple(reversed(strides))
    return t if t.stride() == strides else t.as_strided(t.shape, strides)


def forward(
    run: Forward, x: Tensor, residual: Tensor | None, weight: Tensor | None, attributes
) -> tuple[Tensor, Tensor, Tensor]:
    """y, h and rstd of `run`, laid out as eager does; h is x where there is no residual."""
    if residual is None:
        return _norm(run, x, weight, attributes)
    if _adds_to_contiguous(x, residual):
        return run(x, residual, weight, attributes)
    if _adds_to_same(x, residual):
        order = _memory_order(x)
        results = run(x.permute(order), residual.permute(order), weight, attributes)
        y, h, rstd = _restore(results, order)
        if not _is_settled(h, x, order):
            y, h, rstd = fit(y, x), fit(h, x), _fit_rows(rstd, x)
        return (contiguous(y) if attributes.contiguous else y), h, rstd
    return _norm(run, x + residual, weight, attributes)


def backward(
    run: Callable[..., tuple[Tensor, Tensor]],
    dys: Sequence[Tensor],
    h: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    dres: Tensor | None,
    **attributes,
) -> tuple[Tensor, Tensor]:
    """dh and dweight of `run`, dh laid out as an elementwise op does for `h`."""
    order = _memory_order(h)
    if order is None:
        dh, dweight = run(dys, h, weight, rstd, dres, **attributes)
    else:
        dys = [dy.permute(order) for dy in dys]
        dres = None if dres is None else dres.permute(order)
        rstd = rstd.permute(order[:-1])
        dh, dweight = run(dys, h.permute(order), weight, rstd, dres, **attributes)
        (dh,) = _restore([dh], order)
    return (dh if _is_settled(dh, h, order) else fit(dh, h)), dweight


def _norm(
    run: Forward, h: Tensor, weight: Tensor | None, attributes
) -> tuple[Tensor, Tensor, Tensor]:
    order = _memory_order(h)
    if order is None:
        y, _, rstd = run(h, None, weight, attributes)
        if y.stride() == h.stride():
            return y, h, rstd
    else:
        y, _, rstd = run(h.permute(order), None, weight, attributes)
        y, rstd = _restore([y, rstd], order)
    if not _is_settled(y, h, order):
        y, rstd = fit(y, h), _fit_rows(rstd, h)
    return (contiguous(y) if attributes.contiguous else y), h, rstd


def _memory_order(h: Tensor) -> list[int] | None:
    """The dims of `h` [..., N] by falling stride, N last; None where that is their order."""
    strides = h.stride()[:-1]
    if h.is_contiguous() or 0 in strides:  # a broadcast dim has no place among the others
        return None
    rows = range(len(strides))
    order = sorted(rows, key=lambda dim: -strides[dim])
    return None if order == list(rows) else [*order, len(order)]


def _restore(results: Sequence[Tensor], order: Sequence[int]) -> list[Tensor]:
    """Outputs for rows in the order of memory, as views with the rows in the caller's order."""
    back = sorted(range(len(order)), key=order.__getitem__)
    return [t.permute(back[: t.dim()]) for t in results]


def _falls(strides: Sequence[int]) -> bool:
    return 0 not in strides and all(a > b for a, b in itertools.pairwise(strides))


def _adds_to_contiguous(x: Tensor, residual: Tensor) -> bool:
    """Whether the sum is contiguous: the first operand whose strides differ decides."""
    if x.shape != residual.shape:
        return False
    return (x.is_contiguous() and residual.is_contiguous()) or _falls(x.stride())


def _adds_to_same(x: Tensor, residual: Tensor) -> bool:
    """Whether the operands are dense with whole rows and the same strides: the sum has them too."""
    order = _memory_order(x)
    return (
        order is not None
        and x.shape == residual.shape
        and x.stride() == residual.stride()
        and x.shape[-1] > 1
        and x.permute(order).is_contiguous()
    )


def _is_settled(t: Tensor, h: Tensor, order: Sequence[int] | None) -> bool:
    """Whether an output `t` in the order of `h` lies right without a search for the layout.

    It does where the strides leave no doubt about the order, and no dim of size 1 could have an
    odd stride.
    """
    if t.stride() == h.stride():
        return order is None or _falls([h.stride(dim) for dim in order])
    return 1 not in h.shape and _falls([h.stride(dim) for dim in order or range(h.dim())])


def fit(t: Tensor, h: Tensor) -> Tensor:
    """`t`, copied where it is not laid out like `h`."""
    return _with_strides(t, _strides_like(like, h.shape, h.stride()))


def _fit_rows(rstd: Tensor, h: Tensor) -> Tensor:
    return _with_strides(rstd, _strides_like(like_rows, h.shape, h.stride()))


def fit_to(t: Tensor, formula: Callable[..., Tensor], *operands: Tensor) -> Tensor:
    """`t`, copied where it is not laid out as `formula` of tensors like the operands would be."""
    if 1 not in t.shape and all(o.is_contiguous() for o in operands):
        return t
    described = tuple((tuple(o.shape), o.stride()) for o in operands)
    return _with_strides(t, _strides_of(formula, described))


@functools.lru_cache(1024)
def _strides_of(
    formula: Callable[..., Tensor], described: tuple[tuple[tuple, tuple], ...]
) -> tuple[int, ...]:
    # Meta tensors take no memory and are laid out by the code that lays out fake tensors.
    return formula(*(torch.empty_strided(*one, device="meta") for one in described)).stride()


@functools.lru_cache(1024)  # half a millisecond
def _strides_like(
    layout: Callable[[Tensor, torch.dtype], Tensor],
    shape: tuple[int, ...],
    strides: tuple[int, ...],
) -> tuple[int, ...]:
    h = torch.empty_strided(shape, strides, device="meta")
    return layout(h, h.dtype).stride()


def _with_strides(t: Tensor, strides: tuple[int, ...]) -> Tensor:
    if t.stride() == strides:
        return t
    return t.new_empty_strided(t.shape, strides).copy_(t)
