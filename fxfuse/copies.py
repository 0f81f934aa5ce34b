"""Copies that may be edited or run without a trace on the original."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterator

import torch
from torch.utils import _pytree as pytree


def tensors(model: Callable, args: tuple, kwargs: dict) -> Iterator[torch.Tensor]:
    """The tensors of a call: parameters, buffers and inputs."""
    owner = getattr(model, "__self__", model)
    if isinstance(owner, torch.nn.Module):
        yield from owner.parameters()
        yield from owner.buffers()
    yield from (leaf for leaf in pytree.tree_leaves((args, kwargs)) if torch.is_tensor(leaf))


def of_graph(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """The graph and the graphs nested in it are copied; parameters and buffers are shared."""
    shared = {id(t): t for t in (*gm.parameters(), *gm.buffers())}
    return copy.deepcopy(gm, shared)


def of_call(model: Callable, args: tuple, kwargs: dict) -> tuple[Callable, tuple, dict]:
    """What `model(*args, **kwargs)` may write to is copied: the model, its closure, the inputs."""
    args, kwargs = pytree.tree_map_only(torch.Tensor, _copy_tensor, (args, kwargs))
    return _copy_callable(model), args, kwargs


def _copy_tensor(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _copy_callable(model: Callable) -> Callable:
    if isinstance(model, types.MethodType):
        return types.MethodType(model.__func__, copy.deepcopy(model.__self__))
    if not isinstance(model, types.FunctionType) or not model.__closure__:
        return copy.deepcopy(model)  # a plain function is its own copy
    cells = tuple(types.CellType(_copy_captured(cell.cell_contents)) for cell in model.__closure__)
    twin = types.FunctionType(
        model.__code__, model.__globals__, model.__name__, model.__defaults__, cells
    )
    twin.__kwdefaults__ = model.__kwdefaults__
    return twin


def _copy_captured(value: object) -> object:
    """Modules and tensors in a closure; anything else stays itself."""
    if isinstance(value, torch.Tensor):
        return _copy_tensor(value)
    return copy.deepcopy(value) if isinstance(value, torch.nn.Module) else value
