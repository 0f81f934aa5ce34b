"""Running a model in fp64, whatever dtypes its code names."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

_NARROW = (torch.float32, torch.float16, torch.bfloat16)
_RMS_NORMS = (torch.rms_norm, torch.nn.functional.rms_norm)


def widen(tensors: Iterable[torch.Tensor]) -> None:
    """Make tensors fp64 in place, so that whoever holds them holds them in fp64."""
    for tensor in tensors:
        if tensor.dtype in _NARROW:
            tensor.data = tensor.data.double()


@contextlib.contextmanager
def running() -> Iterator[None]:
    """Inside, casts to narrower floating dtypes are casts to fp64, and new tensors are fp64.

    Otherwise the norms of most models, which go through fp32, would round there in fp64 as well.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Eps(), _Casts():
            yield
    finally:
        torch.set_default_dtype(before)


class _Casts(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        def wide(value: object) -> object:
            return torch.float64 if value in _NARROW else value

        args, kwargs = pytree.tree_map_only(torch.dtype, wide, (args, kwargs or {}))
        return func(*args, **kwargs)


class _Eps(TorchFunctionMode):
    """An RMSNorm without an eps takes that of its dtype: the model's is fp32's."""

    def __torch_function__(
        self, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        kwargs = dict(kwargs or {})
        if func in _RMS_NORMS and len(args) < 4 and kwargs.get("eps") is None:
            kwargs["eps"] = torch.finfo(torch.float32).eps
        return func(*args, **kwargs)
