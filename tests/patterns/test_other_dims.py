"""Norms over another dimension than the last: channels first, or rows that were transposed."""

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import fxfuse
from fxfuse.policy import Place, choose

C, EPS = 12, 1e-6


class Norm(nn.Module):
    """x over dim 1, with a weight of a shape that a spelling wants."""

    def __init__(self, spelling, shape, dtype=torch.float32):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.spelling = spelling
        self.weight = nn.Parameter((1 + 0.3 * torch.randn(shape, generator=generator)).to(dtype))

    def forward(self, x):
        return self.spelling(x, self.weight)


def root(x, dim=1):
    return torch.rsqrt(x.pow(2).mean(dim, keepdim=True) + EPS)


def plain(x, w):
    return x * root(x) * w


def vector(x, w):
    return x / torch.sqrt((x * x).mean(1).unsqueeze(1) + EPS) * w[:, None]


def rounded(x, w):
    wide = x.float()
    return w * (wide * root(wide, -2)).to(x.dtype)


def lengths(x, w):
    return x / (x.norm(dim=1, keepdim=True) * C**-0.5) * w


def sums(x, w):
    return x * (((x * x).sum(1) / C + EPS) ** -0.5)[:, None] * w


def zero_centred(x, w):
    return x * root(x) * (1 + w)


def between_transposes(x, w):
    x = x.transpose(1, 2)
    return plain(x, w).transpose(1, 2)


def of_channels_last(x, w):
    return plain(x.contiguous(memory_format=torch.channels_last), w)


def root_first(x, w):
    x = x.transpose(1, 2)
    return root(x) * x * w


FORMS = [
    (plain, (C, 1), (2, C, 7)),
    (plain, (1, C, 1, 1), (2, C, 5, 7)),
    (plain, (C, 1, 1), (2, C, 5, 7)),
    (plain, (C, 1), (2, C, C)),
    (vector, (C,), (2, C, 7)),
    (rounded, (C, 1), (2, C, 7)),
    (lengths, (C, 1), (2, C, 7)),
    (sums, (C, 1), (2, C, 7)),
    (zero_centred, (C, 1), (2, C, 7)),
    (between_transposes, (C, 1), (2, 7, C)),
    (root_first, (C, 1), (2, 7, C)),
    (of_channels_last, (C, 1, 1), (2, C, 5, 7)),
]


def case(spelling, weight, shape, dtype=torch.float32):
    return Norm(spelling, weight, dtype), torch.randn(shape, dtype=dtype)


def results(function, model, x):
    """Output and gradients, with a gradient of the output that has no pattern."""
    x = x.clone().requires_grad_()
    y = function(x)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y.dtype)
    return y, *torch.autograd.grad(y, [x, model.weight], dy)


def assert_same(found, expected):
    """Equal to a step of the dtype at the scale of each tensor; the outputs lie alike too."""
    assert found[0].stride() == expected[0].stride()
    for one, other in zip(found, expected, strict=True):
        step = 4 * torch.finfo(other.dtype).eps * other.abs().max().item()
        torch.testing.assert_close(one, other, rtol=0, atol=step)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form[0].__name__}-{len(form[2])}d")
@pytest.mark.parametrize("policy", ["auto", "always"])
def test_found_and_right(form, policy):
    model, x = case(*form, torch.bfloat16 if form[0] is rounded else torch.float32)
    report = fxfuse.explain(model, x)
    (match,) = report.matches
    assert (match.pattern, match.attributes["dim"]) == ("rms_norm", 1)
    assert not report.misses
    torch._dynamo.reset()
    backend = fxfuse.make_backend(inner="eager", policy=policy)
    compiled = torch.compile(model, backend=backend)
    assert_same(results(compiled, model, x), results(model, model, x))


def test_under_inductor():
    torch._dynamo.reset()
    model, x = case(between_transposes, (C, 1), (2, 7, C))
    compiled = torch.compile(model, backend=fxfuse.backend)
    assert_same(results(compiled, model, x), results(model, model, x))


def exported(model):
    return lambda x: torch.export.export(model, (x,)).module()


