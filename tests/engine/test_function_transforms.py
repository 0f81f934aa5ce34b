"""torch.func, dual tensors and second derivatives of models with fused ops: right, or one error."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.testing import CompileCounter
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vmap
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import fxfuse
from tests.spellings import WIDTH, CastThenWeight

COUNTS = {
    "add_rms_norm": 1, "backward_add_rms_norm": 1, "rms_norm": 1, "rms_norm_add_rms_norm": 1,
    "rms_norm_silu_gate": 1, "silu_gate": 1, "silu_gate_rms_norm": 1,
}  # fmt: skip


class Model(nn.Module):
    """A site of every op."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(CastThenWeight(torch.float32) for _ in range(6))
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(8))

    def forward(self, x):
        norm, linear = self.norms, self.linears
        h = x + linear[0](norm[0](x))
        y = norm[1](h)
        h = h + norm[2](linear[3](F.silu(linear[1](y)) * linear[2](y)))
        y = norm[3](h)
        g = linear[6](norm[4](linear[4](y)) * F.silu(linear[5](y)))
        return h + norm[5](g * F.silu(linear[7](y)))


@pytest.fixture(scope="module")
def model() -> Model:
    torch.manual_seed(0)
    made = Model()
    with torch.no_grad():
        for norm in made.norms:
            norm.weight.normal_(1.0, 0.1)
    return made


@pytest.fixture(scope="module")
def rewritten(model) -> fx.GraphModule:
    gm = fx.symbolic_trace(copy.deepcopy(model))
    fxfuse.apply(gm, (torch.randn(3, WIDTH),), policy="always")
    assert gm.meta["fxfuse"].counts == COUNTS
    return gm


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in sorted(model.named_parameters())}


def inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(3, WIDTH, generator=generator) for _ in range(2))


def differentiated_twice(model: nn.Module) -> tuple[Tensor, ...]:
    x = inputs()[0].requires_grad_()
    (dx,) = torch.autograd.grad(model(x).square().mean(), x, create_graph=True)
    parameters = dict(sorted(model.named_parameters()))
    return torch.autograd.grad(dx.square().sum(), (x, *parameters.values()))


def tangent(model: nn.Module) -> Tensor:
    x, v = inputs()
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(model(forward_ad.make_dual(x, v))).tangent


def batched_gradients(model: nn.Module) -> tuple[Tensor, ...]:
    x, v = inputs()
    x.requires_grad_()
    return torch.autograd.grad(model(x), x, torch.stack([v, 2 * v]), is_grads_batched=True)


def derivatives(model: nn.Module, parameters: dict[str, Tensor]) -> Iterator[tuple[str, object]]:
    x, v = inputs()
    xs, ones = torch.stack([x, 2 * x]), {k: torch.ones_like(p) for k, p in parameters.items()}
    several = {k: torch.stack([p, 1.1 * p]) for k, p in parameters.items()}

    def call(p: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(model, p, (x,))

    def loss(p: dict[str, Tensor], x: Tensor) -> Tensor:
        return call(p, x).square().mean()

    yield "functional_call", call(parameters, x)
    yield "grad", grad(loss)(parameters, x)
    yield "vmap", vmap(call, (None, 0))(parameters, xs)
    yield "per sample", vmap(grad(loss), (None, 0))(parameters, xs)
    yield "ensemble", vmap(call, (0, None))(several, x)
    yield "jvp", jvp(call, (parameters, x), (ones, v))[1]
    yield "jacrev", jacrev(call, 1)(parameters, x)
    yield "jacfwd", jacfwd(call, 1)(parameters, x)
    yield "hessian", hessian(loss, 1)(parameters, x)
    yield "dual", tangent(model)
    yield "twice", differentiated_twice(model)
    yield "batched", batched_gradients(model)


def assert_same(found: object, expected: object, what: str) -> None:
    pairs = zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True)
    for one, other in pairs:
        scale = other.abs().max().item()
        assert scale > 0, what
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4 * scale, msg=lambda t: what + t)


def test_of_a_rewritten_module(model, rewritten):
    parameters = parameters_of(model)
    found = derivatives(rewritten, parameters)
    for (what, one), (_, other) in zip(found, derivatives(model, parameters), strict=True):
        assert_same(one, other, what)


# ------------------------------------------------------------ compiled


def transforms(model: nn.Module, parameters: dict[str, Tensor]) -> dict[str, Callable]:
    x, v = inputs()

    def call(x: Tensor) -> Tensor:
        return functional_call(model, parameters, (x,))

    return {
        "grad": lambda: grad(lambda x: call(x).square().mean())(x),
        "jvp": lambda: jvp(call, (x,), (v,))[1],
        "vmap": lambda: vmap(call)(torch.stack([x, v])),
    }


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.parametrize("what", ["grad", "jvp", "vmap"])
def test_a_transform_inside_what_is_compiled_is_left_alone(what, inner, model):
    torch._dynamo.reset()
    run = transforms(model, parameters_of(model))[what]
    with fxfuse.record() as reports:
        found = torch.compile(run, backend=fxfuse.make_backend(inner, policy="always"))()
    assert_same(found, run(), what)
    assert reports[0].counts == {} and "functorch transform" in reports[0].misses[0].reason


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.parametrize("what", ["grad", "jvp", "vmap"])
def test_a_transform_of_what_is_compiled(what, inner, model):
    torch._dynamo.reset()
    parameters = parameters_of(model)
    compiled = torch.compile(model, backend=fxfuse.make_backend(inner, policy="always"))
    found = transforms(compiled, {f"_orig_mod.{k}": p for k, p in parameters.items()})[what]()
    assert_same(found, transforms(model, parameters)[what](), what)


ONCE = {"dual": tangent, "twice": differentiated_twice, "batched": batched_gradients}
# What AOTAutograd has no rule for, whatever the graph holds.
ERRORS = {
    "dual": (NotImplementedError, "jvp"),
    "twice": (RuntimeError, "does not currently support double backward"),
}


def dynamo_takes_dual_numbers() -> bool:
    """From torch 2.14 on it runs what gets them as it is."""
    graphs = CompileCounter()
    tangent(torch.compile(nn.Linear(WIDTH, WIDTH), backend=graphs))
    return graphs.frame_count > 0


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.parametrize("what", ONCE)
def test_other_derivatives_of_a_compiled_model(what, inner, model):
    torch._dynamo.reset()
    expected = ONCE[what](model)
    compiled = torch.compile(model, backend=fxfuse.make_backend(inner, policy="always"))
    if what == "dual" and not dynamo_takes_dual_numbers():
        assert_same(tangent(compiled), expected, what)
        return
    with fxfuse.record() as reports:
        if inner == "aot_eager" and what in ERRORS:
            error, words = ERRORS[what]
            with pytest.raises(error, match=words):
                ONCE[what](compiled)
        else:
            assert_same(ONCE[what](compiled), expected, what)
    assert set(reports[0].counts) >= set(COUNTS) - {"backward_add_rms_norm"}
