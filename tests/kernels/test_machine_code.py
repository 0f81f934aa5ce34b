"""The machine code of the kernels for three generations of GPUs, none of which is needed."""

import shutil

import pytest
import torch

triton = pytest.importorskip("triton")

from fxfuse.kernels import gate_launch, sandwich_launch  # noqa: E402
from fxfuse.kernels.machine_code import MachineCode, compile_kernel  # noqa: E402

CAPABILITIES = (80, 90, 100)
ONE_GRADIENT = frozenset({"dy2", "dy3"})
BF16 = torch.bfloat16

# (kernel, N): most registers a thread may use, and bytes of shared memory. Half of the registers
# of a multiprocessor are 128 for 256 threads and 64 for 512.
FORWARD = {128: (48, 64), 1024: (32, 16), 4096: (48, 32), 8192: (40, 64)}
BACKWARD = {128: (126, 24704), 1024: (64, 12312), 4096: (128, 49192), 8192: (128, 98376)}


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("N", FORWARD)
def test_forward(N, capability):
    code = compile_kernel("forward", N, BF16, capability)
    check(code, *FORWARD[N])
    assert set(code.widths("load")) == {16}
    stores = code.widths("store")
    assert sorted(set(stores)) == [4, 16] and stores.count(4) == 1  # the 4 bytes are rstd


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("N", BACKWARD)
def test_backward(N, capability):
    code = compile_kernel("backward", N, BF16, capability, absent=ONE_GRADIENT)
    check(code, *BACKWARD[N])
    assert set(code.widths("load")) == {16}  # the weight, once
    check_prefetch(code)
    # narrow tiles end with one partial sum a thread
    assert set(code.widths("store")) == ({4, 16} if N == 128 else {16})


def test_three_gradients_and_a_residual_gradient():
    one = compile_kernel("backward", 4096, BF16, 90, absent=ONE_GRADIENT)
    three = compile_kernel("backward", 4096, BF16, 90)
    check(three, 128, 81960)
    check_prefetch(three)
    copied = {code: code.widths("copy").count(16) for code in (one, three)}
    assert copied[three] * 3 == copied[one] * 5


@pytest.mark.parametrize("N", (2880, 5120))
def test_widths_that_are_no_power_of_two(N):
    check(compile_kernel("forward", N, BF16, 90), 48, None)
    code = compile_kernel("backward", N, BF16, 90, absent=ONE_GRADIENT)
    check(code, 128, None)
    assert set(code.widths("load")) == {16} and set(code.widths("store")) == {16}
    check_prefetch(code)


@pytest.mark.parametrize("N", (16384, 65536))
def test_wide_rows(N):
    forward = compile_kernel("forward", N, BF16, 90)
    check(forward, 80, None)
    assert set(forward.widths("load")) == {16}
    backward = compile_kernel("backward", N, BF16, 90, absent=ONE_GRADIENT)
    check(backward, 128, 73728)
    assert set(backward.widths("store")) == {16}
    assert set(backward.widths("copy")) == {16}


def test_fp32():
    check(compile_kernel("forward", 4096, torch.float32, 90), 48, 32)
    code = compile_kernel("backward", 4096, torch.float32, 90, absent=ONE_GRADIENT)
    check(code, 128, 98344)
    check_prefetch(code)


def test_finalize():
    code = compile_kernel("finalize", 4096, BF16, 90)
    check(code, 48, 2048)
    assert set(code.widths("load")) == {16}


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("N", (96, 11008))
def test_silu_gate(N, capability):
    forward = compile_kernel("silu_gate", N, BF16, capability, launches=gate_launch)
    backward = compile_kernel("silu_gate_backward", N, BF16, capability, launches=gate_launch)
    for code in (forward, backward):
        check(code, 64, 0)
        assert set(code.widths("load")) == {16} and set(code.widths("store")) == {16}


