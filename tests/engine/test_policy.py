"""Which side is a kernel, and why."""

from __future__ import annotations

import pytest
import torch

from fxfuse import policy
from fxfuse.errors import BadOption


def place(rows, columns, dtype=torch.bfloat16, target="sm_90", compiled=True, pattern="rms_norm"):
    value = torch.empty(rows, columns, dtype=dtype, device="meta")
    return policy.place(pattern, [value], compiled, target)


@pytest.mark.parametrize(
    ("where", "forward", "backward"),
    [
        (place(4096, 4096, target="cpu", dtype=torch.float32), "inline", "inline"),
        (place(4096, 4096, target="cpu"), "kernel", "inline"),
        (place(4096, 4096, target="cpu", compiled=False), "kernel", "kernel"),
        (place(4096, 4096), "kernel", "kernel"),
        (place(16384, 4096), "kernel", "inline"),
        (place(65536, 128), "inline", "inline"),
        (place(512, 128), "inline", "kernel"),
        (place(16384, 8192), "kernel", "kernel"),
        (place(16384, 4096, compiled=False), "kernel", "kernel"),
        (place(16384, 4096, pattern="silu_gate"), "inline", "inline"),
        (place(16384, 4096, pattern="silu_gate", compiled=False), "kernel", "kernel"),
        (place(16384, 1024, pattern="rms_norm_add_rms_norm"), "kernel", "kernel"),
    ],
)
def test_auto(where, forward, backward):
    choice = policy.choose("auto", where)
    assert (choice.forward, choice.backward) == (forward, backward)
    assert len(choice.why.split()) > 3


def test_rows_and_columns():
    assert place(3, 5) == policy.Place("rms_norm", "gpu", True, 3, 5, half=True)
    x, half = torch.empty(2, 3, 4), torch.empty(2, 3, 4, dtype=torch.float16)
    on_cpu = policy.place("rms_norm", [x], compiled=False, target=None)
    assert on_cpu == policy.Place("rms_norm", "cpu", False, 6, 4, half=False)
    assert policy.place("rms_norm", [x, None, half], False, None).half
    grouped = policy.place("silu_gate_rms_norm", [x], True, "sm_90", group=2)
    assert (grouped.rows, grouped.columns) == (12, 2)
    unknown = policy.place("rms_norm", [None], True, None)
    assert unknown == policy.Place("rms_norm", "cpu", True, None, None, half=False)
    assert policy.place("rms_norm", [None], True, "sm_80").device == "gpu"


def test_what_joins_a_backward_kernel():
    assert policy.choose("auto", None).backward == "kernel"
    assert policy.choose("never", None) is None


def test_always_and_never():
    assert policy.choose("never", place(4, 4)) is None
    choice = policy.choose("always", place(4, 4, target="cpu"))
    assert (choice.forward, choice.backward) == ("kernel", "kernel")


def test_bad_values():
    with pytest.raises(BadOption, match="'fast'"):
        policy.check("fast")
    with pytest.raises(BadOption, match=r"'sm_70'.*sm_80"):
        policy.check_target("sm_70")
