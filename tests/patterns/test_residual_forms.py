"""The residual adds of published models: which are found, in every dtype and from every tracer."""

from __future__ import annotations

import pytest
import torch

from tests.forms import (
    FLOAT,
    FP16,
    HALF,
    RESIDUALS,
    REWRITES,
    Block,
    assert_exact,
    forward_counts,
    numerics,
    ops,
)
from tests.patterns.test_forms import name
from tests.spellings import EPS, HALVES, WIDTH

DTYPES = ((FLOAT, FLOAT), (HALF, HALF), (FP16, FP16), (HALF, FLOAT), (FLOAT, HALF))


def streams(dtype: torch.dtype) -> tuple:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(4, 16, WIDTH, generator=generator).to(dtype) for _ in range(2))


def expected(form: str, dialect: str, x_dtype: torch.dtype, w_dtype: torch.dtype) -> dict:
    counts = RESIDUALS[form][1]
    if dialect == "aot_forward" and "rms_norm_add_rms_norm" in counts:
        return {"add_rms_norm": 1, "rms_norm": 2}  # a sandwich saves more than its op does
    if form == "R10" and (w_dtype in HALVES or dialect == "symbolic_trace"):
        return {"rms_norm": 2}  # the sum is rounded before its norm
    return counts


def check(form, dialect, x_dtype, w_dtype, training=False) -> None:
    model, args = Block(RESIDUALS[form][0], w_dtype, training), streams(x_dtype)
    got, want, gm = REWRITES[dialect](model, args)
    for one, right in zip(got, want):
        assert_exact(one, right, 2)
    report = gm.meta["fxfuse"]
    wanted = expected(form, dialect, x_dtype, w_dtype)
    assert forward_counts(gm) == wanted, report.misses
    for op in ops(gm):
        if "add_rms_norm" not in str(op.target):
            continue
        h, sandwich = want[1].dtype, "norm_add" in str(op.target)
        eps, *found = numerics(op, h, w_dtype, "2" if sandwich else "")
        unit = h if h in HALVES else FLOAT
        assert eps == EPS and found == [0.0, FLOAT, unit, torch.promote_types(h, w_dtype)]
        if sandwich:
            x = torch.promote_types(x_dtype, w_dtype)
            eps, *found = numerics(op, x, w_dtype, "1", "norm_dtype1")
            assert eps == EPS and found == [0.0, FLOAT, x, x]


@pytest.mark.parametrize("dtypes", DTYPES, ids=name)
@pytest.mark.parametrize("form", RESIDUALS)
def test_every_dtype(form, dtypes):
    check(form, "make_fx", *dtypes)


@pytest.mark.parametrize("dialect", [d for d in REWRITES if d != "make_fx"])
@pytest.mark.parametrize("form", RESIDUALS)
def test_every_dialect(form, dialect):
    check(form, dialect, HALF, HALF)


@pytest.mark.parametrize("dialect", REWRITES)
def test_dropout_of_a_training_step(dialect):
    check("R5", dialect, HALF, HALF, training=True)


def test_a_branch_that_is_only_normed_says_so():
    for dialect in ("make_fx", "symbolic_trace", "export", "dynamo"):
        _, _, gm = REWRITES[dialect](Block(RESIDUALS["R2"][0], HALF), streams(HALF))
        (miss,) = gm.meta["fxfuse"].misses
        assert miss.reason.endswith("no norm of the sum follows: only the norm itself can be fused")
