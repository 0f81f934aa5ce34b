"""Silu gates alone, after a norm and before one: every spelling, from every tracer, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

import fxfuse
from tests.dialects import DIALECTS, aten, compiled, exported, inductor_aten
from tests.patterns.test_spellings import assert_equals_eager
from tests.spellings import (
    EPS,
    HALVES,
    SILUS,
    SPELLINGS,
    WIDTH,
    CastThenWeight,
    Functional,
    GateThenNorm,
    NormThenGate,
    SiluFunction,
    WeightThenCast,
)

FLOAT, HALF = torch.float32, torch.bfloat16
DTYPES = ((FLOAT, FLOAT), (HALF, HALF), (FLOAT, HALF), (HALF, FLOAT), (torch.float16, HALF))
GROUP = 16


def operands(*dtypes: torch.dtype, shape: tuple = (3, 4, WIDTH)) -> tuple:
    generator = torch.Generator().manual_seed(0)
    return tuple((2 * torch.randn(shape, generator=generator)).to(dtype) for dtype in dtypes)


def check(gm: fx.GraphModule, args: tuple, want: torch.Tensor, counts: dict) -> None:
    """That the graph was rewritten to these sites, those of other patterns aside, and is exact."""
    report = fxfuse.apply(gm).meta["fxfuse"]
    assert {k: report.counts.get(k, 0) for k in counts} == counts, report.misses
    assert_equals_eager(gm(*args), want)


class Gated(nn.Module):
    """A product with a silu, as `formula(x, silu)` writes it."""

    def __init__(self, silu: nn.Module, formula) -> None:
        super().__init__()
        self.silu, self.formula = silu, formula

    def forward(self, x, gate):
        return self.formula(x, self.silu(gate))


# ---- silu_gate ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("spelling", SILUS, ids=lambda s: s.__name__)
def test_silu_is_found_however_it_is_spelt(spelling, dialect):
    model = Gated(spelling(), lambda x, silu: x * silu)
    for dtypes in DTYPES[:2] if "export" in dialect or dialect == "core_aten" else DTYPES:
        args = operands(*dtypes)
        lost = (
            spelling.needs_dtypes
            if dialect == "symbolic_trace"
            else (spelling.fp32_only and dtypes[1] in HALVES)
        )
        check(DIALECTS[dialect](model, args), args, model(*args), {"silu_gate": int(not lost)})


@pytest.mark.parametrize("spelling", SILUS, ids=lambda s: s.__name__)
def test_dynamo_shows_the_same_silu(spelling):
    model, args = Gated(spelling(), lambda x, silu: x * silu), operands(FLOAT, FLOAT)
    got, counts = compiled(model, args)
    assert counts == {"silu_gate": 1}
    assert_equals_eager(got, model(*args))


PRODUCTS = {
    "silu on the left": lambda x, s: s * x,
    "torch.mul": lambda x, s: torch.mul(x, s),
    "x in float": lambda x, s: x.float() * s,
    "cast back": lambda x, s: (x * s).to(x.dtype),
    "in float and back": lambda x, s: (x.float() * s.float()).type_as(x),
    "rounded": lambda x, s: (x * s).bfloat16(),
    "widened": lambda x, s: (x * s).float(),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name):
    model = Gated(SiluFunction(), PRODUCTS[name])
    for dtypes in DTYPES:
        args = operands(*dtypes)
        unknown = name == "in float and back"  # silu is rounded, to what decides without dtypes
        for trace, lost in ((DIALECTS["symbolic_trace"], unknown), (aten, False)):
            check(trace(model, args), args, model(*args), {"silu_gate": int(not lost)})


@pytest.mark.parametrize("dtype", [FLOAT, HALF])
def test_decompositions_of_inductor(dtype):
    args = operands(dtype, dtype)
    for model, name in (
        (Gated(SiluFunction(), lambda x, silu: silu * x), "silu_gate"),
        (NormThenGate(CastThenWeight(dtype)), "rms_norm_silu_gate"),
        (GateThenNorm(WeightThenCast(dtype)), "silu_gate_rms_norm"),
        (Mamba2(dtype), "silu_gate_rms_norm"),
    ):
        check(inductor_aten(model, args), args, model(*args), {name: 1})


def test_regrouped_product_in_float():
    def model(x, g):
        return (x * g) * torch.sigmoid(g)

    for dtypes, found in ((DTYPES[0], 1), (DTYPES[1], 0)):
        args = operands(*dtypes)
        check(aten(model, args), args, model(*args), {"silu_gate": found})


SIGMOIDS_THAT_ARE_CAST = {
    "widened": lambda x, g: x * (g * torch.sigmoid(g).float()),
    "to fp64": lambda x, g: x * (g * torch.sigmoid(g).double()),
    "on the left": lambda x, g: x * (torch.sigmoid(g).to(FLOAT) * g),
    "of a wide gate": lambda x, g: x * (g.float() * torch.sigmoid(g).float()),
    "rounded": lambda x, g: x * (g * torch.sigmoid(g.float()).bfloat16()),
    "rounded in float": lambda x, g: x * ((w := g.float()) * torch.sigmoid(w).half()),
    "rounded twice": lambda x, g: x * (g * torch.sigmoid(g.bfloat16()).half()),
    "regrouped": lambda x, g: (x.float() * g) * torch.sigmoid(g).float(),
}


@pytest.mark.parametrize("name", SIGMOIDS_THAT_ARE_CAST)
def test_a_cast_sigmoid_keeps_its_rounding(name):
    model = SIGMOIDS_THAT_ARE_CAST[name]
    for dtypes in DTYPES:
        args = operands(*dtypes, shape=(64, WIDTH))
        want = model(*args)
        for gm in (fx.symbolic_trace(model), aten(model, args)):
            report = fxfuse.apply(gm).meta["fxfuse"]
            got = gm(*args)
            assert got.dtype == want.dtype
            tight = 1e-14 if want.dtype == torch.float64 else 1e-6
            torch.testing.assert_close(got, want, rtol=tight, atol=tight)
        if name == "widened":
            assert report.counts == {"silu_gate": 1}


def test_an_fp64_silu_of_a_narrow_gate_stays_fp64():
    def model(x, g):
        return x * F.silu(g.double())

    args = operands(FLOAT, FLOAT)
    for gm in (fx.symbolic_trace(model), aten(model, args)):
        assert fxfuse.apply(gm).meta["fxfuse"].counts == {"silu_gate": 1}
        torch.testing.assert_close(gm(*args), model(*args), rtol=1e-15, atol=1e-15)


def test_gating_itself():
    def model(x, g):
        return F.silu(x) * x

    args = operands(HALF, HALF)
    check(aten(model, args), args, model(*args), {"silu_gate": 1})


def test_in_place_silu_of_a_tensor_that_others_see():
    def model(x, g):
        return x * F.silu(g, inplace=True)

    args = operands(FLOAT, FLOAT)
    gm = fxfuse.apply(fx.symbolic_trace(model))
    assert gm.meta["fxfuse"].counts == {}
    x, g = (a.clone() for a in args)
    gm(x, g)
    assert torch.equal(g, F.silu(args[1]))


# ---- rms_norm_silu_gate -------------------------------------------------------------------------


@pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda s: s.__name__)
def test_every_norm_before_a_gate(spelling):
    for dtype, w_dtype in ((FLOAT, FLOAT), (HALF, HALF), (HALF, FLOAT)):
        model, args = NormThenGate(spelling(w_dtype)), operands(dtype, dtype)
        lost = spelling.fp32_only and dtype == HALF
        check(aten(model, args), args, model(*args), {"rms_norm_silu_gate": int(not lost)})


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("norm", [CastThenWeight, WeightThenCast, Functional])
def test_norm_then_gate_in_every_dialect(norm, dialect):
    for dtype in (FLOAT, HALF):
        model, args = NormThenGate(norm(dtype)), operands(dtype, dtype)
        check(DIALECTS[dialect](model, args), args, model(*args), {"rms_norm_silu_gate": 1})


class AllInFloat(nn.Module):
    """Norm, weight and gate in fp32, and one cast: Kimi's gated norm with a silu."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH).bfloat16())

    def forward(self, x, gate):
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
        wide = self.weight.to(torch.float32) * wide
        return (wide * F.silu(gate.to(torch.float32))).to(x.dtype)


