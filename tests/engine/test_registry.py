"""A pattern from outside: by import and by file."""

from __future__ import annotations

import dataclasses
import textwrap

import pytest
import torch
from torch import fx

import fxfuse
from fxfuse import registry
from fxfuse.errors import BadPattern
from fxfuse.match import Fusion, square, var


@pytest.fixture(autouse=True)
def _restore(monkeypatch):
    monkeypatch.setattr(registry, "_KNOWN", registry.patterns())


def test_a_pattern_of_ones_own():
    @fxfuse.pattern("square_of_sum", square(var("x") + var("y")), size=9)
    def build(b):
        return b.call(torch.ops.aten.pow.Tensor_Scalar, b.x, outputs=("y",), exponent=2)

    assert "square_of_sum" in registry.patterns()
    assert build.expression.words == {"square"}


def test_a_name_that_is_taken_and_a_pattern_without_form():
    with pytest.raises(BadPattern, match="has one of this name"):
        fxfuse.pattern("rms_norm", square(var("x")))(lambda b: None)
    with pytest.raises(BadPattern, match="fits any node"):
        fxfuse.pattern("anything", var("x"))


def test_patterns_from_a_file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        textwrap.dedent(
            """
            import fxfuse
            from fxfuse.match import rsqrt, square, var

            @fxfuse.pattern("inverse_length", rsqrt(square(var("x"))))
            def build(b):
                return b.decline("this is only a test")
            """
        )
    )
    assert registry.load_file(file) == ["inverse_length"]
    gm = fx.symbolic_trace(lambda x: torch.rsqrt(x * x))
    assert fxfuse.apply(gm, patterns=["inverse_length"]).meta["fxfuse"].counts == {}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("x = 1", "defines no new pattern"),
        ("import no_such_package_here", "ModuleNotFoundError"),
        ("def f(:", "SyntaxError"),
    ],
)
def test_bad_files(tmp_path, text, problem):
    file = tmp_path / "bad.py"
    file.write_text(text)
    with pytest.raises(BadPattern, match=problem):
        registry.load_file(file)
    with pytest.raises(BadPattern, match="no such file"):
        registry.load_file(tmp_path / "missing.py")


def test_a_pattern_that_raises_is_named():
    def fails(b):
        raise KeyError("width")

    fusion = Fusion("mine", square(var("x")), fails)
    with pytest.raises(BadPattern, match="'mine' cannot be used: its build raised KeyError"):
        fxfuse.apply(fx.symbolic_trace(lambda x: x * x), patterns=[fusion])
    near = dataclasses.replace(fusion, build=lambda b: None, near_miss=lambda view, node: 1 / 0)
    with pytest.raises(BadPattern, match="its near_miss raised ZeroDivisionError"):
        fxfuse.apply(fx.symbolic_trace(lambda x: x * x), patterns=[near])
