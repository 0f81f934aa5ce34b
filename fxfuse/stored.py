"""What was found in backward graphs, kept beside Inductor's caches: a hit there runs no hook.

Private PyTorch interface: `torch._inductor`'s cache folder, tried on torch 2.10 to 2.14.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import fx

from fxfuse.report import Report
from fxfuse.roundings import source_hash

log = logging.getLogger("fxfuse")


def key_of(gm: fx.GraphModule, settings: str) -> str:
    """A name for a graph before autograd, with what decides how it is rewritten."""
    trains = torch.is_grad_enabled()  # without grad the same graph has no backward
    digest = hashlib.sha256(f"{source_hash()} {torch.__version__} {settings} {trains}".encode())
    for name, module in gm.named_modules():
        if isinstance(module, fx.GraphModule):
            digest.update(f"{name} {module.code}".encode())
    for node in gm.graph.find_nodes(op="placeholder"):
        digest.update(_describe(node.meta.get("example_value")).encode())
    return digest.hexdigest()


def _describe(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return str(value)
    return f"{value.dtype} {tuple(value.shape)} {value.device} {value.requires_grad}"


def save(key: str, reports: Sequence[Report]) -> None:
    """Keep the reports of the graphs behind a graph, where the folder can be written."""
    file = _file(key)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as temporary:
            temporary.write(Report.merge(reports).to_json())
        os.replace(temporary.name, file)
    except OSError as error:
        log.debug("the report of a backward graph was not kept: %s", error)


def load(key: str) -> Report | None:
    """What was kept for a key, or None."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return Report.from_json(_file(key).read_text())
    return None


def _file(key: str) -> Path:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir()) / "fxfuse" / f"{key}.json"
