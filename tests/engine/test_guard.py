"""What must not be fused. Each case gives a wrong number or a broken graph without its guard."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.testing
from torch import fx, nn

import fxfuse
from tests.dialects import exported

N = 16


def rms(x: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
    y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    return y if weight is None else y * weight


def inputs(*shapes: tuple, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=generator) for s in shapes or ((4, N), (4, N), (N,))]


def check(model, args, trace=None):
    """Fuse a symbolic trace with metadata, compare with the plain function, return the report."""
    gm = fx.symbolic_trace(model) if trace is None else trace(model, tuple(args))
    mine, theirs = [a.clone() for a in args], [a.clone() for a in args]
    gm = fxfuse.apply(gm, args)
    got, want = gm(*mine), model(*theirs)
    for one, other in zip(flat(got), flat(want)):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    for one, other in zip(mine, theirs):
        assert torch.equal(one, other)
    return gm.meta["fxfuse"]


def flat(value):
    return [t for v in value for t in flat(v)] if isinstance(value, (tuple, list)) else [value]


def reasons(report) -> str:
    return " | ".join(m.reason for m in report.misses)


def test_input_written_between_the_add_and_the_norm():
    def model(x, r, w):
        h = x + r
        x.mul_(3)
        return rms(h, w), x

    report = check(model, inputs())
    assert report.counts == {"rms_norm": 1}
    assert "x, which it reads or aliases, is written by mul_" in reasons(report)


def test_input_written_through_a_view():
    def model(x, r, w):
        top = x[0]
        h = x + r
        top.add_(1)
        return rms(h, w), x

    report = check(model, inputs())
    assert report.counts == {"rms_norm": 1}


def test_sum_written_between():
    def model(x, r, w):
        h = x + r
        scale = torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
        h.add_(1)
        return h * scale * w

    report = check(model, inputs())
    assert report.counts == {}
    assert "h" in reasons(report) or "add" in reasons(report)


def test_sum_written_after_the_norm():
    """The op saves h for the backward pass."""

    def model(x, r, w):
        h = x + r
        y = rms(h, w)
        h.zero_()
        return y, h

    report = check(model, inputs())
    assert report.counts == {}
    assert "is written by zero_" in reasons(report)


def test_weight_written_between():
    def model(x, r, w):
        h = x + r
        scale = torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
        w.mul_(2)
        return h * scale * w

    report = check(model, inputs())  # w may be the same buffer as x: only the norm of h is safe
    assert report.counts == {"rms_norm": 1}
    assert "weight" not in report.matches[0].shapes


def test_output_written_later_is_fine():
    def model(x, r, w):
        h = x + r
        y = rms(h, w)
        y.mul_(2)
        return y, h

    assert check(model, inputs()).counts == {"add_rms_norm": 1}


def test_in_place_add_of_the_callers_buffer_stays():
    def model(x, r, w):
        r.add_(x)
        return rms(r, w), r

    assert check(model, inputs()).counts == {"rms_norm": 1}


def test_in_place_add_of_a_fresh_tensor_is_an_add():
    def model(x, r, w):
        h = (x * 2).add_(r)
        return rms(h, w), h

    assert check(model, inputs()).counts == {"add_rms_norm": 1}


def test_in_place_add_of_a_shared_fresh_tensor_stays():
    def model(x, r, w):
        h = x * 2
        view = h[0]
        h.add_(r)
        return rms(h, w), view

    assert check(model, inputs()).counts == {"rms_norm": 1}


def test_out_argument_is_a_write():
    def model(x, r, w):
        h = x + r
        torch.mul(h, 2, out=x)
        return rms(h, w), x

    assert check(model, inputs()).counts == {"rms_norm": 1}


def test_inner_value_used_elsewhere():
    def model(x, w):
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return x * scale * w, scale

    report = check(model, inputs((4, N), (N,)))
    assert report.counts == {}
    assert "is also used by output" in reasons(report)


def test_variance_used_elsewhere():
    def model(x, r, w):
        h = x + r
        variance = h.pow(2).mean(-1, keepdim=True)
        return h * torch.rsqrt(variance + 1e-6) * w, variance.sum()

    report = check(model, inputs())
    assert report.counts == {}
    assert "the value mean inside it is also used by sum_1" in reasons(report)


def test_cast_used_elsewhere_stays():
    def model(x, r, w):
        h = x + r
        wide = h.float()
        y = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(h.dtype) * w
        return y, wide.sum()

    args = [a.bfloat16() for a in inputs()]
    gm = fxfuse.apply(exported(Wrapped(model), tuple(args)))
    assert gm.meta["fxfuse"].counts == {"add_rms_norm": 1}
    for got, want in zip(gm(*args), model(*args)):
        torch.testing.assert_close(got, want, rtol=1.6e-2, atol=1e-2)


class Wrapped(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


def test_input_computed_from_the_sum():
    """The weight comes from h itself: there is no place for the op."""

    def model(x, r):
        h = x + r
        w = h.sum(0)
        return rms(h, w), h

    report = check(model, inputs((4, N), (4, N)))
    assert report.counts == {"rms_norm": 1}
    assert "is computed too late" in reasons(report)


def test_weight_computed_after_the_sum_is_used_moves_up():
    def model(x, r, w):
        h = x + r
        side = h * 3
        return rms(h, w.float() + 1.0), side

    assert check(model, inputs()).counts == {"add_rms_norm": 1}


@pytest.mark.parametrize(
    ("shapes", "reason"),
    [
        (((4, N), (N,), (N,)), "the operands of the add broadcast"),
        (((2, 4, N), (1, 4, N), (N,)), "the operands of the add broadcast"),
        (((4, 1), (4, N), (N,)), "the operands of the add broadcast"),
    ],
)
def test_operands_that_broadcast(shapes, reason):
    report = check(lambda x, r, w: (rms(x + r, w), x + r), inputs(*shapes))
    assert reason in reasons(report)
    assert report.counts == {"rms_norm": 1}


@pytest.mark.parametrize("shape", [(1,), (4, N), (N, 1), (1, 1, N)])
def test_factors_that_are_not_one_value_per_column_stay_outside(shape):
    rows = N if shape == (N, 1) else 4
    report = check(lambda x, r, w: rms(x + r, w), inputs((rows, N), (rows, N), shape))
    assert report.counts == {"add_rms_norm": 1}
    assert "weight" not in report.matches[0].shapes


@pytest.mark.parametrize(
    ("statistic", "reason"),
    [
        (
            lambda x: x.pow(2).mean(0, keepdim=True),
            "it is over dim 0, not the last, and has no weight",
        ),
        (lambda x: x.pow(2).mean((0, 1), keepdim=True), "over 2 dimensions"),
        (lambda x: x.pow(2).mean(), "over all dimensions"),
        (lambda x: x.pow(2).sum(-1, keepdim=True), "a sum of squares, not of their mean"),
        (lambda x: x.pow(2).sum(-1, keepdim=True) / (N - 1), "by 15, not by the width 16"),
        (lambda x: (x * 2).pow(2).mean(-1, keepdim=True), "not the tensor whose squares"),
    ],
)
def test_statistics_that_are_not_a_mean_of_squares_over_the_last_dim(statistic, reason):
    report = check(lambda x: x * torch.rsqrt(statistic(x) + 1e-6), inputs((N, N)))
    assert report.counts == {}
    assert reason in reasons(report)


def test_look_alikes_are_left_alone():
    def layer_norm(x):
        centred = x - x.mean(-1, keepdim=True)
        return centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-6)

    def eps_outside(x):
        return x / (x.pow(2).mean(-1, keepdim=True).sqrt() + 1e-2)

    def clamped(x):
        return x / x.pow(2).mean(-1, keepdim=True).sqrt().clamp_min(1e-2)

    def square_of_mean(x):
        return x * torch.rsqrt(x.mean(-1, keepdim=True).pow(2) + 1e-2)

    def absolute(x):
        return x * torch.rsqrt(x.abs().mean(-1, keepdim=True) + 1e-2)

    def scaled_add(x):
        return torch.add(x, x, alpha=0.5)

    for model in (layer_norm, eps_outside, clamped, square_of_mean, absolute, scaled_add):
        assert check(model, inputs((4, N))).counts == {}, model


def test_add_with_a_factor_is_not_a_residual_add():
    def model(x, r, w):
        return rms(torch.add(x, r, alpha=0.5), w), rms(x - r, w), rms(x + 1.0, w)

    assert check(model, inputs()).counts == {"rms_norm": 3}


def test_grad_mode_changes_inside():
    def model(x, r, w):
        h = x + r
        with torch.no_grad():
            y = rms(h, w)
        return y, h

    report = dynamo_report(model)
    assert report.counts == {"rms_norm": 1}
    assert "grad-mode" in reasons(report)


def test_no_grad_region_keeps_gradients_right():
    def model(x, r, w):
        h = x + r
        with torch.no_grad():
            y = rms(h, w)
        return y + h

    grads = []
    for run in (model, torch.compile(model, backend=fxfuse.make_backend("aot_eager"))):
        leaves = [a.requires_grad_() for a in inputs()]
        run(*leaves).sum().backward()
        grads.append([leaf.grad for leaf in leaves])
    assert grads[0][2] is None and grads[1][2] is None
    torch.testing.assert_close(grads[0][0], grads[1][0])


def test_vmap_region():
    report = dynamo_report(lambda x, r, w: torch.vmap(lambda a, b: rms(a + b, w))(x, r))
    assert report.counts == {}
    assert "functorch transform" in reasons(report)


def dynamo_report(model):
    torch._dynamo.reset()
    with fxfuse.record() as reports:
        torch.compile(model, backend=fxfuse.make_backend("eager"))(*inputs())
    return fxfuse.Report.merge(reports)


def test_hooked_leaf_module():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.RMSNorm(N)
            self.norm.register_forward_hook(lambda module, args, out: out * 2)

        def forward(self, x):
            return self.norm(x)

    report = check(Model(), inputs((4, N)))
    assert report.counts == {}
    assert "has hooks" in reasons(report)


def test_norm_over_two_dimensions():
    report = check(nn.RMSNorm((4, N)), inputs((3, 4, N)), trace=exported)
    assert report.counts == {}
    assert "over the last 2 dimensions together" in reasons(report)


def test_integer_input():
    def model(x):
        return torch.rsqrt(x.pow(2).float().mean(-1, keepdim=True)) * x

    assert check(model, [torch.arange(1, 33).view(2, 16)]).counts == {}


def test_tensor_subclass():
    from torch.testing._internal.two_tensor import TwoTensor

    def model(x, r):
        return rms(x + r)

    def check_refused(gm, example_inputs):
        for node in gm.graph.find_nodes(op="placeholder"):
            node.meta["example_value"] = TwoTensor(*inputs((4, N), (4, N)))
        seen.append(fxfuse.apply(gm).meta["fxfuse"])
        return gm.forward

    seen = []
    torch._dynamo.reset()
    torch.compile(model, backend=check_refused)(*inputs((4, N), (4, N)))
    assert seen[0].counts == {} or "rms_norm" in seen[0].counts
    assert "TwoTensor" in reasons(seen[0])


def test_symbolic_rows_add_no_guard():
    def model(x, r, w):
        return rms(x + r, w)

    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("eager")
    compiled = torch.compile(model, backend=fxfuse.make_backend(counter), dynamic=True)
    for rows in (3, 5, 8, 33):
        args = inputs((rows, N), (rows, N), (N,))
        torch.testing.assert_close(compiled(*args), model(*args))
    assert counter.frame_count == 1


def test_what_the_sandwich_saves_is_written_later():
    """Its backward needs x, which is no output of it."""

    def model(x, r, w):
        x = x * 3.0
        h = r + rms(x, w)
        y = rms(h, w)
        x.mul_(2.0)
        return y, h

    report = check(model, inputs())
    assert report.counts == {"add_rms_norm": 1}
    assert "mul, which it reads or aliases, is written by mul_" in reasons(report)


def test_rows_picked_by_a_tensor_of_indices_are_copies():
    def model(x, order):
        picked = x[order]
        y = rms(picked)
        x.mul_(2.0)
        return y, x

    report = check(model, [*inputs((4, N)), torch.tensor([2, 0, 1])])
    assert report.counts == {"rms_norm": 1}


def test_a_row_picked_by_what_may_be_a_number_is_taken_for_a_view():
    def model(x, index):
        picked = x[index]
        y = rms(picked)
        x.mul_(2.0)
        return y, x

    gm = fxfuse.apply(fx.symbolic_trace(model))
    assert gm.meta["fxfuse"].counts == {}
    x = inputs((4, N))[0]
    for got, want in zip(gm(x.clone(), 1), model(x.clone(), 1)):
        torch.testing.assert_close(got, want)
