"""Other people's kernels that are timed beside ours, where they are installed or carried along."""

from __future__ import annotations

import importlib
import site
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from op_cases import EPS
from torch import Tensor

Compute = Callable[..., tuple[Tensor, ...]]

CARRY = """\
To compare with Liger and QuACK too, put them into a folder and name it with --wheels:

    pip install --target FOLDER --no-deps --only-binary=:all: --python-version 3.12 \\
        liger-kernel==0.8.5 \\
        quack-kernels==0.4.1 nvidia-cutlass-dsl==4.4.2 nvidia-cutlass-dsl-libs-base==4.4.2 \\
        apache-tvm-ffi torch-c-dlpack-ext einops cuda-python cuda-bindings cuda-pathfinder

3.12 is the Python of the machine with the GPU. Liger alone has 1 MB, the rest about 300 MB.
"""


@dataclass(frozen=True)
class Peer:
    """name: for the table; package: what is imported; makers: by case, what makes its function.

    A function takes the operands of the case and returns what its chain does, differentiable by
    autograd.
    """

    name: str
    package: str
    makers: dict[str, Callable[[], Compute]]

    def compute(self, case: str) -> Compute | None:
        """Its function for a case; None where it has none. Raises ImportError if not installed."""
        maker = self.makers.get(case)
        return None if maker is None else maker()

    def missing(self) -> str | None:
        """Why it cannot be imported, or None."""
        try:
            importlib.import_module(self.package)
        except Exception as error:  # a package may fail in any way where its own parts are missing
            return f"{self.name} is not here ({type(error).__name__}: {error})"
        return None


def add_folder(folder: Path) -> None:
    """Make packages of a folder importable, those too that name further folders in .pth files."""
    site.addsitedir(str(folder.resolve()))


def liger_add() -> Compute:
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction as function

    def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        # offset, casts as in Llama, and not in place: the gradients are used again
        return function.apply(x, residual, weight, EPS, 0.0, "llama", False)

    return add_rms_norm


def liger_norm() -> Compute:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction as function

    def rms_norm(x: Tensor, weight: Tensor) -> tuple[Tensor]:
        return (function.apply(x, weight, EPS, 0.0, "llama", False),)

    return rms_norm


def quack_add() -> Compute:
    from quack import rmsnorm

    def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        # prenorm: the sum is returned too, and takes a gradient
        return rmsnorm(x, weight, residual=residual, eps=EPS, prenorm=True)

    return add_rms_norm


def quack_norm() -> Compute:
    from quack import rmsnorm

    def rms_norm(x: Tensor, weight: Tensor) -> tuple[Tensor]:
        return (rmsnorm(x, weight, eps=EPS),)

    return rms_norm


PEERS = (
    Peer("Liger", "liger_kernel", {"add_rms_norm": liger_add, "rms_norm": liger_norm}),
    Peer("QuACK", "quack", {"add_rms_norm": quack_add, "rms_norm": quack_norm}),
)
