"""The machine code of the kernels for GPUs, none of which is needed.

What every kernel compiles to is kept in a table for each version of Triton, which
scripts/machine_code.py writes; here the tables are judged, and a sample is compiled anew.
"""

import re
import shutil
import sys
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402

from fxfuse.kernels import choice, gate_launch, rms_norm_launch, sandwich_launch  # noqa: E402
from fxfuse.kernels.machine_code import MachineCode, compile_kernel, source_of  # noqa: E402
from fxfuse.kernels.settle import rungs  # noqa: E402

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import machine_code  # noqa: E402

ONE_GRADIENT = frozenset({"dy2", "dy3"})
BF16, FP32 = torch.bfloat16, torch.float32
TABLES = sorted(machine_code.FOLDER.glob("triton-*.tsv"))

# ------------------------------------------------------------ the tables


def test_there_are_tables():
    assert {path.stem for path in TABLES} >= {"triton-3.6.0", "triton-3.8.0", "triton-3.9.0"}


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_a_table_has_every_kernel_width_and_gpu(path):
    assert list(machine_code.read(path)) == list(machine_code.places())


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_nothing_is_spilled_without_a_reason(path):
    wrong = {
        place: entry.spilled
        for place, entry in machine_code.read(path).items()
        if entry.spilled > explained(place, entry, path.stem)
    }
    assert not wrong


def explained(place: machine_code.Place, entry: machine_code.Entry, triton_: str) -> int:
    """Bytes that may be spilled, because the next kernel would cost more than they do."""
    if entry.program == "backward_chunks" and place.N >= 16384:
        return 64  # the share of dweight in registers; else it is added up in memory
    if place.variant == "silu_gate_rms_norm_bwd" and triton_ == "triton-3.6.0":
        return 8  # two registers of an older compiler; else each row is computed twice
    return 0


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_rows_are_read_and_written_by_16_bytes(path):
    """Narrower are the rstd of a row, and once for a program the ends of its sums."""
    for place, entry in machine_code.read(path).items():
        sizes = set(re.findall(r"(\d+)x", entry.narrower))
        if place.variant == "finalize":
            assert sizes <= {"2", "4"} and entry.wide >= 90, place
        elif entry.stages and entry.rows > 1:
            assert sizes <= {"4", "8"} and entry.wide >= 85, place
        else:
            assert sizes <= {"4"} and entry.wide >= 90, place


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_backwards_load_ahead(path):
    """Three stages or more, or else a warp has others beside it to wait with."""
    for place, entry in machine_code.read(path).items():
        if entry.stages:
            assert entry.stages >= 3, place
            assert entry.resident * entry.warps >= 8, place


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_instructions(path):
    """At the full bandwidth of an H200 (4.8 TB/s, 132 multiprocessors, 1.7 GHz or more), issue
    slots for 128 instructions a clock are left over."""
    for place, entry in machine_code.read(path).items():
        if place.variant == "finalize" or entry.program.endswith("_wide"):
            continue  # small, or no model is as wide: those compute each row twice
        bytes_of_element = BYTES[place.variant] * (2 if place.dtype == "fp32" else 1)
        elements_of_clock = 4.8e12 / 132 / 1.7e9 / bytes_of_element
        assert entry.instructions * elements_of_clock < 128, place


# Of an element in bf16: the tensors that are read and written.
BYTES = {
    "rms_norm": 4,
    "add_rms_norm": 8,
    "rms_norm_bwd": 6,
    "add_rms_norm_bwd": 8,
    "add_rms_norm_bwd, 3 dy": 12,
    "silu_gate": 6,
    "silu_gate_bwd": 10,
    "rms_norm_silu_gate": 6,
    "rms_norm_silu_gate_bwd": 10,
    "silu_gate_rms_norm": 6,
    "silu_gate_rms_norm_bwd": 10,
    "rms_norm_add_rms_norm": 8,
    "rms_norm_add_rms_norm_bwd": 12,
}


@pytest.mark.skipif(
    not machine_code.table_path().exists(),
    reason=f"no table of machine code for Triton {triton.__version__}",
)
def test_a_sample_compiles_to_what_the_table_says():
    expected = machine_code.read(machine_code.table_path())
    for place in machine_code.sample():
        assert machine_code.compile_place(place) == expected[place], place


# ------------------------------------------------------------ what the tables do not show


@pytest.mark.parametrize("capability", (80, 90, 100, 120))
def test_a_row_is_on_its_way_while_the_one_before_it_is_computed(capability):
    code = compile_kernel("backward", 4096, BF16, capability, absent=ONE_GRADIENT)
    assert code.stack == 0
    assert set(code.widths("copy")) == {4, 16}  # 4: rstd
    assert code.widths("copy").count(4) <= code.widths("copy").count(16) / 2
    assert [n for n in code.waits() if n > 0]


def test_three_gradients_and_a_residual_gradient_are_all_loaded_ahead():
    one = compile_kernel("backward", 4096, BF16, 90, absent=ONE_GRADIENT)
    three = compile_kernel("backward", 4096, BF16, 90)
    copied = [code.widths("copy").count(16) for code in (one, three)]
    assert copied[1] * 3 == copied[0] * 5


