"""A norm whose input is read later: the op hands the input on, and takes its gradient along."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import fxfuse
from tests.dialects import DIALECTS, dynamo

WIDTH = 16
FORK = torch.ops.fxfuse.rms_norm_fork.default
FORKED = {"rms_norm": 1, "backward_add_rms_norm": 1}


class PreNorm(nn.Module):
    """x + f(norm(x)), the head of a transformer block."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.RMSNorm(WIDTH, eps=1e-6, dtype=dtype)
        self.mixer = nn.Linear(WIDTH, WIDTH, dtype=dtype)

    def forward(self, x):
        return x + self.mixer(self.norm(x))


def rows(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(3, 5, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)


def gradients(call, model, x):
    model.zero_grad(set_to_none=True)
    x = x.clone().requires_grad_()
    out = call(x)
    out = out if isinstance(out, torch.Tensor) else sum(t.sum() for t in out)
    out.square().sum().backward()
    return [x.grad, *(p.grad for p in model.parameters())]


def forks(gm: fx.GraphModule) -> list[fx.Node]:
    return gm.graph.find_nodes(op="call_function", target=FORK)


def fuse(function, *inputs):
    """The report and the rewritten graph of a function of tensors that require grad."""
    gm = fxfuse.apply(fx.symbolic_trace(function), inputs)
    return gm.meta["fxfuse"], gm


class Ops(TorchDispatchMode):
    def __enter__(self):
        self.seen = []
        return super().__enter__()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(function)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_one_backward_kernel_in_an_eager_graph(dialect):
    model = PreNorm()
    gm = fxfuse.apply(DIALECTS[dialect](model, (rows(),)))
    assert gm.meta["fxfuse"].counts == FORKED
    x = rows().requires_grad_()
    out = gm(x)
    with Ops() as ops:
        out.square().sum().backward()
    assert ops.seen.count(torch.ops.fxfuse.rms_norm_bwd.default) == 1
    assert torch.ops.aten.add.Tensor not in ops.seen, "the residual gradient is added in the kernel"
    again = fxfuse.apply(gm).meta["fxfuse"]
    assert not again.modified and not again.counts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients(dtype):
    model = PreNorm(dtype)
    gm = fxfuse.apply(fx.symbolic_trace(model))
    assert forks(gm)
    wide = PreNorm(torch.float64)
    wide.load_state_dict(model.state_dict())
    exact = gradients(wide, wide, rows(dtype).double())
    for ours, eager, right in zip(
        gradients(gm, model, rows(dtype)), gradients(model, model, rows(dtype)), exact
    ):
        errors = [(t.double() - right).norm() / right.norm() for t in (ours, eager)]
        assert ours.dtype == dtype and errors[0] <= max(1.1 * errors[1], 4 * 2**-23)


def test_in_the_graph_of_dynamo():
    model = PreNorm()
    assert forks(fxfuse.apply(dynamo(model, (rows().requires_grad_(),))))
    frozen = dynamo(model, (rows(),))
    assert not forks(fxfuse.apply(frozen)), "x takes no gradient"
    assert frozen.meta["fxfuse"].counts == {"rms_norm": 1}


def test_not_where_no_gradient_is_recorded():
    with torch.no_grad():
        gm = fxfuse.apply(fx.symbolic_trace(PreNorm()))
    assert not forks(gm) and gm.meta["fxfuse"].counts == {"rms_norm": 1}


def test_it_is_chosen_by_the_name_of_its_pattern():
    gm = fxfuse.apply(fx.symbolic_trace(PreNorm()), patterns=["rms_norm"])
    assert not forks(gm) and gm.meta["fxfuse"].counts == {"rms_norm": 1}


def test_two_norms_of_one_tensor():
    def parallel(x, w, v):
        return x + F.rms_norm(x, (WIDTH,), w) * F.rms_norm(x, (WIDTH,), v)

    weights = [torch.rand(WIDTH), torch.rand(WIDTH)]
    report, gm = fuse(parallel, rows(), *weights)
    assert report.counts == {"rms_norm": 2, "backward_add_rms_norm": 2}
    leaves = [t.clone().requires_grad_() for t in (rows(), *weights)]
    ours = torch.autograd.grad(gm(*leaves).square().sum(), leaves)
    want = torch.autograd.grad(parallel(*leaves).square().sum(), leaves)
    for got, right in zip(ours, want):
        torch.testing.assert_close(got, right, rtol=1e-5, atol=1e-5)


def test_a_later_write_to_the_input_declines():
    def writes(x, w):
        h = x * 2.0
        y = F.rms_norm(h, (WIDTH,), w)
        h.add_(1.0)
        return y + h

    report, gm = fuse(writes, rows(), torch.rand(WIDTH))
    assert not report.counts
    assert report.misses[0].reason == "mul, which it reads or aliases, is written by add_"
    torch.testing.assert_close(gm(rows(), torch.ones(WIDTH)), writes(rows(), torch.ones(WIDTH)))


@pytest.mark.parametrize(
    "reader",
    [
        lambda x: x.view(-1, WIDTH),
        lambda x: x,
        lambda x: x.transpose(0, 1)[0],
    ],
    ids=["a view", "itself", "a view of a view"],
)
def test_no_alias_leaves_the_graph(reader):
    def model(x, w):
        h = x * 2.0
        return F.rms_norm(h, (WIDTH,), w), reader(h)

    report, gm = fuse(model, rows(), torch.rand(WIDTH))
    assert report.counts == {"rms_norm": 1} and not forks(gm)
    _, out = gm(rows().requires_grad_(), torch.rand(WIDTH))
    out.add_(1.0)  # as eager allows


def test_a_view_that_is_only_read_gets_the_alias():
    def model(x, w):
        return F.rms_norm(x, (WIDTH,), w).view(-1, WIDTH) + x.view(-1, WIDTH)

    report, _ = fuse(model, rows(), torch.rand(WIDTH))
    assert report.counts == FORKED


def test_no_alias_reaches_a_leaf_module():
    class Model(PreNorm):
        def __init__(self):
            super().__init__()
            self.drop = nn.Dropout(0.0)

        def forward(self, x):
            return self.drop(x) + self.mixer(self.norm(x))

    model = Model()
    gm = fxfuse.apply(fx.symbolic_trace(model))
    assert not forks(gm)
    torch.testing.assert_close(gradients(gm, model, rows()), gradients(model, model, rows()))


def test_a_reader_that_writes_to_another_tensor_keeps_the_input():
    def model(x, w):
        y = F.rms_norm(x, (WIDTH,), w)
        y.add_(x)
        return y

    _, gm = fuse(model, rows(), torch.rand(WIDTH))
    assert not forks(gm)
    x = rows().requires_grad_()
    torch.testing.assert_close(gm(x, torch.ones(WIDTH)), model(x, torch.ones(WIDTH)))


def test_readers_in_another_grad_mode_keep_the_input():
    """An alias that is made without grad would cut off the gradient of who reads it with grad."""

    def model(x, w):
        with torch.no_grad():
            y = F.rms_norm(x, (WIDTH,), w)
        return x * y

    gm = dynamo(model, (rows().requires_grad_(), torch.rand(WIDTH)))
    fxfuse.apply(gm)
    assert gm.meta["fxfuse"].counts == {"rms_norm": 1} and not forks(gm)
    x, w = rows().requires_grad_(), torch.rand(WIDTH)
    got = torch.autograd.grad(gm(x, w)[0].sum(), x)[0]
    torch.testing.assert_close(got, torch.autograd.grad(model(x, w).sum(), x)[0])


def test_an_earlier_reader_keeps_the_input():
    def model(x, w):
        side = x * 3.0
        return F.rms_norm(x, (WIDTH,), w) + side

    report, _ = fuse(model, rows(), torch.rand(WIDTH))
    assert report.counts == {"rms_norm": 1}


def test_a_tensor_that_is_asked_for_its_dtype_is_not_handed_on():
    def model(x, w):
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w
        return y.type_as(x) * 2.0

    report, gm = fuse(model, rows(), torch.rand(WIDTH))
    assert report.counts == {"rms_norm": 1} and not forks(gm)
    torch.testing.assert_close(gm(rows(), torch.ones(WIDTH)), model(rows(), torch.ones(WIDTH)))


def asks(function):
    """An `autograd.grad` inside of the graph, with respect to an inner value."""

    def model(p, w):
        x, total = function(p, w)
        (grad,) = torch.autograd.grad(total.pow(2).sum(), [x])
        return grad * 2.0

    return model


INNER = {
    "the input of a norm": lambda p, w: (
        (x := p * 1.5), F.rms_norm(x, (WIDTH,), w) * 2.0 + x * 3.0),
    "the sum before a norm": lambda p, w: (
        (h := p + p.sin()), F.rms_norm(h, (WIDTH,), w) * 2.0 + h * 3.0),
    "a sum that is not used again": lambda p, w: (
        (h := p + p.sin()), F.rms_norm(h, (WIDTH,), w)),
    "the sum in a sandwich": lambda p, w: (
        (h := p + F.rms_norm(p, (WIDTH,), w)), F.rms_norm(h, (WIDTH,), w) * 2.0 + h * 3.0),
}  # fmt: skip


@pytest.mark.parametrize("function", INNER.values(), ids=INNER)
def test_gradients_that_the_graph_asks_for(function):
    model = asks(function)
    gm = fxfuse.apply(fx.symbolic_trace(model))
    x, w = rows().requires_grad_(), torch.rand(WIDTH, requires_grad=True)
    torch.testing.assert_close(gm(x, w), model(x, w))


COPIES = {
    "times one": lambda x: x * 1.0,
    "a copying cast": lambda x: x.to(torch.float32, copy=True),
    "a clone": lambda x: x.clone(),
}


@pytest.mark.parametrize("copy", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("early", [False, True])
def test_a_copy_that_is_written_is_no_twin(copy, early):
    def model(x, w):
        if early:
            c = copy(x)
            c.add_(1.0)
        y = F.rms_norm(x, (WIDTH,), w)
        if not early:
            c = copy(x)
            c.add_(1.0)
        return y + c * 2.0

    _, gm = fuse(model, rows(), torch.rand(WIDTH))
    x, w = rows().requires_grad_(), torch.rand(WIDTH, requires_grad=True)
    torch.testing.assert_close(gm(x, w), model(x, w))


def test_whoever_watches_the_gradient_of_x_sees_all_of_it():
    def model(x, w):
        y = F.rms_norm(x, (WIDTH,), w)
        x.retain_grad()
        return y + x * 2.0

    gm = fxfuse.apply(fx.symbolic_trace(model))
    w, seen = torch.rand(WIDTH), []
    for call in (model, gm):
        x = rows().requires_grad_() * 1.0
        call(x, w).pow(2).sum().backward()
        seen.append(x.grad)
    torch.testing.assert_close(*seen)


def test_x_takes_no_gradient_because_the_weight_does():
    def model(x, w):
        return F.rms_norm(x, (WIDTH,), w), x * 2.0

    gm = fxfuse.apply(fx.symbolic_trace(model))
    y, doubled = gm(rows(), torch.rand(WIDTH, requires_grad=True))
    assert y.requires_grad and not doubled.requires_grad


def test_functionalized():
    _, gm = fuse(lambda x, w: F.rms_norm(x, (WIDTH,), w) + x, rows(), torch.rand(WIDTH))
    assert forks(gm)
    w = torch.rand(WIDTH)
    torch.testing.assert_close(torch.func.functionalize(gm)(rows(), w), gm(rows(), w))


def test_readers_are_looked_at_once():
    def model(x, w):
        y, a = F.rms_norm(x, (WIDTH,), w), x
        for _ in range(500):
            a = torch.maximum(torch.sin(a), torch.cos(a))
        return y + a

    assert fuse(model, rows(), torch.rand(WIDTH))[0].counts["rms_norm"] == 1
