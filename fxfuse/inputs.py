"""`--input`: tensors named by shape and dtype, made on the meta device."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from fxfuse import errors

_TEXT = re.compile(r"(?:(?P<name>[A-Za-z_]\w*)=)?(?P<sizes>\d+(?:x\d+)*)(?:x(?P<dtype>[a-z]\w*))?")
_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


@dataclass(frozen=True)
class Input:
    """One `--input`. A `name` makes it a keyword argument.

    Without a dtype, names such as `input_ids` and `attention_mask` are int64, others the model's.
    """

    name: str | None
    shape: tuple[int, ...]
    dtype: torch.dtype | None

    def tensor(self, default: torch.dtype) -> torch.Tensor:
        if self.name and self.name.endswith(("ids", "_mask")):
            default = torch.int64
        return torch.zeros(self.shape, dtype=self.dtype or default, device="meta")


def parse(text: str) -> Input:
    """`[name=]2x128[xbfloat16]` as an `Input`; raises `errors.BadInput`."""
    found = _TEXT.fullmatch(text.strip())
    if not found:
        raise errors.BadInput(text=text, problem="it cannot be read")
    shape = tuple(int(size) for size in found["sizes"].split("x"))
    return Input(found["name"], shape, _dtype(text, found["dtype"]))


def parse_all(texts: Iterable[str]) -> tuple[list[Input], dict[str, Input]]:
    """The positional inputs and the named ones; raises `errors.BadInput` for a name given twice."""
    positional, named = [], {}
    for text in texts:
        one = parse(text)
        if one.name is None:
            positional.append(one)
        elif one.name in named:
            raise errors.BadInput(text=text, problem=f"{one.name!r} is given twice")
        else:
            named[one.name] = one
    return positional, named


def _dtype(text: str, word: str | None) -> torch.dtype | None:
    if word is None:
        return None
    dtype = getattr(torch, _SHORT.get(word, word), None)
    if not isinstance(dtype, torch.dtype):
        raise errors.BadInput(text=text, problem=f"{word!r} is not a dtype of torch")
    return dtype
