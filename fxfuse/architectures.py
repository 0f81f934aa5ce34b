"""`hf:` targets: architectures of the installed transformers, without weights or downloads."""

from __future__ import annotations

import difflib
import inspect
import json
import os
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

import torch

from fxfuse import cuts, errors, samples

TOKENS = (1, 2048)  # batch and length of the inputs when none are given


def build(text: str, settings: Iterable[str] = ()) -> torch.nn.Module:
    """The model on the meta device, in its config's dtype.

    text: `hf:llama` for the defaults of a model type, or `hf:path/to/config.json`.
    settings: `key=value` for the config, before it is made; `text_config.key=value` goes deeper.
    """
    transformers = _transformers(text)
    config_class, values, own = _values(text, settings, transformers)
    with torch.device("meta"):
        return _made(config_class.from_dict(_merged(values, own)), transformers)


def build_with_values(
    text: str, settings: Iterable[str] = (), full: bool = False
) -> tuple[torch.nn.Module, str]:
    """The model with random weights, and in words how it was cut: in what `settings` leave open.

    Norms get weights that are not all alike, as training would give them.
    """
    transformers = _transformers(text)
    config_class, values, own = _values(text, settings, transformers)
    config = config_class.from_dict(_merged(values, own))
    if full:
        return _with_values(config, transformers), ""
    for cut, words in cuts.smaller(config):
        try:
            smaller = config_class.from_dict(_merged(_merged(values, cut), own))
            model = _with_values(smaller, transformers)
            _try(text, model)
            return model, words
        except errors.FxfuseError:
            raise
        except Exception as error:  # the widths of a model may depend on one another
            problem, cause = f"{type(error).__name__}: {error}".partition("\n")[0], error
    raise errors.CannotCut(target=text, problem=problem) from cause


def _values(
    text: str, settings: Iterable[str], transformers: ModuleType
) -> tuple[type, dict, dict]:
    """The class of the config, the values of its file, and those of `settings`."""
    name = text.removeprefix("hf:")
    values = _read(text, name) if _is_path(name) else {}
    config_class = _config_class(text, values.pop("model_type", name), transformers)
    own: dict = {}
    for setting in settings:
        _set(own, setting, config_class)
    return config_class, values, own


def _merged(values: dict, over: dict) -> dict:
    found = dict(values)
    for key, value in over.items():
        deeper = isinstance(value, dict) and isinstance(found.get(key), dict)
        found[key] = _merged(found[key], value) if deeper else value
    return found


def _made(config: object, transformers: ModuleType) -> torch.nn.Module:
    return _model_class(config, transformers)._from_config(config, dtype=config.dtype)


def _with_values(config: object, transformers: ModuleType) -> torch.nn.Module:
    model = _made(config, transformers)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def _try(text: str, model: torch.nn.Module) -> None:
    """Raises if a forward does not go through."""
    given = {
        name: samples.fill(name, like, model, "cpu")
        for name, like in inputs(text, model, cuts.TOKENS).items()
    }
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        model(**given, **no_cache(model))


def inputs(
    text: str, model: torch.nn.Module, tokens: tuple[int, int] = TOKENS
) -> dict[str, torch.Tensor]:
    """One row of tokens for the model, or one image, without values."""
    config, main = model.config.get_text_config(), model.main_input_name
    if main == "pixel_values" and isinstance(getattr(model.config, "image_size", None), int):
        size = model.config.image_size
        shape = (1, getattr(model.config, "num_channels", 3), size, size)
        return {main: torch.zeros(shape, dtype=model.dtype, device="meta")}
    if main != "input_ids":
        raise errors.NoInputs(target=text)
    length = min(tokens[1], getattr(config, "max_position_embeddings", None) or tokens[1])
    ids = torch.zeros((tokens[0], length), dtype=torch.int64, device="meta")
    return {name: ids for name in (main, "decoder_input_ids") if name in _parameters(model)}


def no_cache(model: torch.nn.Module) -> dict[str, bool]:
    """A cache of keys and values is for generation, and would be built in every layer."""
    return {"use_cache": False} if "use_cache" in _parameters(model) else {}


def _transformers(text: str):
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        import transformers
    except ImportError:
        raise errors.PackageMissing(
            target=text, wanted_by="an hf: target", package="transformers"
        ) from None
    return transformers


def _is_path(name: str) -> bool:
    return name.endswith(".json") or os.path.isdir(name)


def _read(text: str, name: str) -> dict:
    path = Path(name, "config.json") if os.path.isdir(name) else Path(name)
    if not path.is_file():
        raise errors.TargetMissing(target=text, path=str(path), cwd=os.getcwd())
    try:
        values = json.loads(path.read_text())
        return {"model_type": values.pop("model_type"), **values}
    except (ValueError, KeyError, AttributeError) as error:
        problem = "it has no model_type" if isinstance(error, KeyError) else f"{error}"
        raise errors.BadConfig(target=text, path=str(path), problem=problem) from error


def _config_class(text: str, name: str, transformers) -> type:
    known = transformers.CONFIG_MAPPING
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name.lower().replace("-", "_"), list(known), n=4, cutoff=0.5)
    advice = f"near it are {', '.join(near)}" if near else "see transformers.CONFIG_MAPPING"
    if "/" in name:
        advice = "nothing is downloaded, so name a model type such as hf:llama, or a config.json"
    raise errors.UnknownArchitecture(
        target=text, name=name, version=transformers.__version__, near=advice
    )


def _set(values: dict, setting: str, config_class: type) -> None:
    key, equals, text = setting.partition("=")
    if not equals or not text:
        raise errors.UnknownSetting(setting=setting, problem="write KEY=VALUE")
    *groups, last = key.split(".")
    for group in groups:
        values = values.setdefault(group, {})
        config_class = getattr(config_class, "sub_configs", {}).get(group)
    known = set(inspect.signature(config_class).parameters) if config_class else {last}
    known |= set(getattr(config_class, "attribute_map", ()))
    if last not in known or not isinstance(values, dict):
        near = difflib.get_close_matches(last, known, n=3, cutoff=0.5)
        raise errors.UnknownSetting(
            setting=setting,
            problem=f"the config has no {key!r}: "
            + (f"near it are {', '.join(near)}" if near else f"it has {', '.join(sorted(known))}"),
        )
    try:
        values[last] = json.loads(text)
    except ValueError:
        values[last] = text


def _model_class(config, transformers) -> type:
    """What the config names; else the causal language model; else the base model."""
    named = [getattr(transformers, name, None) for name in config.architectures or ()]
    for auto in (transformers.AutoModelForCausalLM, transformers.AutoModel):
        if type(config) in auto._model_mapping:
            named.append(auto._model_mapping[type(config)])
    found = next(model for model in named if model is not None)
    return found[0] if isinstance(found, (tuple, list)) else found


def _parameters(model: torch.nn.Module) -> set[str]:
    return set(inspect.signature(model.forward).parameters)
