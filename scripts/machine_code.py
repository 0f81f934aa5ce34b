"""What the compiler at hand makes of every kernel, as a table that the tests compare with.

    python scripts/machine_code.py           write the table of this Triton anew (some minutes)
    python scripts/machine_code.py --sample  compile some of it, and show what differs

No GPU is needed. The tables lie in tests/kernels/machine_code, one for each version of Triton.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import multiprocessing
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import ModuleType

import torch
import triton

from fxfuse.kernels import gate_launch, rms_norm_launch, sandwich_launch
from fxfuse.kernels.machine_code import MachineCode, compile_kernel

FOLDER = Path(__file__).parents[1] / "tests" / "kernels" / "machine_code"
WIDTHS = (64, 128, 256, 1024, 2880, 4096, 5120, 7168, 8192, 16384, 32768)
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
CAPABILITIES = (80, 90, 100)


@dataclass(frozen=True)
class Variant:
    """A kernel that `launches.plan` knows, with the tensors that it does not get.

    widest: columns beyond which another kernel takes its place.
    """

    launches: ModuleType
    kernel: str
    absent: frozenset[str] = frozenset()
    widest: int = WIDTHS[-1]


ONE_GRADIENT = frozenset({"dy2", "dy3"})
ONLY_GRADIENT = ONE_GRADIENT | {"dres"}
VARIANTS = {
    "rms_norm": Variant(rms_norm_launch, "forward", frozenset({"residual", "h"})),
    "add_rms_norm": Variant(rms_norm_launch, "forward"),
    "rms_norm_bwd": Variant(rms_norm_launch, "backward", ONLY_GRADIENT),
    "add_rms_norm_bwd": Variant(rms_norm_launch, "backward", ONE_GRADIENT),
    "add_rms_norm_bwd, 3 dy": Variant(rms_norm_launch, "backward"),
    "finalize": Variant(rms_norm_launch, "finalize"),
    "silu_gate": Variant(gate_launch, "silu_gate"),
    "silu_gate_bwd": Variant(gate_launch, "silu_gate_backward", ONE_GRADIENT),
    "rms_norm_silu_gate": Variant(gate_launch, "rms_norm_silu_gate"),
    "rms_norm_silu_gate_bwd": Variant(gate_launch, "rms_norm_silu_gate_backward", ONLY_GRADIENT),
    "silu_gate_rms_norm": Variant(gate_launch, "silu_gate_rms_norm"),
    "silu_gate_rms_norm_bwd": Variant(gate_launch, "silu_gate_rms_norm_backward", ONLY_GRADIENT),
    "rms_norm_add_rms_norm": Variant(sandwich_launch, "forward"),
    "rms_norm_add_rms_norm_bwd": Variant(sandwich_launch, "backward", ONE_GRADIENT, widest=4096),
}


@dataclass(frozen=True)
class Place:
    """One line of the table, before it is compiled: a variant, N columns, a dtype and a GPU."""

    variant: str
    N: int
    dtype: str
    capability: int


@dataclass(frozen=True)
class Entry:
    """What one compilation gave.

    stages, resident: 0 for kernels that have no loop over rows. spilled: bytes of a thread; shared:
    of a program. wide: percent of 16-byte accesses among global ones, by bytes; narrower: the
    others, as bytes x how many. instructions: for each element, see MachineCode.
    """

    program: str
    block: int
    rows: int
    warps: int
    stages: int
    resident: int
    registers: int
    spilled: int
    shared: int
    wide: int
    narrower: str
    instructions: float


def places() -> Iterator[Place]:
    """All lines of the table, in order."""
    for name, variant in VARIANTS.items():
        for N in WIDTHS:
            for dtype in DTYPES:
                if variant.widest >= N:
                    yield from (Place(name, N, dtype, sm) for sm in CAPABILITIES)


def sample() -> list[Place]:
    """Two lines of each variant: one of 4096 columns, and one that differs between variants."""
    found = []
    for i, name in enumerate(VARIANTS):
        widths = [N for N in WIDTHS if VARIANTS[name].widest >= N]
        dtype, sm = list(DTYPES)[i % 2], CAPABILITIES[i % 3]
        found += [
            Place(name, 4096, "bf16", 90),
            Place(name, widths[3 * i % len(widths)], dtype, sm),
        ]
    return list(dict.fromkeys(found))


def compile_place(place: Place) -> Entry:
    variant = VARIANTS[place.variant]
    code = compile_kernel(
        variant.kernel, place.N, DTYPES[place.dtype], place.capability,
        launches=variant.launches, absent=variant.absent,
    )  # fmt: skip
    constants = code.plan.constants
    return Entry(
        program=code.plan.kernel.fn.__name__,
        block=constants["BLOCK"],
        rows=constants["ROWS"],
        warps=code.plan.num_warps,
        stages=constants.get("STAGES", 0),
        resident=code.plan.resident,
        registers=code.registers,
        spilled=code.stack,
        shared=code.shared,
        wide=int(100 * code.wide_share),
        narrower=narrower(code),
        instructions=round(code.instructions_per_element, 1),
    )


def narrower(code: MachineCode) -> str:
    sizes = Counter(size for kind in ("load", "store", "copy") for size in code.widths(kind))
    return " ".join(f"{size}x{count}" for size, count in sorted(sizes.items()) if size != 16) or "-"


# ------------------------------------------------------------ the table


def table_path() -> Path:
    """Of the Triton at hand."""
    return FOLDER / f"triton-{triton.__version__}.tsv"


HEAD = ("kernel", "columns", "dtype", "sm", *(field.name for field in fields(Entry)))


def write(entries: dict[Place, Entry], path: Path) -> None:
    lines = [HEAD] + [
        (*vars(place).values(), *vars(entry).values()) for place, entry in entries.items()
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join("\t".join(map(str, line)) + "\n" for line in lines))


def read(path: Path) -> dict[Place, Entry]:
    kinds = [{"int": int, "str": str, "float": float}[field.type] for field in fields(Entry)]
    entries = {}
    for line in path.read_text().splitlines()[1:]:
        variant, N, dtype, sm, *values = line.split("\t")
        entry = Entry(*(kind(value) for kind, value in zip(kinds, values)))
        entries[Place(variant, int(N), dtype, int(sm))] = entry
    return entries


def compile_all(chosen: Sequence[Place], processes: int | None = None) -> dict[Place, Entry]:
    """Compile anew, with nothing from Triton's cache."""
    with (
        tempfile.TemporaryDirectory() as folder,
        concurrent.futures.ProcessPoolExecutor(
            processes,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=use_cache,
            initargs=(folder,),
        ) as pool,
    ):
        return dict(zip(chosen, pool.map(compile_place, chosen)))


def use_cache(folder: str) -> None:
    triton.knobs.cache.dir = folder


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Write anew the table of what every kernel compiles to with the Triton at hand."
    )
    parser.add_argument("--sample", action="store_true", help="compare a sample with the table")
    options = parser.parse_args()
    path = table_path()
    if not options.sample:
        write(compile_all(list(places())), path)
        print(path)
        return 0
    if not path.exists():
        print(f"no table for Triton {triton.__version__}", file=sys.stderr)
        return 2
    expected, found = read(path), compile_all(sample())
    different = [place for place in found if found[place] != expected[place]]
    for place in different:
        print(place, f"is {found[place]}", f"was {expected[place]}", sep="\n  ")
    print(f"{len(found)} kernels compiled, {len(different)} differ from {path.name}")
    return int(bool(different))


if __name__ == "__main__":
    sys.exit(main())
