"""fxfuse: fused residual-add + RMSNorm for traced PyTorch models, forward and backward.

torch.compile(model, backend=fxfuse.backend)       compile with the fusions
fxfuse.apply(graph_module)                         fuse in a pipeline of your own
fxfuse inspect hf:llama                            what would fuse, on the command line
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING

# In a checkout patterns/ and kernels/ lie beside this folder; in a wheel, inside it.
if not (Path(__file__).parent / "kernels").is_dir():
    __path__.append(str(Path(__file__).parents[1]))

# A saved program finds its ops after `import fxfuse` alone.
import fxfuse.kernels.ops  # noqa: F401

if TYPE_CHECKING:
    from fxfuse.backends import backend, inductor_options, make_backend, record
    from fxfuse.pipeline import FusePass, apply
    from fxfuse.registry import pattern
    from fxfuse.report import Match, Miss, Report
    from fxfuse.trace import explain

__version__ = "0.1.0"
_WHERE = {
    "backend": "backends", "make_backend": "backends", "inductor_options": "backends",
    "record": "backends", "apply": "pipeline", "FusePass": "pipeline", "explain": "trace",
    "pattern": "registry", "Match": "report", "Miss": "report", "Report": "report",
}  # fmt: skip
__all__ = [
    "FusePass", "Match", "Miss", "Report", "apply", "backend", "explain", "inductor_options",
    "make_backend", "pattern", "record",
]  # fmt: skip


def __getattr__(name: str) -> object:
    if name not in _WHERE:
        raise AttributeError(f"module 'fxfuse' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"fxfuse.{_WHERE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHERE})
