"""Runs of one call from one state: weights, buffers, inputs, random numbers, Python's own."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch.utils import _pytree as pytree

from fxfuse import copies, errors, in_double, moving


@dataclass
class Run:
    """What came out. outputs: with the buffers and inputs that changed. error: what it raised."""

    outputs: dict[str, object] = field(default_factory=dict)
    gradients: dict[str, object] = field(default_factory=dict)
    error: Exception | None = None


class Runs:
    """Each run is of a fresh copy, so that the call itself is never made and nothing changes.

    train: whether to take gradients, of the sum of all outputs times fixed random numbers.
    """

    def __init__(self, model: Callable, args: tuple, kwargs: dict, train: bool) -> None:
        self.call, self.train = (model, args, kwargs), train
        self.before = {n: t for n, t in _state(*self.call) if not t.requires_grad}
        devices = {t.device for _, t in _leaves_of(*self.call) if t.device.type == "cuda"}
        self.devices = sorted({d.index or 0 for d in devices})
        self.seeds = _random_states(self.devices)
        self.cotangents: dict[str, torch.Tensor] = {}

    def run(
        self, compiled: Callable = lambda model: model, prepare: Callable = lambda tensors: None
    ) -> Run:
        """compiled: what to do to the copy's model. prepare: what to do to the copy's tensors."""
        model, args, kwargs = self._copy()
        prepare([t for _, t in _leaves_of(model, args, kwargs)])
        with self._from_the_start(), torch.set_grad_enabled(self.train):
            returned = dict(_named("output", compiled(model)(*args, **kwargs)))
            outputs = {n: v.detach() if torch.is_tensor(v) else v for n, v in returned.items()}
            if self.train:
                self._backward(returned)
        leaves = list(_leaves_of(model, args, kwargs))
        gradients = {n: _dense(t.grad) for n, t in leaves if t.requires_grad and self.train}
        for name, tensor in _state(model, args, kwargs):
            if name in self.before and _differs(tensor, self.before[name]):
                outputs[f"changed {name}"] = tensor.detach()
        return Run(outputs, gradients)

    def in_double(self) -> Run | None:
        """The run in fp64; None where it cannot be made, or fp64 is what the model computes in."""
        try:
            with in_double.running():
                return self.run(prepare=in_double.widen)
        except Exception:
            return None  # an op that has no fp64, or code that asks for a dtype

    def moved(self, step: float) -> list[Run]:
        """Runs with parameters, floating buffers and inputs moved by one step."""
        return [
            self.run(prepare=lambda tensors, seed=seed: moving.move(tensors, seed, step))
            for seed in range(moving.TIMES)
        ]

    def _copy(self) -> tuple[Callable, tuple, dict]:
        try:
            return copies.of_call(*self.call)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise errors.CannotCopy(problem=problem) from error

    def _backward(self, returned: dict[str, object]) -> None:
        """The first run is eager's: its dtypes are those of the gradients that all begin from."""
        ends = {n: v for n, v in returned.items() if torch.is_tensor(v) and v.requires_grad}
        for name, end in ends.items():
            if name not in self.cotangents:
                self.cotangents[name] = moving.cotangent(end)
        begins = [(v, self.cotangents[n]) for n, v in ends.items()]
        begins = [(v, g.to(v.dtype)) for v, g in begins if g.shape == v.shape]
        if begins:
            torch.autograd.backward(*map(list, zip(*begins)))

    @contextlib.contextmanager
    def _from_the_start(self) -> Iterator[None]:
        before = _random_states(self.devices)
        _set_random_states(self.seeds)
        try:
            yield
        finally:
            _set_random_states(before)


def _leaves_of(model: Callable, args: tuple, kwargs: dict) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, buffers, captured tensors and inputs by name, each of them once."""
    seen = set()
    for name, tensor in (*_state(model, args, kwargs), *_parameters(model)):
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


def _state(model: Callable, args: tuple, kwargs: dict) -> Iterator[tuple[str, torch.Tensor]]:
    for name, one in copies.held(model):
        if isinstance(one, torch.nn.Module):
            for inner, buffer in one.named_buffers(prefix=name):
                yield f"buffer {inner}", buffer
        else:
            yield name, one
    for name, leaf in (*_named("input", args), *_named("input", kwargs)):
        if torch.is_tensor(leaf):
            yield name, leaf


def _parameters(model: Callable) -> Iterator[tuple[str, torch.Tensor]]:
    for name, one in copies.held(model):
        if isinstance(one, torch.nn.Module):
            yield from one.named_parameters(prefix=name)


def _named(name: str, value: object) -> Iterator[tuple[str, object]]:
    """The leaves of nested containers and dataclasses: output.logits, output[0].h"""
    for path, leaf in pytree.tree_flatten_with_path(value)[0]:
        here = name + "".join(map(_step, path))
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            for one in dataclasses.fields(leaf):
                yield from _named(f"{here}.{one.name}", getattr(leaf, one.name))
        else:
            yield here, leaf


def _step(key: object) -> str:
    inner = getattr(key, "key", getattr(key, "name", None))
    return f".{inner}" if isinstance(inner, str) else str(key)


def _differs(one: torch.Tensor, other: torch.Tensor) -> bool:
    same = one.dtype == other.dtype and one.shape == other.shape
    return not same or not torch.equal(one, other)


def _dense(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return tensor.to_dense() if tensor is not None and tensor.is_sparse else tensor


def _random_states(devices: list[int]) -> tuple:
    numpy = sys.modules.get("numpy")
    return (
        torch.get_rng_state(),
        {i: torch.cuda.get_rng_state(i) for i in devices},
        random.getstate(),
        numpy.random.get_state() if numpy else None,
    )


def _set_random_states(states: tuple) -> None:
    cpu, gpus, python, of_numpy = states
    torch.set_rng_state(cpu)
    for device, state in gpus.items():
        torch.cuda.set_rng_state(state, device)
    random.setstate(python)
    if of_numpy is not None:
        sys.modules["numpy"].random.set_state(of_numpy)
