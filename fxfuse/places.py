"""Lines of the user's code: which one an error is about, and how to print it."""

from __future__ import annotations

import os
import sys
import traceback


def of_error(error: BaseException) -> str:
    """The innermost line outside Python, torch and fxfuse, as `path/file.py:123`; or ""."""
    traced = getattr(error, "real_stack", None) or getattr(error.__cause__, "real_stack", None)
    frames = list(traced or traceback.extract_tb(error.__traceback__))  # traced: by Dynamo
    users = [f for f in frames if not _is_machinery(f.filename)]
    if not users:
        return ""
    return short(f"{users[-1].filename}:{users[-1].lineno}")


def short(place: str) -> str:
    """Relative to the working directory or to where Python imports from, whichever is shorter."""
    roots = {os.path.abspath(root).rstrip(os.sep) + os.sep for root in (*sys.path, os.getcwd())}
    return min((place.removeprefix(root) for root in roots), key=len)


def _is_machinery(filename: str) -> bool:
    owners = [sys.modules[name] for name in ("fxfuse", "torch", "importlib") if name in sys.modules]
    roots = tuple(os.path.abspath(owner.__path__[0]) + os.sep for owner in owners)
    return filename.startswith(("<", *roots))
