"""fxfuse: fused residual-add + RMSNorm for traced PyTorch models, forward and backward.

torch.compile(model, backend=fxfuse.backend)       compile with the fusions
fxfuse.apply(graph_module)                         fuse in a pipeline of your own
fxfuse.verify(model, *inputs)                      fused against eager, in numbers
fxfuse inspect hf:llama                            what would fuse, on the command line
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import TYPE_CHECKING


def _find_rooms() -> None:
    """In a checkout patterns/ and kernels/ lie beside this folder; in a wheel, inside it.

    Their parent in `__path__` would do, but who walks the package then finds it in itself.
    """
    here = Path(__file__).parent
    for room in ("patterns", "kernels"):
        if not (here / room).is_dir():
            spec = ModuleSpec(f"{__name__}.{room}", None, is_package=True)
            spec.submodule_search_locations = [str(here.parent / room)]
            module = importlib.util.module_from_spec(spec)
            globals()[room] = sys.modules[spec.name] = module


_find_rooms()

# A saved program finds its ops after `import fxfuse` alone.
import fxfuse.kernels.ops  # noqa: E402, F401

if TYPE_CHECKING:
    from fxfuse.backends import backend, inductor_options, make_backend, record
    from fxfuse.pipeline import FusePass, apply
    from fxfuse.registry import pattern
    from fxfuse.report import Match, Miss, Report
    from fxfuse.trace import explain
    from fxfuse.verification import Verification
    from fxfuse.verifying import verify

__version__ = "0.1.0"
_WHERE = {
    "backend": "backends", "make_backend": "backends", "inductor_options": "backends",
    "record": "backends", "apply": "pipeline", "FusePass": "pipeline", "explain": "trace",
    "pattern": "registry", "Match": "report", "Miss": "report", "Report": "report",
    "verify": "verifying", "Verification": "verification",
}  # fmt: skip
__all__ = [
    "FusePass", "Match", "Miss", "Report", "Verification", "apply", "backend", "explain",
    "inductor_options", "make_backend", "pattern", "record", "verify",
]  # fmt: skip


def __getattr__(name: str) -> object:
    if name not in _WHERE:
        raise AttributeError(f"module 'fxfuse' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"fxfuse.{_WHERE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHERE})
