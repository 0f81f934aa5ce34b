"""What the compiler makes of the kernels for a GPU that need not be present."""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from types import ModuleType

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fxfuse.kernels import rms_norm_launch
from fxfuse.kernels.rows import DTYPES


@dataclass(frozen=True)
class MachineCode:
    """Registers and stack bytes of a thread, shared memory bytes of a program, and the PTX.

    A kernel without local arrays has a stack only where registers are spilled to it.
    """

    registers: int
    stack: int
    shared: int
    ptx: str

    def widths(self, access: str) -> list[int]:
        """Bytes of each global access of a kind: "load", "store" or "copy" (to shared memory)."""
        if access == "copy":
            copies = re.findall(r"cp\.async\.c[ag]\.shared\.global.*?\], *(0x\w+|\d+)", self.ptx)
            return [int(size, 0) for size in copies]
        opcode = {"load": "ld", "store": "st"}[access]
        found = re.findall(rf"\b{opcode}\.global[\w:.]*?(?:\.v(\d))?\.b(\d+)\s", self.ptx)
        return [int(lanes or 1) * int(bits) // 8 for lanes, bits in found]

    def waits(self) -> list[int]:
        """How many groups of copies may still be under way after each wait for copies."""
        return [int(n, 0) for n in re.findall(r"cp\.async\.wait_group\s+(0x\w+|\d+)", self.ptx)]


def compile_kernel(
    kernel: str,
    N: int,
    dtype: torch.dtype,
    capability: int,
    *,
    launches: ModuleType = rms_norm_launch,
    cut: dict[str, object] | None = None,
    absent: frozenset[str] = frozenset(),
    **constants: object,
) -> MachineCode:
    """Compile a kernel that `launches.plan` knows for rows of N columns, as a launch would.

    dtype: of all tensors except rstd and the partial sums (fp32); capability: 80, 90, 100, ...;
    cut: further arguments of `launches.plan`; absent: tensors passed as None; constants: others
    than for contiguous rows, no offset and no rounding.
    """
    cut = dict(cut or {})
    names = launches.plan(kernel, N, dtype, **cut).kernel.arg_names
    present = [name for name in names if f"{name}_stride" in names and name not in absent]
    if present:
        cut["row_tensors"] = len(present)
    cut = launches.plan(kernel, N, dtype, **cut)
    values = {name: 0.0 for name in names if name.startswith("WEIGHT_OFFSET")}
    values |= {name: None for name in names if "_DTYPE" in name}
    values |= {"STRIDE_UNIT": min(8, N & -N), **cut.constants, **constants, **dict.fromkeys(absent)}
    signature, constexprs, attributes = {}, {}, {}
    for index, name in enumerate(cut.kernel.arg_names):
        if name in values:
            signature[name], constexprs[(index,)] = "constexpr", values[name]
            continue
        signature[name] = _type_of(name, dtype)
        if signature[name].startswith("*"):
            attributes[(index,)] = [["tt.divisibility", 16]]
    compiled = triton.compile(
        ASTSource(cut.kernel, signature, constexprs, attributes),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": cut.num_warps, "enable_fp_fusion": True},
    )
    registers, stack = _resources(compiled.asm["cubin"])
    return MachineCode(registers, stack, compiled.metadata.shared, compiled.asm["ptx"])


def _type_of(name: str, dtype: torch.dtype) -> str:
    if name in ("M", "P") or name.endswith("_stride"):
        return "i32"
    if name.startswith("eps"):
        return "fp32"
    if name.startswith(("rstd", "partials")):
        return "*fp32"
    return f"*{DTYPES[dtype]}"


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers and stack bytes of a thread."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return tuple(int(re.search(rf"{word}:(\d+)", text)[1]) for word in ("REG", "STACK"))
