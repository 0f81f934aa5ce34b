"""Random models, fused and not: a short run of what `scripts/fuzz` does for as long as one likes.

The seeds are fixed and the generator is our own. Hypothesis could draw the choices, but would gain
nothing: it shrinks a program by changing a choice, after which all later choices mean something
else, where ours (scripts/fuzzing/shrink.py) takes away lines and parts of expressions.
"""

from __future__ import annotations

import ast
import logging
from collections import Counter
from pathlib import Path

import pytest
import torch

from scripts.fuzzing.check import check
from scripts.fuzzing.generate import generate
from scripts.fuzzing.program import Program
from scripts.fuzzing.routes import ROUTES
from scripts.fuzzing.shrink import shrink

FEW = 10
WITHOUT_INDUCTOR = [name for name in ROUTES if not name.startswith("inductor")]


@pytest.fixture(autouse=True)
def quiet():
    """PyTorch logs each program that it refuses."""
    torch._logging.set_logs(all=logging.CRITICAL)
    yield
    torch._logging.set_logs()


@pytest.mark.parametrize("first", range(0, 80, FEW))
def test_random_programs(first):
    fused, sites = 0, Counter()
    for seed in range(first, first + FEW):
        routes = ["eager", "aot_eager", ("make_fx", "symbolic_trace with inputs")[seed % 2]]
        checked = check(generate(seed), routes)
        assert not checked.failures, f"\n# seed {seed}\n{shrink(checked.failures[0])}"
        fused += bool(checked.sites)
        sites += checked.sites
    # a run in which little is fused would prove little
    assert fused >= FEW // 2 and len(sites) >= 3


def test_a_program_under_inductor():
    program = counterexamples()["a_later_reader_is_returned"]
    checked = check(program, ["inductor always"])
    assert not checked.failures, f"\n{checked.failures[0]}"
    assert checked.sites["rms_norm"] and checked.routes.total() == 1


def counterexamples() -> dict[str, Program]:
    """The programs of counterexamples.py by their names."""
    tree = ast.parse(Path(__file__).with_name("counterexamples.py").read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return {node.name: Program.parse(ast.unparse(node)) for node in functions}


@pytest.mark.parametrize("name", counterexamples())
def test_counterexamples(name):
    checked = check(counterexamples()[name], WITHOUT_INDUCTOR)
    assert not checked.failures, f"\n{checked.failures[0]}"
    assert checked.routes["eager"] and checked.routes["make_fx"]
