"""The norms and gates of published models: what their ops say, in every dtype and dialect."""

from __future__ import annotations

import pytest
import torch

from tests.forms import (
    FLOAT,
    FP16,
    GATES,
    GROUP,
    HALF,
    NORMS,
    REWRITES,
    SIGMOIDS,
    assert_exact,
    attributes,
    numerics,
    ops,
    resolved,
)
from tests.spellings import EPS, HALVES, WIDTH

DTYPES = (
    (FLOAT, FLOAT), (HALF, HALF), (FP16, FP16), (HALF, FLOAT), (FP16, FLOAT), (FLOAT, HALF),
)  # fmt: skip
NAMES = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16"}
SAVES_A_SUM = ("N6", "N6 without weight", "N11")  # for the gradient of its root
SEEN = ("export", "core_aten", "make_fx_functional")  # of what `tests.spellings` has


def name(dtypes: object) -> str:
    return "-".join(NAMES[str(d)] for d in dtypes) if isinstance(dtypes, tuple) else str(dtypes)


def rows(dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(4, 16, WIDTH, generator=torch.Generator().manual_seed(0)).to(dtype)


def check(form: str, dialect: str, x_dtype: torch.dtype, w_dtype: torch.dtype) -> None:
    norm = NORMS[form]
    model, args = norm.module(w_dtype), (rows(x_dtype),)
    got, want, gm = REWRITES[dialect](model, args)
    unit_dtype, out_dtype = norm.numerics(x_dtype, w_dtype)
    assert_exact(got, want, 2 if unit_dtype in HALVES else 1)
    report = gm.meta["fxfuse"]
    assert report.counts == {"rms_norm": 1}, report.misses
    assert report.misses == []
    (op,) = ops(gm)
    offset = norm.offset
    if form == "N5S" and w_dtype in HALVES:
        offset = 0.0  # the graph rounds 1 + w, so that the op gets it as its weight
    seen = FLOAT if form == "N5G" else x_dtype
    weight = w_dtype if norm.weighted else seen
    eps, *found = numerics(op, seen, weight)
    assert eps in (None, torch.finfo(FLOAT).eps) if norm.eps is None else eps == pytest.approx(EPS)
    assert found == [offset, FLOAT, unit_dtype, out_dtype]
    rounded = resolved(attributes(op).get("rstd_dtype", ""), FLOAT, input=x_dtype)
    assert rounded == (x_dtype if form == "N8" else FLOAT)
    assert (op.args[1] is not None) == norm.weighted


def is_lost(form: str, x_dtype: torch.dtype) -> bool:
    return NORMS[form].module.fp32_only and x_dtype in HALVES


@pytest.mark.parametrize(
    ("form", "dtypes"),
    [(form, dtypes) for form in NORMS for dtypes in DTYPES if not is_lost(form, dtypes[0])],
    ids=name,
)
def test_every_dtype(form, dtypes):
    check(form, "make_fx", *dtypes)


BY_DIALECT = [
    (form, dialect)
    for form, norm in NORMS.items()
    for dialect in REWRITES
    if dialect != "make_fx" and not (norm.known and dialect in SEEN)
    if not (dialect == "symbolic_trace" and (norm.module.untraceable or norm.module.needs_dtypes))
    if not (dialect == "aot_forward" and form in SAVES_A_SUM)
]


@pytest.mark.parametrize("form, dialect", BY_DIALECT)
def test_every_dialect(form, dialect):
    if is_lost(form, HALF):
        check(form, dialect, FLOAT, FLOAT)
    else:
        if dialect not in SEEN:  # seconds a trace
            check(form, dialect, HALF, FLOAT)
        if (form, dialect) != ("N5S", "symbolic_trace"):  # 1 + w, whose shape is not known
            check(form, dialect, HALF, HALF)


@pytest.mark.parametrize("form", SAVES_A_SUM)
def test_a_graph_that_saves_what_is_under_the_root(form):
    dtype = FLOAT if is_lost(form, HALF) else HALF
    got, want, gm = REWRITES["aot_forward"](NORMS[form].module(dtype), (rows(dtype),))
    report = gm.meta["fxfuse"]
    assert report.counts == {}
    (miss,) = report.misses
    assert " inside it is also used by output: returned, or saved" in miss.reason
    assert torch.equal(got, want)


ROUNDED_STATISTICS = [form for form in NORMS if is_lost(form, HALF)]


@pytest.mark.parametrize("dtype", [HALF, FP16])
@pytest.mark.parametrize("form", ROUNDED_STATISTICS)
def test_rounded_statistics_are_left_alone(form, dtype):
    got, want, gm = REWRITES["make_fx"](NORMS[form].module(dtype), (rows(dtype),))
    report, half = gm.meta["fxfuse"], str(dtype).removeprefix("torch.")
    assert report.counts == {} and torch.equal(got, want)
    (miss,) = report.misses
    assert miss.reason.startswith(f"its statistic is rounded to {half}")


# ---- gates --------------------------------------------------------------------------------------

GATE_DTYPES = (
    (FLOAT, FLOAT, FLOAT), (HALF, HALF, HALF), (FP16, FP16, FP16), (HALF, HALF, FLOAT),
    (FLOAT, HALF, HALF), (HALF, FLOAT, HALF),
)  # fmt: skip


def check_gate(form: str, dialect: str, x: torch.dtype, gate: torch.dtype, w: torch.dtype) -> None:
    module, pattern, expected = GATES[form]
    # as a split of one projection gives it: the rows do not touch each other
    gates = torch.cat((rows(gate).roll(7, -1) * 2, rows(gate)), -1)[..., :WIDTH]
    got, want, gm = REWRITES[dialect](module(w), (rows(x), gates))
    silu, between, unit, out = expected(x, gate, w)
    assert_exact(got, want, 2 if {unit, between} & set(HALVES) else 1)
    report = gm.meta["fxfuse"]
    assert report.counts == {pattern: 1}, report.misses
    assert report.misses == []
    (op,) = ops(gm)
    found = attributes(op)
    given = {"input": x, "gate": gate}
    assert found["sigmoid_dtype"] == ""
    assert resolved(found["silu_dtype"], FLOAT, **given) == silu
    if pattern == "silu_gate_rms_norm":
        product = torch.promote_types(x, silu)
        assert resolved(found["gated_dtype"], product, **given) == between
        assert found["group"] == (GROUP if form in ("G1", "G2") else 0)
        eps, *numbers = numerics(op, between, w)
        assert numbers == [0.0, FLOAT, unit, out]
    else:
        eps, *numbers = numerics(op, x, w, out="norm_dtype")
        assert numbers == [0.0, FLOAT, unit, between]
        assert resolved(found["out_dtype"], torch.promote_types(between, silu), **given) == out
    assert eps == EPS and op.args[2] is not None


@pytest.mark.parametrize("dtypes", GATE_DTYPES, ids=name)
@pytest.mark.parametrize("form", GATES)
def test_every_gate_in_every_dtype(form, dtypes):
    check_gate(form, "make_fx", *dtypes)


@pytest.mark.parametrize(
    ("form", "dialect"),
    [
        (form, dialect)
        for form in GATES
        for dialect in REWRITES
        if dialect not in ("make_fx", "aot_forward")
        and not (dialect == "symbolic_trace" and GATES[form][0].untraceable)
    ],
)
def test_every_gate_in_every_dialect(form, dialect):
    check_gate(form, dialect, HALF, HALF, HALF)


@pytest.mark.parametrize("dialect", REWRITES)
@pytest.mark.parametrize("form", SIGMOIDS)
def test_a_norm_before_a_sigmoid_is_a_norm(form, dialect):
    args = (rows(HALF), rows(HALF).roll(7, -1))
    got, want, gm = REWRITES[dialect](SIGMOIDS[form](HALF), args)
    assert_exact(got, want, 2)
    report = gm.meta["fxfuse"]
    assert report.counts == {"rms_norm": 1}
    if dialect != "aot_forward":
        reasons = [m.reason for m in report.misses]
        assert reasons == ["its gate is a sigmoid: only silu gates are fused"]
