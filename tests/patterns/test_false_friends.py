"""What looks like a fused form and is another: it stays as it is, and the report says why."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx
from torch.nn import functional as F

import fxfuse
from tests.dialects import aten
from tests.forms import (
    FLOAT,
    GROUP,
    HALF,
    NORMS,
    Block,
    assert_exact,
    dynamo,
    forward_counts,
    ops,
    unit,
)
from tests.spellings import EPS, WIDTH, Norm

TRACES = {"make_fx": aten, "symbolic_trace": lambda model, args: fx.symbolic_trace(model)}


def operands(dtype: torch.dtype, count: int) -> tuple:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(4, 16, WIDTH, generator=generator).to(dtype) for _ in range(count))


def rewrite(function: Callable, trace: str, dtype: torch.dtype) -> tuple[fx.GraphModule, str]:
    """The graph of a function of tensors after the pass, and its code before it."""
    args = operands(dtype, function.__code__.co_argcount)
    gm = TRACES[trace](function, args)
    code, want = gm.code, gm(*args)
    got = fxfuse.apply(gm)(*args)
    for one, right in zip(*((r if isinstance(r, tuple) else (r,)) for r in (got, want))):
        assert_exact(one, right, 2)
    return gm, code


def reasons(gm: fx.GraphModule) -> list[str]:
    return [miss.reason for miss in gm.meta["fxfuse"].misses]


def assert_untouched(gm: fx.GraphModule, code: str) -> None:
    report = gm.meta["fxfuse"]
    assert report.counts == {} and not report.modified and not ops(gm)
    assert gm.code == code


# ---- norms of another kind ----------------------------------------------------------------------

W, BIAS = torch.linspace(0.5, 1.5, WIDTH), torch.linspace(-0.5, 0.5, WIDTH)


def centred(x):
    return x - x.mean(-1, keepdim=True)


def layer_norm(x):
    c = centred(x.float())
    variance = c.pow(2).mean(-1, keepdim=True)
    return (c * torch.rsqrt(variance + EPS) * W + BIAS).to(x.dtype)


def layer_norm_of_cohere(x):
    wide = x.to(torch.float32)
    mean = wide.mean(-1, keepdim=True)
    variance = (wide - mean).pow(2).mean(-1, keepdim=True)
    wide = (wide - mean) * torch.rsqrt(variance + EPS)
    return (W.to(torch.float32) * wide).to(x.dtype)


def layer_norm_of_deberta(x):
    wide = x.float()
    mean = wide.mean(-1, keepdim=True)
    variance = (wide - mean).pow(2).mean(-1, keepdim=True)
    return W * ((wide - mean) / torch.sqrt(variance + EPS)).to(x.dtype) + BIAS


def gated_layer_norm_of_heads(x, gate):  # xLSTM
    heads = x.float().unflatten(-1, (-1, GROUP))
    c = centred(heads)
    heads = c * torch.rsqrt(c.pow(2).mean(-1, keepdim=True) + EPS)
    return torch.sigmoid(gate) * (heads.flatten(-2) * W).to(x.dtype)


def group_norm(x):
    groups = x.float().unflatten(-1, (-1, GROUP))
    c = centred(groups)
    return (c * torch.rsqrt(c.square().mean(-1, keepdim=True) + EPS)).flatten(-2) * W


def by_variance(x):
    wide = x.float()
    c = centred(wide)
    return c * torch.rsqrt(wide.var(-1, keepdim=True, correction=0) + EPS)


def by_unbiased_variance(x):  # PocketTTS
    return x * torch.rsqrt(x.float().var(-1, keepdim=True) + EPS)


def by_std(x):
    return x / (x.float().std(-1, keepdim=True) + EPS)


def by_std_of_the_centred(x):
    return centred(x) / x.std(-1, keepdim=True)


def unit_length(x):
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).sum(-1, keepdim=True) + EPS)).type_as(x)


def unit_length_of_products(x):
    return x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + EPS)


def unit_length_by_division(x):
    return x / torch.sqrt((x * x).sum(dim=-1, keepdim=True) + EPS)


def by_vector_norm(x):  # Zaya
    length = x.norm(p=2, dim=-1, keepdim=True)
    return x * (WIDTH**0.5 / length.clamp_min(1e-6))


def clipped_length(x):  # Inkling
    wide = x.float()
    length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    return (wide * (3.0 / (length + 1e-6)).clamp(max=1.0)).to(x.dtype)


def normalize(x):
    return F.normalize(x, dim=-1)


def eps_outside(x):
    wide = x.float()
    return wide / (wide.pow(2).mean(-1, keepdim=True).sqrt() + EPS) * W


def eps_outside_of_the_reciprocal(x):
    wide = x.float()
    return wide * (1.0 / (torch.sqrt(wide.pow(2).mean(-1, keepdim=True)) + EPS))


def over_rows(x):
    wide = x.float()
    return wide * torch.rsqrt(wide.pow(2).mean(1, keepdim=True) + EPS)


def over_all(x):
    wide = x.float()
    return wide * torch.rsqrt(wide.pow(2).mean() + EPS)


def over_rows_and_columns(x):
    wide = x.float()
    return wide * torch.rsqrt(wide.pow(2).mean((-2, -1), keepdim=True) + EPS)


def root_alone(x):  # N9
    return torch.rsqrt(x.float().square().mean(-1, keepdim=True) + EPS).to(x.dtype)


def root_of_another(x, y):  # N9 and its caller
    return y * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + EPS).to(x.dtype)


def variance_is_read(x):
    wide = x.float()
    variance = wide.pow(2).mean(-1, keepdim=True)
    return wide * torch.rsqrt(variance + EPS) * W, variance


def running_statistics(x, mean, variance):
    return (x - mean) * torch.rsqrt(variance.abs() + EPS) * W + BIAS


CENTRED = "what it normalises has its mean taken away: that is a LayerNorm"
DEVIATION = "it divides by a standard deviation, not by the root of a mean of squares"
LENGTH = "it divides by the root of a sum of squares, not of their mean"
VECTOR_NORM = "it divides by a vector norm, not by the root of a mean of squares"
EPS_OUTSIDE = "its eps is added outside of the root"
UNUSED = "the root of the mean of squares does not scale the tensor that it is made of"
OTHER = "what it scales is not the tensor whose squares are averaged"
NORM_LIKE = {
    layer_norm: CENTRED, layer_norm_of_cohere: CENTRED, layer_norm_of_deberta: CENTRED,
    gated_layer_norm_of_heads: CENTRED, group_norm: CENTRED,
    by_variance: DEVIATION, by_unbiased_variance: DEVIATION, by_std: DEVIATION,
    by_std_of_the_centred: DEVIATION,
    unit_length: LENGTH, unit_length_of_products: LENGTH, unit_length_by_division: LENGTH,
    by_vector_norm: VECTOR_NORM, clipped_length: VECTOR_NORM,
    normalize: "it divides by a vector norm",
    eps_outside: EPS_OUTSIDE, eps_outside_of_the_reciprocal: EPS_OUTSIDE,
    over_rows: "it is over dim 1, not the last, and",
    over_all: "the mean is over all dimensions, not the last",
    over_rows_and_columns: "the mean is over 2 dimensions, not the last alone",
    root_alone: UNUSED, root_of_another: OTHER,
    variance_is_read: "inside it is also used by output",
}  # fmt: skip


@pytest.mark.parametrize("trace", TRACES)
@pytest.mark.parametrize("function", NORM_LIKE, ids=lambda f: f.__name__)
def test_norms_of_another_kind(function, trace):
    for dtype in (FLOAT, HALF):
        gm, code = rewrite(function, trace, dtype)
        assert_untouched(gm, code)
        (reason,) = reasons(gm)
        if function is over_rows and trace == "symbolic_trace":
            assert reason == "the mean is over dim 1, and without shapes that may not be the last"
        else:
            assert NORM_LIKE[function] in reason


# ---- what nobody takes for a norm or a gate -----------------------------------------------------


def whole_layer_norm(x):
    return F.layer_norm(x, (WIDTH,), W.to(x.dtype), BIAS.to(x.dtype))


def whole_group_norm(x):
    return F.group_norm(x, 4, eps=EPS)


def batch_norm(x):
    return F.batch_norm(x, BIAS[:16].to(x.dtype), W[:16].to(x.dtype))


def softcap(x):
    return torch.tanh(x / 30.0) * 30.0


def softmax(x):
    wide = x.float()
    e = torch.exp(wide - wide.amax(-1, keepdim=True))
    return e / e.sum(-1, keepdim=True)


def attention_gate(x, gate):
    return x * torch.sigmoid(gate)


def attention_gate_in_float(x, gate):
    return (x * torch.sigmoid(gate.float())).to(x.dtype)


def shared_expert(x, gate, other):
    return other + torch.sigmoid(gate[..., :1]) * x


def geglu(x, gate):
    return F.gelu(gate) * x


def silu_that_is_added(x, gate):
    return F.silu(gate) + x


NOTHING = (
    whole_layer_norm, whole_group_norm, batch_norm, running_statistics, softcap, softmax,
    attention_gate, attention_gate_in_float, shared_expert, geglu, silu_that_is_added,
)  # fmt: skip


@pytest.mark.parametrize("trace", TRACES)
@pytest.mark.parametrize("function", NOTHING, ids=lambda f: f.__name__)
def test_nothing_is_said_of_what_is_no_near_miss(function, trace):
    for dtype in (FLOAT, HALF):
        gm, code = rewrite(function, trace, dtype)
        assert_untouched(gm, code)
        assert reasons(gm) == []


# ---- gates of another kind ----------------------------------------------------------------------


def silu_is_read(x, gate):
    s = F.silu(gate)
    return x * s, torch.cos(s)


def silu_of_a_product_is_read(x, gate):
    s = gate * torch.sigmoid(gate)
    return x * s, s


def scaled_sigmoid(x, gate):  # GPT-OSS
    return (x + 1) * (gate * torch.sigmoid(gate * 1.702))


USED = "inside it is also used by"
GATE_LIKE = {
    silu_is_read: USED, silu_of_a_product_is_read: USED,
    scaled_sigmoid: "its sigmoid is of its gate times 1.702: that is no silu",
}  # fmt: skip


@pytest.mark.parametrize("trace", TRACES)
@pytest.mark.parametrize("function", GATE_LIKE, ids=lambda f: f.__name__)
def test_gates_of_another_kind(function, trace):
    for dtype in (FLOAT, HALF):
        gm, code = rewrite(function, trace, dtype)
        assert_untouched(gm, code)
        (reason,) = reasons(gm)
        assert GATE_LIKE[function] in reason


# ---- norms beside something else: only the norm is fused ----------------------------------------


def n1(x):
    return unit(x.float()).to(x.dtype) * W


def of_a_softcap(x):
    return n1(torch.tanh(x / 30.0) * 30.0)


def softcap_of_a_norm(x):
    return torch.tanh(n1(x) / 30.0) * 30.0


def of_rope(q, cos, sin):
    half = WIDTH // 2
    turned = torch.cat((-q[..., half:], q[..., :half]), -1)
    return n1(q * cos + turned * sin)


def of_streams(x, branch, other):  # hyper-connections
    streams = torch.stack((x, other), -2)
    return n1((branch[..., None, :] * 0.5 + streams).sum(-2))


def of_all_streams(x, branch, other):
    streams = torch.stack((x, other), -2)
    h = branch[..., None, :] * 0.5 + streams
    return F.rms_norm(h.flatten(-2).float(), (2 * WIDTH,), eps=EPS).to(x.dtype), h


def of_a_scaled_input(x):  # N12
    y = x.float() * (1.0 + BIAS.to(x.dtype)).float()
    return unit(y.type_as(x).float()).type_as(x)


def scaled_by_a_vector(x, residual):  # Muse Spark
    return 0.5 * residual + torch.sigmoid(BIAS.to(x.dtype)) * n1(x)


def modulated(x, scale, shift):
    return n1(x) * (1 + scale) + shift


NORM_ALONE = (
    of_a_softcap, softcap_of_a_norm, of_rope, of_streams, of_all_streams, of_a_scaled_input,
    modulated,
)  # fmt: skip


@pytest.mark.parametrize("trace", TRACES)
@pytest.mark.parametrize("function", NORM_ALONE, ids=lambda f: f.__name__)
def test_only_the_norm_is_fused(function, trace):
    for dtype in (FLOAT, HALF):
        gm, _ = rewrite(function, trace, dtype)
        assert forward_counts(gm) == {"rms_norm": 1}
        assert [r for r in reasons(gm) if "residual stream" not in r] == []
        (op,) = ops(gm)
        if trace == "make_fx":
            without = function in (of_all_streams, of_a_scaled_input)
            assert (op.args[1] is None) == without


def test_a_vector_that_scales_a_norm_is_no_gate():
    gm, _ = rewrite(scaled_by_a_vector, "make_fx", FLOAT)
    assert forward_counts(gm) == {"rms_norm": 1}
    assert reasons(gm) == []


class OfRope(Norm):
    def forward(self, q, cos, sin):
        return of_rope(q, cos, sin)


def test_rope_before_a_norm_in_dynamo():
    for dtype in (FLOAT, HALF):
        _, _, gm = dynamo(OfRope(dtype), operands(dtype, 3))
        assert forward_counts(gm) == {"rms_norm": 1}


def test_the_report_of_a_block_names_only_its_own_norms():
    """A LayerNorm at the end of a block of RMSNorms: one miss, of the LayerNorm."""

    def formula(m, r, _):
        h = r + torch.sin(m.n1(r))
        return layer_norm_of_cohere(m.n2(h))

    _, _, gm = dynamo(Block(formula, FLOAT), operands(FLOAT, 2))
    assert forward_counts(gm) == {"add_rms_norm": 1, "rms_norm": 1}
    assert reasons(gm) == [CENTRED]


@pytest.mark.parametrize("form", ["N1", "N5", "N10", "N11"])
def test_a_statistic_that_is_read_elsewhere(form):
    class Read(NORMS[form].module):
        def forward(self, x):
            y = super().forward(x)
            return y, x.pow(2).mean(-1, keepdim=True)

    args = operands(FLOAT, 1)
    gm = fxfuse.apply(aten(Read(FLOAT), args))
    assert forward_counts(gm) == {"rms_norm": 1}  # its own statistic is another node