# (op, N, columns of a group): most registers of a thread in the forward and in the backward.
GATES = {
    ("rms_norm_silu_gate", 128, 0): (48, 128),
    ("rms_norm_silu_gate", 4096, 0): (56, 128),
    ("rms_norm_silu_gate", 8192, 0): (64, 128),
    ("silu_gate_rms_norm", 128, 0): (48, 128),
    ("silu_gate_rms_norm", 4096, 0): (48, 128),
    ("silu_gate_rms_norm", 8192, 0): (48, 128),
    ("silu_gate_rms_norm", 8192, 1024): (48, 128),
}


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("op, N, group", GATES)
def test_gates_beside_a_norm(op, N, group, capability):
    given = {"launches": gate_launch, "cut": {"group": group}}
    forward = compile_kernel(op, N, BF16, capability, **given)
    check(forward, GATES[op, N, group][0], None)
    assert set(forward.widths("load")) == {16}
    assert set(forward.widths("store")) == {4, 16}  # the 4 bytes are rstd
    backward = compile_kernel(
        f"{op}_backward", N, BF16, capability, absent=ONE_GRADIENT | {"dres"}, **given
    )
    check(backward, GATES[op, N, group][1], None)
    assert set(backward.widths("load")) == {16}  # the weight, once
    check_prefetch(backward)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("op", ("rms_norm_silu_gate", "silu_gate_rms_norm"))
@pytest.mark.parametrize("dtype", (BF16, torch.float32), ids=str)
def test_gates_beside_the_norm_of_a_wide_row(op, dtype, capability):
    for kernel, absent in ((op, frozenset()), (f"{op}_backward", ONE_GRADIENT | {"dres"})):
        code = compile_kernel(kernel, 65536, dtype, capability, launches=gate_launch, absent=absent)
        check(code, 128, None)
        assert set(code.widths("load")) <= {4, 16}


# N: most registers of a thread in the forward and in the backward.
SANDWICH = {128: (56, 128), 2048: (64, 128), 4096: (80, 128)}


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("N", SANDWICH)
def test_norm_add_norm(N, capability):
    forward = compile_kernel("forward", N, BF16, capability, launches=sandwich_launch)
    check(forward, SANDWICH[N][0], None)
    assert set(forward.widths("load")) == {16}
    assert forward.widths("store").count(4) == 2  # two times rstd
    for absent in (ONE_GRADIENT, frozenset()):
        backward = compile_kernel(
            "backward", N, BF16, capability, launches=sandwich_launch, absent=absent
        )
        check(backward, SANDWICH[N][1], None)
        assert set(backward.widths("load")) == {16}  # the weights, once
        check_prefetch(backward, statistics=2)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("dtype", (BF16, torch.float32), ids=str)
def test_norm_add_norm_of_a_wide_row(dtype, capability):
    for N in (8192, 16384, 65536):
        code = compile_kernel("forward", N, dtype, capability, launches=sandwich_launch)
        check(code, 128, None)
        assert set(code.widths("load")) == {16}


def test_an_unknown_stride_costs_the_wide_loads():
    """What STRIDE_UNIT is for; also shows that the widths above are not found by chance."""
    code = compile_kernel("forward", 4096, BF16, 90, STRIDE_UNIT=1)
    assert min(code.widths("load")) == 2


def check(code: MachineCode, registers: int, shared: int | None) -> None:
    assert code.stack == 0, f"{code.stack} bytes of registers are spilled"
    assert code.registers <= registers
    assert shared is None or code.shared == shared


def check_prefetch(code: MachineCode, statistics: int = 1) -> None:
    """All rows come through asynchronous 16-byte copies; only rstd takes 4 bytes."""
    copies = code.widths("copy")
    assert set(copies) == {4, 16}
    assert copies.count(4) <= statistics * copies.count(16) / 2
    # a copy is still under way while the row before it is computed
    assert [n for n in code.waits() if n > 0]


@pytest.fixture(scope="module", autouse=True)
def fresh_cache(tmp_path_factory):
    """Compile everything anew, so that the compiler under test is the one at hand."""
    folder = tmp_path_factory.mktemp("triton")
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(folder)
        yield
    shutil.rmtree(folder)
