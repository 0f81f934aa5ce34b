"""TARGET of the command line: what to look at, built with its inputs, on the meta device or real.

`path/to/file.py:factory`, `package.module:factory`, `hf:NAME`, `hf:path/to/config.json`, or a
saved program `path/to/program.pt2`. Whatever goes wrong is an `errors.TargetError` of one line,
caused by the error that the user's own code raised.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType

import torch
from torch.utils import _pytree as pytree

from fxfuse import architectures, cuts, errors, inputs, places, samples


@dataclass
class Target:
    """A model and the inputs of one call, or an exported program, which has its own.

    note: in words, how the model was made smaller.
    """

    name: str
    model: torch.nn.Module | None = None
    args: tuple = ()
    kwargs: dict = field(default_factory=dict)
    program: torch.export.ExportedProgram | None = None
    note: str = ""


@dataclass(frozen=True)
class Real:
    """Build the target with values, from the random numbers that come next.

    device: where to put it. full: leave an `hf:` target at its size.
    """

    device: str = "cpu"
    full: bool = False


def load(
    text: str,
    given: Iterable[str] = (),
    settings: Iterable[str] = (),
    train: bool | None = None,
    real: Real | None = None,
) -> Target:
    """The target that `text` names, with the inputs and config settings `given` for it.

    train: puts the model into train or eval mode; None leaves a factory's model as it is made.
    real: None for the meta device; otherwise a program becomes a model too.
    """
    positional, named = inputs.parse_all(given)
    if text.startswith("hf:"):
        target = _architecture(text, settings, positional, named, real)
    elif settings := list(settings):
        raise errors.UnknownSetting(setting=settings[0], problem="only hf: targets have a config")
    elif text.endswith(".pt2"):
        target = Target(text, program=_program(text))
        if real is None:
            return target
        _use_program(target)
    else:
        target = _made(text, _factory(text), real)
    if train is not None and target.program is None:
        target.model.train(train)
    _move(target, real.device if real else "meta")
    _add_inputs(target, positional, named)
    if real is not None:
        _fill(target, real.device)
    return target


def blame(target: str, action: str, error: BaseException) -> errors.TargetError:
    """The one line that says which error of the user's code stopped us, and where."""
    where = places.of_error(error) or target
    if isinstance(error, ModuleNotFoundError) and error.name:
        return errors.PackageMissing(target=target, wanted_by=where, package=error.name)
    message = " ".join(str(error).split())[:300]
    return errors.TargetRaised(
        target=target, action=action, kind=type(error).__name__, where=where, message=message
    )


def _architecture(
    text: str, settings: Iterable[str], positional: list, named: dict, real: Real | None
) -> Target:
    cut = ""
    try:
        if real is None:
            model = architectures.build(text, settings)
        else:
            model, cut = architectures.build_with_values(text, settings, real.full)
    except errors.FxfuseError:
        raise
    except Exception as error:
        raise blame(text, "building the model", error) from error
    if positional:  # these models take their inputs by name
        named[model.main_input_name] = replace(positional.pop(0), name=model.main_input_name)
    tokens = cuts.TOKENS if cut else architectures.TOKENS
    kwargs = {} if named else architectures.inputs(text, model, tokens)
    note = f"{text} is cut to {cut} (--full leaves it as it is)" if cut else ""
    return Target(text, model, (), kwargs | architectures.no_cache(model), note=note)


def _program(text: str) -> torch.export.ExportedProgram:
    _need_file(text, text)
    try:
        return torch.export.load(text)
    except Exception as error:
        raise blame(text, "loading the program", error) from error


def _use_program(target: Target) -> None:
    """The program as a model, with the inputs that were saved with it."""
    target.model = target.program.module()
    target.args, target.kwargs = target.program.example_inputs or ((), {})
    target.args, target.kwargs = tuple(target.args), dict(target.kwargs)