class HalvesOfOne(nn.Module):
    """x and gate are the halves of one projection, and the silu is rounded."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH // 2, eps=EPS, dtype=HALF)

    def forward(self, both, _):
        x, gate = both.chunk(2, -1)
        return F.silu(gate) * self.norm(x)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("model", [AllInFloat(), HalvesOfOne()], ids=lambda m: type(m).__name__)
def test_other_gated_norms(model, dialect):
    args = operands(HALF, HALF)
    check(DIALECTS[dialect](model, args), args, model(*args), {"rms_norm_silu_gate": 1})


# ---- silu_gate_rms_norm -------------------------------------------------------------------------


@pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda s: s.__name__)
def test_every_norm_behind_a_gate(spelling):
    for dtype, w_dtype in ((FLOAT, FLOAT), (HALF, HALF), (HALF, FLOAT)):
        model, args = GateThenNorm(spelling(w_dtype)), operands(dtype, dtype)
        lost = spelling.fp32_only and dtype == HALF
        check(aten(model, args), args, model(*args), {"silu_gate_rms_norm": int(not lost)})


class InGroups(nn.Module):
    """A norm over groups of 16 columns behind a gate; subclasses write it."""

    def __init__(self, dtype: torch.dtype = FLOAT) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH).to(dtype))

    def unit(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)


class Mamba2(InGroups):
    def forward(self, x, gate):
        dtype = x.dtype
        x = x.to(torch.float32) * F.silu(gate.to(torch.float32))
        *lead, width = x.shape
        x = self.unit(x.view(*lead, width // GROUP, GROUP))
        return self.weight * x.view(*lead, width).to(dtype)


class FalconH1(InGroups):
    def forward(self, x, gate):
        dtype, flat = x.dtype, x.dim() == 2
        x = x * F.silu(gate.to(torch.float32))
        rows, length = (x.shape[0], 1) if flat else x.shape[:2]
        x = self.unit(x.to(torch.float32).view(rows, length, WIDTH // GROUP, GROUP))
        x = self.weight.view(WIDTH // GROUP, GROUP) * x
        x = x.view(rows, length, WIDTH)
        return (x.squeeze(1) if flat else x).to(dtype)


class RowsOfGroups(InGroups):
    def forward(self, x, gate):
        gated = (F.silu(gate) * x).reshape(-1, GROUP)
        return self.unit(gated.float()).to(x.dtype).reshape(x.shape) * self.weight


class WholeNormOfGroups(InGroups):
    def forward(self, x, gate):
        gated = (F.silu(gate) * x).unflatten(-1, (-1, GROUP))
        return F.rms_norm(gated, (GROUP,), eps=EPS).flatten(-2) * self.weight


class ZeroCentredGroups(InGroups):
    def forward(self, x, gate):
        gated = (F.silu(gate.float()) * x).float().unflatten(-1, (-1, GROUP))
        return (self.unit(gated).flatten(-2) * (1.0 + self.weight.float())).type_as(x)


GROUPED = (Mamba2, FalconH1, RowsOfGroups, WholeNormOfGroups, ZeroCentredGroups)


@pytest.mark.parametrize("dialect", [d for d in DIALECTS if d != "symbolic_trace"])
@pytest.mark.parametrize("form", GROUPED)
def test_groups(form, dialect):
    for x_dtype, gate_dtype in DTYPES[:3]:
        model = form(gate_dtype)
        for shape in ((3, 4, WIDTH), (5, WIDTH)):
            args = operands(x_dtype, gate_dtype, shape=shape)
            check(DIALECTS[dialect](model, args), args, model(*args), {"silu_gate_rms_norm": 1})
            if dialect != "make_fx":
                break


@pytest.mark.parametrize("form", GROUPED)
def test_groups_of_a_symbolic_number_of_rows(form):
    model, args = form(HALF), operands(FLOAT, HALF)
    for operand in args:
        torch._dynamo.mark_dynamic(operand, (0, 1))
    got, counts = compiled(model, args)
    assert counts == {"silu_gate_rms_norm": 1}
    assert_equals_eager(got, model(*args))


def test_a_view_behind_the_groups_stays():
    class IntoHeads(Mamba2):
        def forward(self, x, gate):
            return super().forward(x, gate).unflatten(-1, (2, -1))

    model, args = IntoHeads(), operands(FLOAT, FLOAT)
    check(aten(model, args), args, model(*args), {"silu_gate_rms_norm": 1})


def test_groups_of_transposed_rows_lie_where_they_did():
    """A reshape to rows of groups copies them; a view that only splits the columns does not."""
    x, gate = (t.transpose(0, 1) for t in operands(FLOAT, FLOAT))
    for model, contiguous in ((RowsOfGroups(), True), (ZeroCentredGroups(), False)):
        got, counts = compiled(model, (x, gate))
        assert counts == {"silu_gate_rms_norm": 1}
        assert got.stride() == model(x, gate).stride() and got.is_contiguous() == contiguous


def test_group_is_an_attribute():
    args = operands(FLOAT, FLOAT)
    (match,) = fxfuse.apply(aten(Mamba2(), args)).meta["fxfuse"].matches
    assert match.attributes["group"] == GROUP and match.shapes["x"] == (3, 4, WIDTH)


# ---- all three ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model",
    [Gated(SiluFunction(), lambda x, s: x * s), NormThenGate(CastThenWeight(FLOAT)),
     GateThenNorm(WeightThenCast(FLOAT)), Mamba2(), FalconH1()],
    ids=["silu_gate", "NormThenGate", "GateThenNorm", "Mamba2", "FalconH1"],
)  # fmt: skip
def test_gradients(model):
    args = operands(FLOAT, FLOAT)
    gm = fxfuse.apply(exported(model, args))
    assert any("silu_gate" in name for name in gm.meta["fxfuse"].counts)
    grads = []
    for run in (model, gm):
        leaves = [a.clone().requires_grad_() for a in args]
        run.zero_grad()
        (run(*leaves) * torch.arange(WIDTH)).sum().backward()
        grads.append([leaf.grad for leaf in leaves] + [p.grad.clone() for p in run.parameters()])
    for want, got in zip(*grads):
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-4)


@pytest.mark.parametrize("dtype", [HALF, torch.float64])
@pytest.mark.parametrize("spelling", [s for s in SILUS if not s.needs_dtypes])
def test_a_trace_without_metadata_runs_in_any_dtype(spelling, dtype):
    model = Gated(spelling(), lambda x, silu: x * silu)
    gm = fxfuse.apply(fx.symbolic_trace(model))
    assert gm.meta["fxfuse"].counts == {"silu_gate": 1}
    for args in (operands(dtype, dtype), operands(dtype, FLOAT), operands(FLOAT, dtype)):
        got, want = gm(*args), model(*args)
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("spelling", [s for s in SPELLINGS if not s.untraceable])
def test_a_norm_behind_a_gate_of_unknown_dtypes(spelling):
    """The product may be wider than x: no dtype that the op can name is sure to be its own."""
    for dtypes in ((HALF, HALF), (HALF, FLOAT), (FLOAT, HALF)):
        model, args = GateThenNorm(spelling(FLOAT)), operands(*dtypes)
        check(fx.symbolic_trace(model), args, model(*args), {"silu_gate": 1})


class WithCastsOfItsOwn(InGroups):
    def forward(self, x, gate):
        wide = self.unit(F.silu(gate.float()) * x.float())
        return self.weight * wide.to(x.dtype)


def test_a_norm_behind_a_gate_that_names_its_dtypes():
    model = WithCastsOfItsOwn()
    gm = fxfuse.apply(fx.symbolic_trace(model))
    assert gm.meta["fxfuse"].counts == {"silu_gate_rms_norm": 1}
    for dtypes in DTYPES:
        args = operands(*dtypes)
        assert_equals_eager(gm(*args), model(*args))


# ---- what is left alone -------------------------------------------------------------------------


def norm(x):
    return F.rms_norm(x, (WIDTH,), eps=EPS)


def grouped_norm_first(x, g):
    unit = F.rms_norm(x.float().unflatten(-1, (-1, GROUP)), (GROUP,), eps=EPS)
    return unit.flatten(-2) * F.silu(g.float())


def shared_weight(x, g):
    unit = F.rms_norm((x * F.silu(g)).unflatten(-1, (-1, GROUP)), (GROUP,), eps=EPS)
    return (unit * torch.linspace(0.5, 1.5, GROUP, dtype=x.dtype)).flatten(-2)


LEFT_ALONE = {
    "sigmoid": (lambda x, g: norm(x) * torch.sigmoid(g), "rms_norm_silu_gate",
                "its gate is a sigmoid: only silu gates are fused", FLOAT),
    "sigmoid in float": (
        lambda x, g: (norm(x) * torch.sigmoid(g.float())).to(x.dtype), "rms_norm_silu_gate",
        "its gate is a sigmoid: only silu gates are fused", HALF),
    "gelu": (lambda x, g: F.gelu(g) * norm(x), "rms_norm_silu_gate",
             "its gate is a gelu: only silu gates are fused", FLOAT),
    "tanh": (lambda x, g: norm(x) * torch.tanh(g), "rms_norm_silu_gate",
             "its gate is a tanh: only silu gates are fused", FLOAT),
    "added": (lambda x, g: norm(x) + F.silu(g), "rms_norm_silu_gate",
              "its gate is added to the norm: only a gate that multiplies it is fused", FLOAT),
    "broadcast": (lambda x, g: norm(x) * F.silu(g[:, :1]), "rms_norm_silu_gate",
                  "its gate of shape (3, 1, 64) and what it gates, (3, 4, 64), broadcast", FLOAT),
    "broadcast, no norm": (lambda x, g: x * F.silu(g[:, :1]), "silu_gate",
                           "its gate of shape (3, 1, 64) and what it gates, (3, 4, 64), broadcast",
                           FLOAT),
    "an integer": (lambda x, g: F.silu(g) * x.int(), "silu_gate",
                   "what it gates is int32, not a floating-point tensor", FLOAT),
    "groups first": (grouped_norm_first, "rms_norm_silu_gate",
                     "it gates after a norm over groups of 16 of 64 columns: such a norm is fused "
                     "only with a gate before it", FLOAT),
    "reshaped": (lambda x, g: norm(x).flatten(0, 1) * F.silu(g.flatten(0, 1)),
                 "rms_norm_silu_gate", "the norm is given another shape before it is gated",
                 FLOAT),
    "shared weight": (shared_weight, "silu_gate_rms_norm",
                      "its weight does not have one value for each column of all the groups",
                      FLOAT),
    "rounded quotient": (lambda x, g: x * (g / (1 + torch.exp(-g))), "silu_gate",
                         "the steps of its gate's x / (1 + exp(-x)) are rounded to bfloat16",
                         HALF),
    "value used elsewhere": (lambda x, g: (lambda s: norm(x) * s + s.cos())(F.silu(g)),
                             "rms_norm_silu_gate", "inside it is also used by", FLOAT),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_reasons(name):
    model, pattern, reason, dtype = LEFT_ALONE[name]
    args = operands(dtype, dtype)
    gm = fxfuse.apply(aten(model, args))
    report = gm.meta["fxfuse"]
    assert pattern not in report.counts
    found = [m.reason for m in report.misses if m.pattern == pattern]
    assert any(reason in one for one in found), report.misses
    assert_equals_eager(gm(*args), model(*args))


def test_groups_of_a_symbolic_width():
    model, args = Mamba2(), operands(FLOAT, FLOAT)
    torch._dynamo.reset()
    with fxfuse.record() as reports:
        torch.compile(model, backend=fxfuse.make_backend("eager"), dynamic=True)(*args)
    (report,) = reports
    assert "silu_gate_rms_norm" not in report.counts
    assert any("width of its rows or groups is symbolic" in m.reason for m in report.misses)


def rms(x):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)


def two_groups(x, g):
    u = x * F.silu(g)
    return rms(u.view(x.size(0), 2, x.size(1) // 2)).view(x.size(0), x.size(1))


def two_groups_of_the_rest(x, g):
    return rms((x * F.silu(g)).unflatten(-1, (2, -1))).flatten(-2)


def two_groups_by_a_shape(x, g):
    shape = x.shape
    return rms((x * F.silu(g)).reshape(shape[0], 2, shape[1] // 2)).reshape(shape)


def put_back_by_another_tensor(x, g, other):
    return rms((x * F.silu(g)).view(-1, 4)).view(other.size(0), other.size(1))


@pytest.mark.parametrize(
    "model",
    [two_groups, two_groups_of_the_rest, two_groups_by_a_shape, put_back_by_another_tensor],
)
def test_groups_that_the_graph_computes(model):
    def inputs(width):
        return operands(*(FLOAT,) * model.__code__.co_argcount, shape=(3, width))

    gm = fxfuse.apply(fx.symbolic_trace(model), inputs(8))
    report = gm.meta["fxfuse"]
    assert "silu_gate_rms_norm" not in report.counts
    assert "its groups are computed by the graph" in [m.reason for m in report.misses]
    for width in (8, 16):
        assert_equals_eager(gm(*inputs(width)), model(*inputs(width)))


def rows_by_size(x, g):
    u = x * F.silu(g)
    return rms(u.view(u.size(0), 2, 4)).view(u.size(0), 8)


def rows_by_shape(x, g):
    u = x * F.silu(g)
    return rms(u.view(u.shape[0], u.shape[1] // 4, 4)).view(u.shape)


def whole_rows(x, g):
    u = x * F.silu(g)
    return rms(u).view(u.size())


@pytest.mark.parametrize("model", [rows_by_size, rows_by_shape, whole_rows])
def test_sizes_that_only_the_groups_need(model):
    args = operands(FLOAT, FLOAT, shape=(3, 8))
    gm = fxfuse.apply(fx.symbolic_trace(model), args)
    report = gm.meta["fxfuse"]
    assert report.counts == {"silu_gate_rms_norm": 1} and not report.misses
    assert len(gm.graph.nodes) == 4  # nothing asks for a size any more
    for shape in ((3, 8), (5, 8)) if model is rows_by_size else ((3, 8), (5, 16)):
        args = operands(FLOAT, FLOAT, shape=shape)
        assert_equals_eager(gm(*args), model(*args))


def test_sizes_that_others_need_too():
    def model(x, g):
        u = x * F.silu(g)
        rows = u.size(0)
        return rms(u.view(rows, 2, 4)).view(rows, 8), torch.ones(rows)

    def scaled(x, g):
        u = x * F.silu(g)
        other = g * u.size(0)  # an input of the op
        return rms(u.view(-1, 4)).view(-1, 8) * F.silu(other)

    args = operands(FLOAT, FLOAT, shape=(3, 8))
    for function in (model, scaled):
        gm = fxfuse.apply(fx.symbolic_trace(function), args)
        gm.graph.lint()
        for got, want in zip(gm(*args), function(*args)):
            assert_equals_eager(got, want)


def test_a_view_of_the_bits_is_no_group():
    def model(x, g):
        bits = (x * F.silu(g)).view(torch.int32).view(torch.float32)
        return norm(bits.flatten(0, 1)).unflatten(0, x.shape[:2])

    args = operands(FLOAT, FLOAT)
    gm = fxfuse.apply(fx.symbolic_trace(model), args)
    assert gm.meta["fxfuse"].counts == {"silu_gate": 1, "rms_norm": 1}
    assert_equals_eager(gm(*args), model(*args))


def test_groups_without_shapes():
    gm = fxfuse.apply(fx.symbolic_trace(WholeNormOfGroups()))
    report = gm.meta["fxfuse"]
    assert "silu_gate_rms_norm" not in report.counts
    (reason,) = [m.reason for m in report.misses if m.pattern == "silu_gate_rms_norm"]
    assert "pass example_inputs" in reason


def test_a_modulated_norm_is_neither_gated_nor_a_residual():

    def model(x, g):
        return norm(x) * g + torch.ones(WIDTH)

    args = operands(FLOAT, FLOAT)
    report = fxfuse.apply(aten(model, args)).meta["fxfuse"]
    assert all("gate" not in m.reason and "add" not in m.reason for m in report.misses)
