"""How launches are chosen: by what a GPU is like, and by what the compiler made of a kernel."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from fxfuse.kernels import choice, gate_launch, rms_norm_launch, rows, sandwich_launch
from fxfuse.kernels.choice import NVIDIA, Plan, ladder
from fxfuse.kernels.settle import Resources, choose, forced, rungs, settle

BF16, FP32 = torch.bfloat16, torch.float32
SM_80, SM_90, SM_100 = NVIDIA[80], NVIDIA[90], NVIDIA[100]
FITS = Resources(registers=64, spills=0, shared=0)


@pytest.mark.parametrize(
    "capability, name",
    ((70, "sm_80"), (80, "sm_80"), (89, "sm_86"), (90, "sm_90"), (100, "sm_100"), (121, "sm_120")),
)
def test_an_unknown_gpu_is_taken_for_the_nearest_older_one(capability, name):
    assert choice.architecture(capability).name == name


# ------------------------------------------------------------ bytes in flight


@pytest.mark.parametrize("architecture", NVIDIA.values(), ids=lambda a: a.name)
@pytest.mark.parametrize("dtype", (BF16, FP32), ids=str)
@pytest.mark.parametrize("N", (64, 128, 512, 1024, 2048, 4096, 8192, 16384, 65536))
def test_enough_bytes_are_under_way(N, dtype, architecture):
    """All but the tile in use, of all programs of a multiprocessor, or what there is room for."""
    plan = rms_norm_launch.plan("backward", N, dtype, architecture=architecture)
    constants = plan.constants
    tensors = 3 if plan.kernel is not rms_norm_launch.rms_norm_device.backward else 2
    tile = tensors * constants["ROWS"] * constants["BLOCK"] * dtype.itemsize
    under_way = plan.resident * (constants["STAGES"] - 2) * tile
    held = plan.resident * (constants["STAGES"] - 1) * tile
    assert held <= architecture.shared_in_all
    full = held + plan.resident * tile > architecture.shared_in_all - 4096
    assert under_way >= architecture.in_flight or full or constants["STAGES"] == 6


def test_two_stages_load_nothing_ahead_and_are_not_taken():
    for architecture in NVIDIA.values():
        for tile in (1 << shift for shift in range(8, 20)):
            for resident in (1, 2, 4):
                assert choice.count_stages(tile, resident, architecture) in (1, 3, 4, 5, 6)


def test_more_bandwidth_takes_more_stages():
    stages = [choice.count_stages(16384, 2, a) for a in (SM_80, SM_90, SM_100)]
    assert stages == sorted(stages) and stages[0] < stages[-1]


@pytest.mark.parametrize("architecture", NVIDIA.values(), ids=lambda a: a.name)
@pytest.mark.parametrize("N", (4096, 8192, 16384, 65536))
def test_every_backward_loads_ahead(N, architecture):
    given = {"architecture": architecture}
    for plan in (
        gate_launch.plan("rms_norm_silu_gate_backward", N, FP32, row_tensors=3, **given),
        gate_launch.plan("silu_gate_rms_norm_backward", N, FP32, row_tensors=5, **given),
        rms_norm_launch.plan("backward", N, FP32, row_tensors=5, **given),
    ):
        assert plan.constants["STAGES"] >= 3


def test_rows_that_leave_no_room_to_load_ahead_are_cut_into_chunks():
    for row_tensors in (2, 5):
        plan = rms_norm_launch.plan(
            "backward", 8192, FP32, row_tensors=row_tensors, architecture=SM_80
        )
        whole = plan.kernel is rms_norm_launch.rms_norm_device.backward
        assert whole == (row_tensors == 2)
        assert plan.constants["STAGES"] >= 3


@pytest.mark.parametrize(
    "launches, kernel",
    (
        (rms_norm_launch, "forward"),
        (rms_norm_launch, "backward"),
        (gate_launch, "silu_gate"),
        (gate_launch, "rms_norm_silu_gate_backward"),
        (sandwich_launch, "backward"),
    ),
)
def test_64_lanes_make_half_the_warps(launches, kernel):
    for N in (128, 1024, 4096):
        theirs = launches.plan(kernel, N, BF16, architecture=choice.GFX942)
        ours = launches.plan(kernel, N, BF16)
        assert theirs.num_warps * 2 == ours.num_warps
        assert theirs.constants.get("STAGES", 2) == 2
        assert "maxnreg" not in theirs.options


# ------------------------------------------------------------ what the compiler says

FIRST, SECOND, LAST = (Plan(None, {"N": 1}, num_warps=w, resident=1) for w in (4, 8, 16))


def chosen(plan: Plan, *spills: int) -> Plan:
    used = iter(replace(FITS, spills=count) for count in spills)
    return choose(plan, lambda _: next(used), SM_90)[0]


@pytest.mark.parametrize(
    "spills, warps",
    (((0,), 4), ((8, 0), 8), ((8, 8, 0), 16), ((24, 8, 16), 8), ((8, 8, 8), 4)),
)
def test_the_first_that_spills_nothing_or_else_the_least(spills, warps):
    assert chosen(ladder([FIRST, SECOND, LAST]), *spills).num_warps == warps


@pytest.mark.parametrize("spills, warps", (((8, 64), 4), ((72, 64), 8), ((72, 80, 0), 16)))
def test_a_worse_kernel_only_where_many_are_spilled(spills, warps):
    plan = ladder([FIRST, SECOND, replace(LAST, worse=True)])
    assert chosen(plan, *spills).num_warps == warps


@pytest.mark.parametrize(
    "registers, shared, warps, resident",
    (
        (128, 0, 8, 2),
        (128, 0, 16, 1),
        (129, 0, 8, 1),
        (64, 0, 4, 8),
        (32, 0, 4, 8),
        (80, 24 * 1024, 4, 6),
        (32, 100 * 1024, 8, 2),
        (255, 0, 16, 1),
    ),
)
def test_programs_that_run_at_once(registers, shared, warps, resident):
    assert choice.occupancy(registers, shared, warps, SM_90) == resident
    used = Resources(registers, 0, shared)
    plan, _ = choose(replace(FIRST, num_warps=warps), lambda _: used, SM_90)
    assert plan.resident == resident


def test_a_forward_has_no_resident_programs():
    plan, _ = choose(replace(FIRST, resident=0), lambda _: FITS, SM_90)
    assert plan.resident == 0


# ------------------------------------------------------------ never from the rows


def test_a_plan_knows_no_number_of_rows():
    for launches in (rms_norm_launch, gate_launch, sandwich_launch):
        names = launches.plan.__wrapped__.__code__.co_varnames
        assert not {"M", "rows"} & set(names)


def test_one_look_at_the_compiler_serves_all_numbers_of_rows(monkeypatch):
    triton = pytest.importorskip("triton")
    looked = []

    def look(plan, arguments, constants):
        looked.append(plan)
        return FITS

    monkeypatch.setattr("fxfuse.kernels.settle._resources", look)
    plan = rms_norm_launch.plan("backward", 4096, BF16)
    assert isinstance(plan.kernel, triton.JITFunction)
    device = choice.Device(SM_90, 132)
    for M in (1, 3, 1000):
        x = torch.empty(M, 8, dtype=BF16)
        settle(plan, (x, None, FP32, M, 4096), {"UNIT": 8}, device)
    assert len(looked) == 1
    settle(plan, (x.float(), None, FP32, 5, 4096), {"UNIT": 8}, device)
    settle(plan, (x, x, FP32, 5, 4096), {"UNIT": 8}, device)
    settle(plan, (x, None, FP32, 5, 4096), {"UNIT": 4}, device)
    assert len(looked) == 4


def test_a_plan_that_does_not_fit_gives_way(monkeypatch):
    from triton.runtime.errors import OutOfResources

    class Kernel:
        def __init__(self, fits: bool) -> None:
            self.fits = fits
            self.n_regs, self.n_spills, self.metadata = 64, 0, SimpleNamespace(shared=0)

        def warmup(self, *arguments, **constants):
            return self

        def _init_handles(self):
            if not self.fits:
                raise OutOfResources(300_000, 232_448, "shared memory")

    monkeypatch.setattr("triton.JITFunction", Kernel)
    tight, small = replace(FIRST, kernel=Kernel(False)), replace(SECOND, kernel=Kernel(True))
    device, x = choice.Device(SM_90, 132), torch.ones(1)
    assert settle(ladder([tight, small]), (x,), {}, device).kernel is small.kernel
    assert settle(ladder([tight]), (x,), {}, device).kernel is tight.kernel


def test_forced_for_measurements():
    plan = rms_norm_launch.plan("backward", 4096, BF16)
    device = choice.Device(SM_90, 132)
    with forced(num_warps=16, stages=1, resident=3):
        taken = settle(plan, (), {}, device)
    assert (taken.num_warps, taken.constants["STAGES"], taken.resident) == (16, 1, 3)
    with forced(rung=1), forced(resident=5):
        taken = settle(plan, (), {}, device)
    assert taken.kernel is plan.fallback.kernel and taken.resident == 5
    with forced(rung=99):
        assert settle(plan, (), {}, device).constants == rungs(plan)[-1].constants


# ------------------------------------------------------------ multiprocessors left to others


def test_sm_margin(monkeypatch):
    plan = rms_norm_launch.plan("backward", 4096, BF16)
    assert rows.count_programs(1 << 20, plan, 132) > rows.count_programs(1 << 20, plan, 100)
    monkeypatch.setenv("FXFUSE_SM_MARGIN", "1")
    assert choice.device_of(torch.ones(1)).multiprocessors == 1
    monkeypatch.setenv("FXFUSE_SM_MARGIN", "7")
    assert choice.device_of(torch.ones(1)).multiprocessors == 1


@pytest.mark.parametrize("text", ("-1", "eight", "1.5"))
def test_a_margin_that_is_none(text, monkeypatch):
    monkeypatch.setenv("FXFUSE_SM_MARGIN", text)
    with pytest.raises(ValueError, match=f"FXFUSE_SM_MARGIN is '{text}': give a number"):
        choice.device_of(torch.ones(1))
