"""What the compiler makes of the kernels for a GPU that need not be present."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property
from types import ModuleType

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fxfuse.kernels import choice, rms_norm_launch
from fxfuse.kernels.choice import Plan
from fxfuse.kernels.rows import DTYPES
from fxfuse.kernels.settle import Resources, choose


@dataclass(frozen=True)
class MachineCode:
    """A kernel's plan, registers and stack bytes of a thread, shared bytes of a program, and PTX.

    A kernel without local arrays has a stack only where registers are spilled to it.
    """

    plan: Plan
    registers: int
    stack: int
    shared: int
    ptx: str
    cubin: bytes

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

    @property
    def wide_share(self) -> float:
        """The share of 16-byte accesses among all global accesses, by bytes."""
        sizes = [size for kind in ("load", "store", "copy") for size in self.widths(kind)]
        return sum(size for size in sizes if size == 16) / sum(sizes)

    @cached_property
    def instructions_per_element(self) -> float:
        """Machine instructions of a thread for each element [M, N] that it handles.

        Those of the outermost loop if it is one over rows, or else of the whole kernel; a loop
        inside counts as often as a row has chunks.
        """
        constants = self.plan.constants
        chunks = 1
        if self.plan.kernel.fn.__name__.endswith(("_wide", "_chunks")):
            chunks = triton.cdiv(constants.get("GROUP", constants["N"]), constants["BLOCK"])
        lanes = 32 * self.plan.num_warps
        elements = constants["ROWS"] * chunks * constants["BLOCK"] / lanes
        return _executed(_disassemble(self.cubin), chunks, "STAGES" in constants) / elements


def compile_kernel(
    kernel: str,
    N: int,
    dtype: torch.dtype,
    capability: int,
    *,
    launches: ModuleType = rms_norm_launch,
    cut: dict[str, object] | None = None,
    absent: Collection[str] = (),
    **constants: object,
) -> MachineCode:
    """Compile a kernel that `launches.plan` knows for rows of N columns, as a launch would.

    dtype: of all tensors except rstd and the partial sums (fp32); capability: 80, 90, 100, ...;
    cut: further arguments of `launches.plan`; absent: tensors passed as None; constants: others
    than for contiguous rows, no offset and no rounding.
    """
    architecture = choice.architecture(capability)
    cut = {"architecture": architecture, **(cut or {})}
    names = launches.plan(kernel, N, dtype, **cut).kernel.arg_names
    present = [name for name in names if f"{name}_stride" in names and name not in absent]
    if present and kernel != "finalize":
        cut.setdefault("row_tensors", len(present))
    codes: dict[Resources, MachineCode] = {}

    def resources(plan: Plan) -> Resources:
        code = _compile(plan, N, dtype, capability, absent, constants)
        used = Resources(code.registers, code.stack, code.shared)
        codes.setdefault(used, code)
        return used

    best, used = choose(launches.plan(kernel, N, dtype, **cut), resources, architecture)
    return replace(codes[used], plan=best)


def _compile(
    plan: Plan,
    N: int,
    dtype: torch.dtype,
    capability: int,
    absent: Collection[str],
    constants: dict[str, object],
) -> MachineCode:
    source = source_of(plan, N, dtype, absent, constants)
    compiled = triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options=plan.options
    )
    cubin = compiled.asm["cubin"]
    registers, stack = _resources(cubin)
    return MachineCode(plan, registers, stack, compiled.metadata.shared, compiled.asm["ptx"], cubin)


def source_of(
    plan: Plan,
    N: int,
    dtype: torch.dtype,
    absent: Collection[str] = (),
    constants: dict[str, object] | None = None,
) -> ASTSource:
    """A plan's kernel with the types and constants that a launch gives it."""
    names = plan.kernel.arg_names
    values = {name: 0.0 for name in names if name.startswith("WEIGHT_OFFSET")}
    values |= {name: None for name in names if "_DTYPE" in name}
    values |= {"STRIDE_UNIT": min(8, N & -N), **plan.constants}
    values |= {**(constants or {}), **dict.fromkeys(absent)}
    signature, constexprs, attributes = {}, {}, {}
    for index, name in enumerate(names):
        if name in values:
            signature[name], constexprs[(index,)] = "constexpr", values[name]
            continue
        signature[name] = _type_of(name, dtype)
        if signature[name].startswith("*"):
            attributes[(index,)] = [["tt.divisibility", 16]]
    return ASTSource(plan.kernel, signature, constexprs, attributes)


def _type_of(name: str, dtype: torch.dtype) -> str:
    if name in ("M", "P") or name.endswith("_stride"):
        return "i32"
    if name.startswith("eps"):
        return "fp32"
    if name.startswith(("rstd", "partials")):
        return "*fp32"
    return f"*{DTYPES[dtype]}"


# ------------------------------------------------------------ reading a cubin


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers and stack bytes of a thread."""
    text = _cuobjdump(cubin, "-res-usage")
    return tuple(int(re.search(rf"{word}:(\d+)", text)[1]) for word in ("REG", "STACK"))


def _cuobjdump(cubin: bytes, option: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _disassemble(cubin: bytes) -> list[tuple[int, str]]:
    """Address and text of each instruction, without the padding at the end."""
    found = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.+?) *;", _cuobjdump(cubin, "-sass"))
    code = [(int(address, 16), text) for address, text in found]
    while "NOP" in code[-1][1] or _target(code[-1][1]) == code[-1][0]:
        code.pop()
    return code


def _target(instruction: str) -> int | None:
    """Where a branch goes."""
    found = re.search(r"\bBRA\b.*?(0x[0-9a-f]+)", instruction)
    return int(found[1], 16) if found else None


def _executed(code: list[tuple[int, str]], chunks: int, over_rows: bool) -> int:
    """Instructions for a tile, or a row in chunks."""
    loops = [
        (target, address)
        for address, text in code
        if (target := _target(text)) is not None and target <= address
    ]
    begin, end = code[0][0], code[-1][0]
    if over_rows and loops:
        begin, end = max(loops, key=lambda loop: loop[1] - loop[0])
        loops.remove((begin, end))
    count = sum(begin <= address <= end for address, _ in code)
    inside = [(a, b) for a, b in loops if begin <= a and b <= end]
    repeated = sum(any(a <= address <= b for a, b in inside) for address, _ in code)
    return count + repeated * (chunks - 1)
