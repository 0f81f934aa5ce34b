"""Rows that begin beyond 2**31 elements, in Triton's interpreter.

The tensors are that large, but of their memory only the last rows are ever touched: the launch runs
the last programs alone.
"""

import pytest
import torch
from triton.runtime import interpreter

from fxfuse.kernels import gate_launch, rms_norm_launch, rows, sandwich_launch
from tests.kernels.exact import normal

FP16, FP32 = torch.float16, torch.float32
EPS = 1e-6
BEYOND = 2**31
LAST = 2  # programs that run


@pytest.fixture(autouse=True)
def only_the_last_programs(monkeypatch):
    """Launches run their last programs only, as if all before them had run."""
    builder = interpreter.interpreter_builder
    get_program_id = type(builder).create_get_program_id

    def launch(cut, programs, arguments, constants):
        if "STAGES" in cut.constants:  # its programs walk over the rows
            programs = -(-arguments[cut.kernel.arg_names.index("M")] // cut.constants["ROWS"])

        def shifted(self, axis):
            found = get_program_id(self, axis)
            return interpreter.TensorHandle(found.data + programs - LAST, found.dtype)

        monkeypatch.setattr(type(builder), "create_get_program_id", shifted)
        rows_launch(cut, LAST, arguments, constants)
        monkeypatch.setattr(type(builder), "create_get_program_id", get_program_id)

    rows_launch = rows.launch
    for module in (rms_norm_launch, gate_launch, sandwich_launch):
        monkeypatch.setattr(module, "launch", launch)


def tall(N, seed):
    """fp16 [M, N] of more than 2**31 elements, values in the last rows only; those rows."""
    count = 64 if N <= 512 else 4
    whole = torch.empty(BEYOND // N + count, N, dtype=FP16)
    last = normal(count, N, dtype=FP16, seed=seed)
    whole[-count:] = last
    return whole, last


def last_rows(N, *tensors):
    """The rows that the last programs wrote, in the whole run and in one over those rows alone."""
    count = LAST if N > 512 else 32
    return [t[-count:] for t in tensors if t is not None]


def same(N, whole, alone):
    for found, expected in zip(last_rows(N, *whole), last_rows(N, *alone), strict=True):
        assert torch.equal(found, expected)
        assert found.isfinite().all()


def alone(function, *arguments):
    """The same on the last rows only, with all programs."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (rms_norm_launch, gate_launch, sandwich_launch):
            patch.setattr(module, "launch", rows.launch)
        return function(*arguments)


def rstd_of(h):
    rstd = torch.empty(h.shape[:-1], dtype=FP32)
    rstd[-64:] = torch.rsqrt(h[-64:].float().square().mean(-1) + EPS)
    return rstd


# Tiles of several rows, one row, chunks of a row.
@pytest.mark.parametrize("N", (64, 4096, 33000))
def test_add_rms_norm(N):
    def forward(x, residual):
        return rms_norm_launch.forward(
            x, residual, weight, eps=EPS, weight_offset=0.0, unit_dtype=FP16, out_dtype=FP16
        )

    weight = normal(N, seed=2)
    (x, x_last), (residual, residual_last) = tall(N, 0), tall(N, 1)
    same(N, forward(x, residual), alone(forward, x_last, residual_last))


@pytest.mark.parametrize("N", (64, 4096, 12000, 33000))
def test_add_rms_norm_backward(N):
    def backward(dy, h, dres):
        return rms_norm_launch.backward(
            [dy], h, weight, rstd_of(h), dres, weight_offset=0.0, need_dweight=False
        )

    weight = normal(N, seed=3)
    wholes, lasts = zip(*(tall(N, seed) for seed in range(3)))
    same(N, backward(*wholes), alone(backward, *lasts))


@pytest.mark.parametrize("N", (64, 1000, 11008))
def test_silu_gate(N):
    def forward(x, gate):
        return [gate_launch.silu_gate(x, gate, sigmoid_dtype=None, silu_dtype=None, out_dtype=FP16)]

    def backward(dy, x, gate):
        return gate_launch.silu_gate_backward([dy], x, gate)

    wholes, lasts = zip(*(tall(N, seed) for seed in range(3)))
    # the last two programs write the last columns of one row, or those of a few rows
    for function, operands, rest in ((forward, wholes[:2], lasts[:2]), (backward, wholes, lasts)):
        found, expected = function(*operands), alone(function, *rest)
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a[-1, -32:], b[-1, -32:])


@pytest.mark.parametrize("gate_first", (False, True))
@pytest.mark.parametrize("N", (64, 4096, 17000))
def test_gates_beside_a_norm(N, gate_first):
    rounding = dict(sigmoid_dtype=None, silu_dtype=None)
    norm = dict(eps=EPS, weight_offset=0.0, unit_dtype=FP16, out_dtype=FP16, **rounding)

    def forward(x, gate):
        if gate_first:
            return gate_launch.silu_gate_rms_norm(
                x, gate, weight, group=N, gated_dtype=None, **norm
            )
        return gate_launch.rms_norm_silu_gate(x, gate, weight, norm_dtype=FP16, **norm)

    def backward(dy, x, gate):
        if gate_first:
            return gate_launch.silu_gate_rms_norm_backward(
                [dy], x, gate, weight, rstd_of(x).unsqueeze(-1), group=N, gated_dtype=None,
                weight_offset=0.0, need_dweight=False, **rounding,
            )  # fmt: skip
        return gate_launch.rms_norm_silu_gate_backward(
            [dy], x, gate, weight, rstd_of(x), None, weight_offset=0.0, need_dweight=False
        )

    weight = normal(N, seed=3)
    wholes, lasts = zip(*(tall(N, seed) for seed in range(3)))
    same(N, forward(*wholes[:2]), alone(forward, *lasts[:2]))
    same(N, backward(*wholes), alone(backward, *lasts))


@pytest.mark.parametrize("N", (64, 4096, 17000))
def test_norm_add_norm(N):
    def forward(x, residual):
        return sandwich_launch.rms_norm_add_rms_norm(
            x, residual, weight1, weight2, eps1=EPS, eps2=EPS, weight_offset1=0.0,
            weight_offset2=0.0, unit_dtype1=None, norm_dtype1=FP16, h_dtype=FP16, unit_dtype2=None,
            out_dtype=FP16,
        )  # fmt: skip

    def backward(dy, x, h):
        return sandwich_launch.rms_norm_add_rms_norm_backward(
            [dy], x, h, weight1, weight2, rstd_of(x), rstd_of(h), None, weight_offset1=0.0,
            weight_offset2=0.0, need_dweight1=False, need_dweight2=False,
        )  # fmt: skip

    weight1, weight2 = normal(N, seed=3), normal(N, seed=4)
    wholes, lasts = zip(*(tall(N, seed) for seed in range(3)))
    same(N, forward(*wholes[:2]), alone(forward, *lasts[:2]))
    same(N, backward(*wholes), alone(backward, *lasts))