def _factory(text: str) -> Callable:
    path, colon, name = text.rpartition(":")
    if not colon or not path or not name:
        raise errors.BadTarget(target=text)
    is_file = path.endswith(".py") or os.sep in path
    module = _file_module(text, Path(path)) if is_file else _named_module(text, path)
    try:
        return functools.reduce(getattr, name.split("."), module)
    except AttributeError:
        own = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        own = [n for n in own if getattr(vars(module)[n], "__module__", "") == module.__name__]
        known = ", ".join(own) or "nothing that could be called"
        raise errors.NoFactory(target=text, path=path, name=name, known=known) from None


def _file_module(text: str, path: Path) -> ModuleType:
    _need_file(text, str(path))
    sys.path.insert(0, str(path.parent.resolve()))
    name = path.stem if path.stem not in sys.modules else f"_fxfuse_target_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise blame(text, "importing it", error) from error
    return module


def _named_module(text: str, name: str) -> ModuleType:
    sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and f"{name}.".startswith(f"{error.name}."):
            raise errors.ModuleMissing(target=text, module=error.name) from error
        raise blame(text, "importing it", error) from error
    except (Exception, SystemExit) as error:
        raise blame(text, "importing it", error) from error


def _need_file(text: str, path: str) -> None:
    if not os.path.isfile(path):
        raise errors.TargetMissing(target=text, path=path, cwd=os.getcwd())


def _made(text: str, factory: Callable, real: Real | None) -> Target:
    called = isinstance(factory, torch.nn.Module)
    made = factory if called else _call(text, factory, on_meta=real is None)
    parts = made if isinstance(made, tuple) and 2 <= len(made) <= 3 else (made, ())
    model, args, kwargs = (*parts, {})[:3]
    if not isinstance(model, torch.nn.Module) or not isinstance(kwargs, dict):
        raise errors.NoModel(target=text, got=_kind(made))
    args = args if isinstance(args, (tuple, list)) else (args,)
    return Target(text, model, tuple(args), kwargs)


def _call(text: str, factory: Callable, on_meta: bool) -> object:
    try:
        with torch.device("meta") if on_meta else contextlib.nullcontext():
            return factory()
    except (RuntimeError, NotImplementedError) as error:
        if "meta" not in str(error) or not on_meta:
            raise blame(text, "the factory", error) from error
    except (Exception, SystemExit) as error:
        raise blame(text, "the factory", error) from error
    try:
        return factory()  # it reads values of its tensors, so they have to be there
    except (Exception, SystemExit) as error:
        raise blame(text, "the factory", error) from error


def _kind(made: object) -> str:
    if isinstance(made, type):
        return f"the class {made.__name__}, not an instance of it"
    if isinstance(made, tuple):
        return f"a tuple of {', '.join(type(part).__name__ for part in made) or 'nothing'}"
    return f"{type(made).__name__} ({str(made)[:40]!r})" if made is not None else "None"


def _move(target: Target, device: str) -> None:
    """Inputs on the meta device stay there: they get values later."""
    if device != "meta" and any(p.is_meta for p in target.model.parameters()):
        raise errors.NoValues(what=f"{target.name}: the model")
    target.model.to(device)
    target.args, target.kwargs = pytree.tree_map_only(
        torch.Tensor, lambda t: t if t.is_meta else t.to(device), (target.args, target.kwargs)
    )


def _fill(target: Target, device: str) -> None:
    def value(name: str, given: object) -> object:
        meta = torch.is_tensor(given) and given.is_meta
        return samples.fill(name, given, target.model, device) if meta else given

    target.args = tuple(value("", one) for one in target.args)
    target.kwargs = {name: value(name, one) for name, one in target.kwargs.items()}


def _add_inputs(target: Target, positional: list, named: dict) -> None:
    dtypes = (p.dtype for p in target.model.parameters() if p.is_floating_point())
    dtype = next(dtypes, torch.float32)
    if positional:
        target.args = tuple(one.tensor(dtype) for one in positional)
    target.kwargs |= {name: one.tensor(dtype) for name, one in named.items()}
    if not target.args and not target.kwargs:
        raise errors.NoInputs(target=target.name)
