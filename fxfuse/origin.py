"""Where a node comes from: the path of its module, and the line of the user's code."""

from __future__ import annotations

import os
import re
from functools import lru_cache

import torch
from torch import fx

_TORCH = os.path.dirname(torch.__file__) + os.sep
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
# Dynamo roots a path at the frame's locals: L['self'].layers.0 or L['args'][0].model
_LOCAL = re.compile(r"^(?:L|G)(?:\[[^\]]*\])+\.?")
_ITEM = re.compile(r"\[(?:'|\")?([^\]'\"]+)(?:'|\")?\]")


def module_path(node: fx.Node) -> str:
    """Path of the innermost module that the node was traced in, such as "model.layers.0.norm"."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return node.target if node.op == "call_module" else ""
    last = next(reversed(stack.values()))
    path = last[0] if isinstance(last, tuple) else last
    return _readable(str(path))


@lru_cache(maxsize=4096)
def _readable(path: str) -> str:
    path = _LOCAL.sub("", path).replace("_modules[", "[")
    return _ITEM.sub(r".\1", path).removeprefix("self.").strip(".")


def code_line(node: fx.Node) -> str:
    """The innermost frame outside of PyTorch as file:line, "" where none was recorded."""
    trace = node.meta.get("stack_trace")
    if not trace:
        return ""
    frames = _FRAME.findall(trace)
    own = [f for f in frames if not f[0].startswith(_TORCH)]
    file, line = (own or frames or [("", "")])[-1]
    return f"{_shorten(file)}:{line}" if file else ""


def _shorten(file: str) -> str:
    """Relative to the working directory, or to site-packages for a file of a package."""
    _, mark, inside = file.rpartition(f"site-packages{os.sep}")
    if mark:
        return inside
    here = os.getcwd() + os.sep
    return file.removeprefix(here)
