"""Which side is a kernel, and why: by table, over the flow of a site."""

from __future__ import annotations

import pytest

from fxfuse import arguments, costs, policy
from fxfuse.costs import Barrier, Flow
from fxfuse.errors import BadOption

# Bytes an element in bf16, where a gradient is asked for and matrix products stand around.
NORM = Flow(reads=2, writes=2, saved=2, dy=2)
ADD_NORM = Flow(reads=4, writes=4, saved=2, dy=2, dres=2)
PROJECTED = Flow(reads=4, writes=4, saved=2, dy=2, dres=2, dys=3)  # q, k and v
MANY = Flow(reads=4, writes=4, saved=2, dy=2, dres=2, dys=5)
GATED = Flow(reads=4, writes=2, saved=4, dy=2)
SANDWICH = Flow(reads=4, writes=4, saved=4, dy=2, dres=2, norms=2)
GATE = Flow(reads=4, writes=2, saved=4, dy=2, norms=0, weighted=False)
FROZEN = Flow(reads=2, writes=2, saved=2, dy=2, weighted=False)
LAST = Flow(reads=4, writes=2, unused=2)  # nobody reads the sum, no gradient
ROPE = Flow(2, 2, saved=2, dy=2, barriers=(Barrier("the mul behind it", 4, 4),))
SCALED = Flow(4, 4, saved=2, dy=2, dres=2, barriers=(Barrier("the mul before it", 4, 2),))
WRITTEN_OUT = Flow(reads=6, writes=2, in_backward=True)

TWICE = "again from the cache (rows wider than 1024)"


def place(flow, rows, columns, target="sm_90", **more):
    return policy.Place("any", target, True, rows, columns, flow=flow, **more)


@pytest.mark.parametrize(
    ("where", "forward", "backward", "words"),
    [
        # the gates of Inductor's one pass
        (place(ADD_NORM, 2048, 4096), "kernel", "kernel", "12 and 4 again from the cache in two "
            "passes (fewer than 4096 rows)"),
        (place(ADD_NORM, 4096, 4096), "kernel", "kernel", "(as many rows as columns)"),
        (place(ADD_NORM, 8192, 8192), "kernel", "kernel", "(as many rows as columns)"),
        (place(ADD_NORM, 8192, 5120), "kernel", "kernel", "(fewer rows than 2 x columns)"),
        (place(ADD_NORM, 32768, 128), "inline", "kernel", "(fewer than 5 Mi elements)"),
        (place(ADD_NORM, 65536, 32768), "kernel", "kernel", "(rows wider than 16384)"),
        (place(ADD_NORM, 65536, None), "kernel", "kernel", "(a width that is not known)"),
        (place(ADD_NORM, 16384, 4096), "kernel", "inline", "8 bytes an element either way in one"),
        (place(ADD_NORM, 32768, 8192), "kernel", "kernel", "slow for rows wider than 4096"),
        # rows that are read twice, and narrow ones
        (place(NORM, 16384, 4096), "kernel", "inline", f"against Inductor's 4 and 2 {TWICE}"),
        (place(NORM, 131072, 128), "inline", "inline", "forward 4 bytes an element either way;"),
        (place(NORM, 512, 128), "inline", "inline", "at this size the call of an op costs more"),
        (place(NORM, 16384, 1024), "inline", "inline", "either way in one pass"),
        (place(NORM, 2048, 1024), "inline", "inline", "at this size the call of an op costs"),
        # several gradients of the result
        (place(PROJECTED, 4096, 4096), "kernel", "kernel", "backward 12 bytes an element against "
            "Inductor's 20 and 8 again"),
        (place(PROJECTED, 16384, 4096), "kernel", "inline", "backward 12 bytes an element either"),
        (place(MANY, 4096, 4096), "kernel", "kernel", "backward 16 + 4 bytes an element, keeping "
            "apart the sum of all but 2 of its gradients, against"),
        (place(MANY, 16384, 4096), "kernel", "inline", "Inductor's 16 in one pass"),
        # other patterns
        (place(GATED, 4096, 4096), "kernel", "kernel", "10 bytes an element against Inductor's 16"),
        (place(GATED, 262144, 128), "inline", "inline", "10 bytes an element either way in one"),
        (place(SANDWICH, 4096, 4096), "kernel", "kernel", "12 bytes an element against Inductor's "
            "20 and 12"),
        (place(SANDWICH, 16384, 4096), "kernel", "kernel", "against Inductor's 14 in one pass"),
        (place(GATE, 4096, 11008), "inline", "inline", "forward 6 bytes an element either way; "
            "backward 10 bytes an element either way"),
        (place(FROZEN, 4096, 4096), "kernel", "kernel", f"backward 6 bytes an element against "
            f"Inductor's 6 and 4 {TWICE}"),
        (place(FROZEN, 4096, 1024), "inline", "inline", "backward 6 bytes an element either way"),
        # what Inductor would fuse beside it
        (place(ROPE, 4096, 4096), "inline", "kernel", "forward 4 + 4 bytes an element, keeping "
            f"apart the mul behind it, against Inductor's 4 and 2 {TWICE};"),
        (place(ROPE, 16384, 4096), "inline", "inline", "backward 6 + 4 bytes an element"),
        (place(SCALED, 4096, 4096), "inline", "kernel", "backward 8 + 2 bytes an element, keeping "
            "apart the mul before it, against Inductor's 12 and 4"),
        (place(SCALED, 16384, 4096), "inline", "inline", "keeping apart the mul before it"),
        # no gradients
        (place(ADD_NORM, 2048, 4096, trains=False), "kernel", "kernel", "8 bytes an element against"
            f" Inductor's 8 and 4 {TWICE}; no gradient is asked for"),
        (place(NORM, 512, 128, trains=False), "inline", "inline", "no gradient is asked for"),
        (place(LAST, 2048, 4096, trains=False), "inline", "inline", "8 bytes an element against "
            "Inductor's 6 and 4"),
        # sizes that are not known
        (place(ADD_NORM, None, 4096), "kernel", "kernel", "against Inductor's 8 in one pass or 12 "
            "and 4 again from the cache in two passes (where the rows are few)"),
        (place(NORM, None, 128), "inline", "kernel", "6 in one pass or 10 in two passes (where"),
        (place(ROPE, None, 128), "inline", "inline", "6 in one pass or 10 in two passes"),
        (place(ADD_NORM, None, None), "kernel", "kernel", "(a width that is not known)"),
        (place(None, None, None), "inline", "inline", "its shapes are not known"),
        # a backward that autograd wrote out
        (place(WRITTEN_OUT, 4096, 4096), "kernel", "kernel", "8 bytes an element against "
            "Inductor's 14 and 6 again"),
        (place(WRITTEN_OUT, 16384, 4096), "inline", "inline", "8 bytes an element either way"),
    ],
)  # fmt: skip
def test_on_a_gpu(where, forward, backward, words):
    choice = policy.choose("auto", where)
    assert (choice.forward, choice.backward) == (forward, backward), choice.why
    assert words in choice.why


