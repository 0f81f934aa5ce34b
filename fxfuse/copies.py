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


def held(model: Callable) -> Iterator[tuple[str, torch.nn.Module | torch.Tensor]]:
    """The modules and tensors that a call of `model` reads, by name; the name of a model is ""."""
    if isinstance(model, torch.nn.Module):
        yield "", model
    elif isinstance(model, types.MethodType):
        yield from held(model.__self__)
    elif isinstance(model, types.FunctionType):
        yield from ((k, v) for k, v in _captured(model).items() if _is_ours(v))
    else:
        yield from ((k, v) for k, v in getattr(model, "__dict__", {}).items() if _is_ours(v))


def of_graph(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """The graph and the graphs nested in it are copied; parameters and buffers are shared."""
    shared = {id(t): t for t in (*gm.parameters(), *gm.buffers())}
    return copy.deepcopy(gm, shared)


def of_call(model: Callable, args: tuple, kwargs: dict) -> tuple[Callable, tuple, dict]:
    """What `model(*args, **kwargs)` may write to is copied: model, what it captures, inputs.

    What is one tensor in several places is one in the copy.
    """
    memo: dict[int, object] = {}
    for leaf in pytree.tree_leaves((args, kwargs)):
        if torch.is_tensor(leaf) and not leaf.is_leaf:
            memo[id(leaf)] = _copy_tensor(leaf, memo)
    return _copy_callable(model, memo), *copy.deepcopy((args, kwargs), memo)


def _copy_tensor(tensor: torch.Tensor, memo: dict) -> torch.Tensor:
    """A leaf in place of a tensor that was computed, which `deepcopy` refuses."""
    return copy.deepcopy(tensor.detach(), memo).requires_grad_(tensor.requires_grad)


def _copy_callable(model: Callable, memo: dict) -> Callable:
    if isinstance(model, types.MethodType):
        return types.MethodType(model.__func__, copy.deepcopy(model.__self__, memo))
    if not isinstance(model, types.FunctionType):
        return copy.deepcopy(model, memo)
    captured = {k: _copy_captured(v, memo) for k, v in _captured(model).items()}
    if not any(map(_is_ours, captured.values())):
        return model
    names, cells = model.__code__.co_freevars, model.__closure__ or ()
    twin = types.FunctionType(
        model.__code__,
        {**model.__globals__, **{k: v for k, v in captured.items() if k not in names}},
        model.__name__,
        model.__defaults__,
        tuple(
            types.CellType(captured[name]) if name in captured else cell
            for name, cell in zip(names, cells)
        ),
    )
    twin.__kwdefaults__ = model.__kwdefaults__
    return twin


def _captured(function: types.FunctionType) -> dict[str, object]:
    """What a function reads besides its arguments: globals and the closure, by name."""
    code, globals_ = function.__code__, function.__globals__
    found = {n: globals_[n] for n in _names(code) if _is_ours(globals_.get(n))}
    for name, cell in zip(code.co_freevars, function.__closure__ or ()):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # it has no value yet
            continue
    return found


def _names(code: types.CodeType) -> Iterator[str]:
    """Those of the functions inside, too."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names(inner)


def _copy_captured(value: object, memo: dict) -> object:
    """Modules and tensors; anything else stays itself."""
    if isinstance(value, torch.Tensor) and not value.is_leaf:
        memo.setdefault(id(value), _copy_tensor(value, memo))
    return copy.deepcopy(value, memo) if _is_ours(value) else value


def _is_ours(value: object) -> bool:
    return isinstance(value, (torch.nn.Module, torch.Tensor))
