"""One vocabulary: the same word however an operation is spelt."""

from __future__ import annotations

import pytest
import torch
from torch import fx

import fxfuse
from fxfuse.view import View


def word_of(function, args=None):
    """The word of the last operation of a traced function."""
    gm = fx.symbolic_trace(function)
    last = gm.graph.output_node().args[0]
    return View(gm).term(last)


@pytest.mark.parametrize(
    ("word", "functions"),
    [
        ("add", [lambda x, y: x + y, lambda x, y: torch.add(x, y), lambda x, y: x.add(y),
                 lambda x, y: torch.add(x, y, alpha=1), lambda x, y: torch.add(input=x, other=y)]),
        ("mul", [lambda x, y: x * y, lambda x, y: torch.mul(x, y), lambda x, y: x.mul(y),
                 lambda x, y: torch.multiply(x, y), lambda x, y: x / torch.sqrt(y)]),
        ("square", [lambda x, y: x * x, lambda x, y: x**2, lambda x, y: x.pow(2.0),
                    lambda x, y: torch.pow(x, 2), lambda x, y: x.square(),
                    lambda x, y: torch.square(x)]),
        ("rsqrt", [lambda x, y: torch.rsqrt(x), lambda x, y: x.rsqrt(), lambda x, y: x**-0.5,
                   lambda x, y: 1 / torch.sqrt(x), lambda x, y: 1.0 / x.sqrt(),
                   lambda x, y: x.sqrt().reciprocal(), lambda x, y: torch.pow(x, -0.5)]),
        ("mean", [lambda x, y: x.mean(-1, keepdim=True),
                  lambda x, y: torch.mean(x, -1, True),
                  lambda x, y: torch.mean(input=x, dim=[-1], keepdim=True),
                  lambda x, y: x.mean(axis=-1, keepdim=True)]),
        ("cast", [lambda x, y: x.float(), lambda x, y: x.to(torch.float32), lambda x, y: x.half(),
                  lambda x, y: x.to(dtype=torch.bfloat16), lambda x, y: x.type_as(y),
                  lambda x, y: x.to(y.dtype), lambda x, y: x.type(torch.float64)]),
        ("rms_norm", [lambda x, y: torch.nn.functional.rms_norm(x, (4,)),
                      lambda x, y: torch.rms_norm(x, (4,), y, 1e-6)]),
        ("same", [lambda x, y: x * 1, lambda x, y: 1 * x]),
        ("power", [lambda x, y: x**3, lambda x, y: x.pow(1.0)]),
        ("power", [lambda x, y: x**y, lambda x: x**3, lambda x, y: torch.pow(x, y)]),
        ("opaque", [lambda x, y: torch.rsub(x, y),
                    lambda x, y: x.to("cpu"), lambda x, y: x // y,
                    lambda x, y: torch.div(x, y, rounding_mode="floor")]),
    ],
)  # fmt: skip
def test_words(word, functions):
    for function in functions:
        assert word_of(function).word == word


def test_a_flaw_says_why_a_mean_is_not_one_over_the_last_dim():
    assert "drops the dimension" in word_of(lambda x: x.mean(-1)).flaw
    assert "over 2 dimensions" in word_of(lambda x: x.mean((-2, -1), keepdim=True)).flaw
    assert "without shapes" in word_of(lambda x: x.mean(1, keepdim=True)).flaw
    assert "casts to float32" in word_of(lambda x: x.mean(-1, True, dtype=torch.float32)).flaw


def test_casts_know_their_dtype():
    assert word_of(lambda x, y: x.half()).dtype is torch.float16
    assert word_of(lambda x, y: x.to(y.float().dtype)).dtype is torch.float32
    like = word_of(lambda x, y: x.type_as(y)).dtype
    assert isinstance(like, fx.Node) and like.name == "y"


MOVES = [
    lambda x, y: x.to(y),
    lambda x, y: x.type_as(y),
    lambda x, y: x.to(y.device, torch.float32),
    lambda x, y: x.to(device=y.device, dtype=torch.float32),
]


@pytest.mark.parametrize("function", MOVES)
def test_a_move_between_devices_is_no_cast(function):
    x, there, here = torch.ones(4).half(), torch.ones(4, device="meta"), torch.ones(4)
    for other, word in ((there, "opaque"), (here, "cast")):
        gm = fx.symbolic_trace(function)
        fxfuse.apply(gm, (x, other))
        assert View(gm).term(gm.graph.output_node().args[0]).word == word


def test_a_move_to_a_device_that_is_not_known_is_no_cast():
    assert word_of(lambda x, y: x.to(y.device, torch.float32)).word == "opaque"
    assert word_of(lambda x, y: x.to(y)).word == "opaque"


@pytest.mark.parametrize(
    ("form", "word"),
    [
        (torch.channels_last, "opaque"), (torch.contiguous_format, "opaque"),
        (torch.preserve_format, "cast"),
    ],
)  # fmt: skip
def test_a_cast_to_another_memory_format_is_opaque(form, word):
    to_copy = torch.ops.aten._to_copy.default
    for function in (
        lambda x: x.to(torch.float32, memory_format=form),
        lambda x: x.to(torch.float32, False, False, form),
        lambda x: x.half(memory_format=form),
        lambda x: to_copy(x, dtype=torch.float32, memory_format=form),
    ):
        assert word_of(function).word == word
    assert word_of(lambda x: x.to(torch.float32, memory_format=None)).word == "cast"


def test_in_place_on_a_callers_tensor_is_opaque():
    assert word_of(lambda x, y: x.add_(y)).word == "opaque"
    assert word_of(lambda x, y: (x * y).add_(1e-6)).word == "add"
    assert word_of(lambda x, y: (x * y).add_(y)).word == "opaque"  # its dtype may not promote


def test_unused_keywords_do_not_change_a_word():
    assert word_of(lambda x, y: torch.mul(x, y, out=y)).word == "opaque"


def test_words_reach_down_to_what_is_opaque():
    gm = fx.symbolic_trace(lambda x, w: w * (x.sin() / torch.sqrt(x.pow(2).mean(-1, True) + 1)))
    view = View(gm)
    root = gm.graph.output_node().args[0]
    assert view.words(root) == {"mul", "rsqrt", "add", "mean", "square"}


def test_a_pattern_knows_what_it_needs():
    from fxfuse.registry import patterns

    spelt_out = {"mul", "rsqrt", "mean", "square"}
    assert patterns()["rms_norm"].needs == {frozenset({"rms_norm"}), frozenset(spelt_out)}
    assert frozenset({"add", *spelt_out}) in patterns()["add_rms_norm"].needs