@pytest.mark.parametrize(
    ("where", "forward", "backward", "words"),
    [
        (place(None, 4096, 4096, "cpu"), "inline", "inline", "vectorises both sides"),
        (place(None, 4096, 4096, "cpu", fp16=True), "kernel", "inline", "roundings to fp16"),
    ],
)
def test_on_a_cpu(where, forward, backward, words):
    choice = policy.choose("auto", where)
    assert (choice.forward, choice.backward) == (forward, backward)
    assert words in choice.why


@pytest.mark.parametrize("target", policy.TARGETS)
def test_no_compiler(target):
    """Also of a gate on its own, and where nothing is known."""
    for flow in (GATE, None):
        choice = policy.choose("auto", policy.Place("silu_gate", target, compiled=False, flow=flow))
        assert (choice.forward, choice.backward) == ("kernel", "kernel")
        assert "no compiler" in choice.why


@pytest.mark.parametrize("target", costs.GPUS)
def test_each_gpu(target):
    """Far from its limits the choice is the same on all; small sites depend on their memory."""
    large, folded = (policy.choose("auto", place(ADD_NORM, rows, 4096, target))
                     for rows in (7168, 131072))  # fmt: skip
    assert (large.forward, large.backward) == ("kernel", "kernel")
    assert (folded.forward, folded.backward) == ("kernel", "inline")


def test_bandwidth_and_cache_count():
    small = [policy.choose("auto", place(NORM, 4096, 4096, t)).forward for t in ("sm_90", "sm_100")]
    assert small == ["kernel", "inline"]
    why = [policy.choose("auto", place(NORM, 4096, 4096, t)).why for t in ("sm_90", "sm_100")]
    assert "backward 6 bytes an element against Inductor's 10 and 4 again" in why[0]
    assert "backward 6 bytes an element against Inductor's 6 and 8 again" in why[1]


def test_a_kernel_never_wins_with_more_bytes():
    """For any flow and size: what auto takes moves no more than what Inductor would."""
    for flow in (NORM, ADD_NORM, PROJECTED, MANY, GATED, SANDWICH, GATE, FROZEN, ROPE, SCALED):
        for rows in (1, 100, 4096, 16384, 262144):
            for columns in (64, 1024, 1536, 4096, 8192, 16384, 65536):
                for gpu in costs.GPUS:
                    choice = policy.choose("auto", place(flow, rows, columns, gpu))
                    for side, (kernel, (inline,)) in (
                        (choice.forward, costs.forward(flow, columns)),
                        (choice.backward, costs.backward(flow, rows, columns, costs.GPUS[gpu])),
                    ):
                        assert side == "inline" or kernel.moved <= inline.moved


def test_what_joins_a_backward_kernel():
    """Not what Inductor would add up without writing it first."""
    for count, side in ((0, "kernel"), (1, "kernel"), (2, "inline")):
        joining = place(None, 4096, 4096, added_apart=count)
        assert policy.choose("auto", joining).backward == side
        assert policy.choose("always", joining).backward == "kernel"
        assert policy.choose("never", joining) is None
    alone = policy.Place("any", "sm_90", compiled=False, added_apart=2)
    assert policy.choose("auto", alone).backward == "kernel"


def test_always_and_never():
    assert policy.choose("never", place(NORM, 4, 4)) is None
    choice = policy.choose("always", place(NORM, 4, 4, "cpu"))
    assert (choice.forward, choice.backward) == ("kernel", "kernel")


def test_bad_values():
    with pytest.raises(BadOption, match="'fast'"):
        policy.check("fast")
    with pytest.raises(BadOption, match=r"'sm_70'.*sm_80"):
        policy.check_target("sm_70")


def test_the_command_line_knows_the_same_targets():
    assert arguments.TARGETS == policy.TARGETS