@pytest.mark.parametrize("trace", [make_fx, exported])
def test_other_dialects(trace):
    model, x = case(plain, (C, 1), (2, C, 7))
    gm = fxfuse.apply(trace(model)(x))
    assert gm.meta["fxfuse"].counts == {"rms_norm": 1}
    torch.testing.assert_close(gm(x), model(x))


def test_a_norm_of_the_last_dimension_beside_one_of_another():
    def both(x, w):
        return plain(x, w) * root(x, -1)

    model, x = case(both, (C, 1), (2, C, 7))
    report = fxfuse.explain(model, x)
    assert [m.attributes.get("dim", -1) for m in report.matches] == [1]
    assert ["what it scales" in miss.reason for miss in report.misses] == [True]


# ---- what stays -----------------------------------------------------------------------------


def without_weight(x, w):
    return x * root(x)


def weight_of_the_last(x, w):
    return x * root(x) * w


def eps_outside(x, w):
    return x / (x.pow(2).mean(1, keepdim=True).sqrt() + EPS) * w


def centred(x, w):
    x = x - x.mean(1, keepdim=True)
    return plain(x, w)


def put_back_elsewhere(x, w):
    """For a square x: each column is scaled by the root of the column of another number."""
    return x * torch.rsqrt(x.pow(2).mean(1) + EPS)[..., None] * w


STAY = [
    (without_weight, (C, 1), (2, C, 7), "it is over dim 1, not the last, and has no weight along"),
    (weight_of_the_last, (7,), (2, C, 7), "its weight of shape (7,) is not along that"),
    (weight_of_the_last, (C,), (2, C, C), f"its weight of shape ({C},) is not along that"),
    (weight_of_the_last, (2, C, 1), (2, C, 7), f"its weight of shape (2, {C}, 1) is not along"),
    (eps_outside, (C, 1), (2, C, 7), "its eps is added outside of the root"),
    (centred, (C, 1), (2, C, 7), "that is a LayerNorm"),
    (put_back_elsewhere, (C, 1), (2, C, C), "it drops the dimension that it reduces"),
]


@pytest.mark.parametrize(
    "spelling, weight, shape, reason", STAY, ids=lambda one: getattr(one, "__name__", None)
)
def test_left_alone_with_a_reason(spelling, weight, shape, reason):
    report = fxfuse.explain(*case(spelling, weight, shape))
    assert not report.matches
    assert [reason in miss.reason for miss in report.misses] == [True]


# ---- the op, and where it runs ----------------------------------------------------------------


@pytest.mark.parametrize("side", ["kernel", "inline"])
def test_the_op(side):
    op = torch.ops.fxfuse.rms_norm.default
    x = torch.randn(2, C, 3, dtype=torch.float64, requires_grad=True)
    w = torch.randn(C, 1, dtype=torch.float64, requires_grad=True)

    def call(x, w):
        sides = {"forward": side, "backward": side}
        return op(x, w, eps=EPS, compute_dtype="float64", dim=1, **sides)

    torch.testing.assert_close(call(x, w), plain(x, w))
    assert torch.autograd.gradcheck(call, (x, w))
    assert torch.autograd.gradgradcheck(call, (x, w))
    y = call(x, w)
    assert not y._is_view()
    each = torch.vmap(call, (0, None))(x[None], w)
    torch.testing.assert_close(each[0], y)


@pytest.mark.parametrize("policy, side", [("auto", "inline"), ("always", "kernel")])
def test_rows_that_lie_apart_are_left_to_the_compiler(policy, side):
    place = Place("rms_norm", "sm_90", compiled=True, rows=4096, columns=4096, strided=True)
    assert choose(policy, place).forward == side


@pytest.mark.parametrize("last", [True, False])
def test_it_is_seen_which_rows_lie_apart(last):
    x = torch.randn(2, 4096, 64) if not last else torch.randn(2, 64, 4096).transpose(1, 2)
    report = fxfuse.explain(Norm(plain, (4096, 1)), x, target="sm_90")
    (match,) = report.matches
    assert ("lie apart" in match.policy) is not last