def test_reductions_of_narrow_rows_stay_in_a_warp():
    code = compile_kernel("backward", 128, BF16, 90, absent=ONE_GRADIENT)
    loop = code.ptx[code.ptx.index("cp.async.wait_group") : code.ptx.rindex("cp.async.wait_group")]
    assert loop.count("shfl.sync") >= 4
    assert loop.count("bar.sync") <= 2  # those of the copies
    assert "st.shared" not in loop


def test_an_unknown_stride_costs_the_wide_loads():
    """What STRIDE_UNIT is for; also shows that the widths above are not found by chance."""
    code = compile_kernel("forward", 4096, BF16, 90, STRIDE_UNIT=1)
    assert min(code.widths("load")) == 2


def test_strides_of_8_times_an_odd_number_keep_them():
    code = compile_kernel("forward", 4096, BF16, 90, STRIDE_UNIT=8)
    assert set(code.widths("load")) == {16}


KERNELS = (
    (rms_norm_launch, "forward", frozenset()),
    (rms_norm_launch, "backward", ONE_GRADIENT),
    (gate_launch, "silu_gate", frozenset()),
    (gate_launch, "rms_norm_silu_gate_backward", ONE_GRADIENT | {"dres"}),
    (gate_launch, "silu_gate_rms_norm_backward", ONE_GRADIENT | {"dres"}),
    (sandwich_launch, "backward", ONE_GRADIENT),
)


@pytest.mark.parametrize("launches, kernel, absent", KERNELS)
def test_sm_120(launches, kernel, absent):
    """Less shared memory than a data centre's GPU has, and no spilled registers either."""
    code = compile_kernel(kernel, 4096, BF16, 120, launches=launches, absent=absent)
    assert code.stack == 0
    assert code.shared <= choice.NVIDIA[120].shared
    assert {*code.widths("load"), *code.widths("store")} <= {4, 16}


@pytest.mark.parametrize("launches, kernel, absent", KERNELS)
def test_gfx942(launches, kernel, absent):
    plan = launches.plan(kernel, 4096, BF16, architecture=choice.GFX942)
    compiled = triton.compile(
        source_of(plan, 4096, BF16, absent),
        target=GPUTarget("hip", "gfx942", 64),
        options=plan.options,
    )
    code = compiled.asm["amdgcn"]
    assert re.search(r"\.vgpr_spill_count:\s+0\b", code)
    assert compiled.metadata.shared <= choice.GFX942.shared
    assert re.search(r"(global|buffer)_load_dwordx4", code)
    assert re.search(r"(global|buffer)_store_dwordx4", code)
    assert not re.search(r"(global|buffer)_load_(ushort|short|sbyte|ubyte)", code)


@pytest.mark.parametrize("N", (65536, 131072))
def test_very_wide_rows(N):
    for launches, kernel, absent in (
        (rms_norm_launch, "forward", frozenset()),
        (rms_norm_launch, "backward", ONE_GRADIENT),
        (gate_launch, "rms_norm_silu_gate_backward", ONE_GRADIENT | {"dres"}),
        (sandwich_launch, "forward", frozenset()),
    ):
        code = compile_kernel(kernel, N, BF16, 90, launches=launches, absent=absent)
        assert code.stack == 0
        assert {*code.widths("load"), *code.widths("store")} <= {4, 16}


def test_groups_of_columns():
    for kernel, absent in (
        ("silu_gate_rms_norm", frozenset()),
        ("silu_gate_rms_norm_backward", ONE_GRADIENT | {"dres"}),
    ):
        code = compile_kernel(
            kernel, 8192, BF16, 90, launches=gate_launch, cut={"group": 1024}, absent=absent
        )
        assert code.stack == 0 and {*code.widths("load"), *code.widths("store")} <= {4, 16}


@pytest.mark.parametrize("kernel, N", (("forward", 131072), ("backward", 65536)))
def test_clusters(kernel, N, monkeypatch):
    """Several programs share a row, and its sum goes through one another's shared memory."""
    monkeypatch.setenv("FXFUSE_CLUSTERS", "1")
    if not choice.clusters_work(choice.NVIDIA[90]):
        pytest.skip(f"Triton {triton.__version__} compiles no reduction over a cluster")
    code = clustered(kernel, N)
    assert code.plan.clusters > 1
    assert code.stack == 0
    assert "shared::cluster" in code.ptx


def clustered(kernel: str, N: int) -> MachineCode:
    from dataclasses import replace

    architecture = replace(choice.NVIDIA[90], clusters=True)
    absent = ONE_GRADIENT if kernel == "backward" else ()
    cut = {"architecture": architecture}
    return compile_kernel(kernel, N, BF16, 90, cut=cut, absent=absent)


def test_without_being_asked_for_there_are_no_clusters():
    for N in (65536, 131072):
        for kernel in ("forward", "backward"):
            plans = rungs(rms_norm_launch.plan(kernel, N, BF16))
            assert all(plan.clusters == 1 for plan in plans)


@pytest.fixture(scope="module", autouse=True)
def fresh_cache(tmp_path_factory):
    """Compile everything anew, so that the compiler under test is the one at hand."""
    folder = tmp_path_factory.mktemp("triton")
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(folder)
        yield
    shutil.rmtree(folder)
