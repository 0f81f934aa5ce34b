"""Operands and transforms that have rules for ATen ops alone: there the ops are their formula."""

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from fxfuse.kernels import ops  # noqa: F401

rms_norm = torch.ops.fxfuse.rms_norm.default
add_rms_norm = torch.ops.fxfuse.add_rms_norm.default
EPS = 1e-6


def plain_norm(h, weight):
    return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS) * weight


def fused(x, residual, weight):
    y, h = add_rms_norm(x, residual, weight, eps=EPS)
    return y + 2 * h + rms_norm(x, weight, eps=EPS)


def plain(x, residual, weight):
    h = x + residual
    return plain_norm(h, weight) + 2 * h + plain_norm(x, weight)


def leaves(*shapes):
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def assert_all_close(ours, eager):
    for a, b in zip(ours, eager, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(3, 8), (8,), (32, 2, 8)], ids=str)
def test_batches_of_gradients(shape):
    inputs = leaves(shape, shape, (8,))
    dys = torch.randn(4, *shape)
    ours, eager = (
        torch.autograd.grad(f(*inputs), inputs, dys, is_grads_batched=True) for f in (fused, plain)
    )
    assert_all_close(ours, eager)


def test_vectorized_jacobian():
    inputs = tuple(leaves((3, 8), (3, 8), (8,)))
    ours, eager = (
        torch.autograd.functional.jacobian(f, inputs, vectorize=True) for f in (fused, plain)
    )
    assert_all_close(ours, eager)


def test_inner_ops_under_vmap():
    inner = torch.ops.fxfuse
    x, residual, weight = torch.randn(4, 3, 8), torch.randn(3, 8), torch.randn(8)

    def both_ways(x):
        y, h, rstd = inner.add_rms_norm_fwd.default(x, residual, weight, eps=EPS)
        other, _ = inner.rms_norm_fwd.default(x, weight, eps=EPS)
        dh, dweight = inner.rms_norm_bwd.default([y], h, weight, rstd, None, need_dweight=True)
        return y, h, rstd, other, dh, dweight

    one_by_one = [torch.stack(results) for results in zip(*map(both_ways, x))]
    assert_all_close(torch.func.vmap(both_ways)(x), one_by_one)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_wrapped_tensors(backend, grad):
    torch._dynamo.reset()
    parts = [leaves((3, 8), (3, 8)) for _ in range(2)]
    weight = torch.rand(8, requires_grad=True)
    wrapped = [TwoTensor(a.detach(), b.detach()).requires_grad_() for a, b in zip(*parts)]
    model = torch.compile(fused, backend=backend) if backend else fused
    with torch.set_grad_enabled(grad):
        y = model(*wrapped, weight)
    assert isinstance(y, TwoTensor)
    assert_all_close((y.a, y.b), [plain(*part, weight) for part in parts])
    if grad:
        gradients = torch.autograd.grad(y.sum(), wrapped)
        for name, part in zip("ab", parts):
            eager = torch.autograd.grad(plain(*part, weight).sum(), part)
            assert_all_close([getattr(g, name) for g in gradients], eager)


def test_jagged_tensors():
    parts = leaves((2, 8), (5, 8))
    nested = torch.nested.as_nested_tensor(parts, layout=torch.jagged)
    weight = torch.randn(8)
    y = rms_norm(nested, weight, eps=EPS)
    assert_all_close(y.unbind(), [plain_norm(part, weight) for part in parts])


@pytest.fixture
def mesh(tmp_path):
    """A mesh of this process alone."""
    if not torch.distributed.is_available():
        pytest.skip("torch was built without torch.distributed")
    from torch.distributed.device_mesh import init_device_mesh

    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def test_distributed_tensors(mesh):
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    inputs = leaves((4, 8), (4, 8), (8,))
    spread = [
        distribute_tensor(t.detach(), mesh, [Shard(0)] if t.dim() > 1 else None).requires_grad_()
        for t in inputs
    ]
    y, expected = fused(*spread), plain(*inputs)
    assert isinstance(y, DTensor)
    ours = torch.autograd.grad(y.sum(), spread)
    eager = torch.autograd.grad(expected.sum(), inputs)
    assert_all_close([t.full_tensor() for t in (y, *ours)], (expected, *eager))


@pytest.mark.parametrize("side", ["kernel", "inline"])
@pytest.mark.parametrize("of", ["weight", "residual"])
def test_complex_operands(of, side):
    inputs = leaves((3, 8), (3, 8), (8,))
    place = ("x", "residual", "weight").index(of)
    inputs[place] = torch.randn(inputs[place].shape, dtype=torch.complex64, requires_grad=True)
    attributes = {
        "eps": EPS, "compute_dtype": "input", "forward": side, "backward": side,
    }  # fmt: skip
    h = inputs[0] + inputs[1]
    results = (add_rms_norm(*inputs, **attributes)[0], plain_norm(h, inputs[2]))
    assert_all_close(*([result] for result in results))
    assert_all_close(*(torch.autograd.grad(r.abs().sum(), inputs) for r in results))
    if of == "weight":
        x, _, weight = inputs
        results = (rms_norm(x, weight, **attributes), plain_norm(x, weight))
        assert_all_close(*(torch.autograd.grad(r.abs().sum(), (x, weight)) for r in results))


def test_whole_numbers():
    x, _, weight = leaves((3, 8), (3, 8), (8,))
    residual, scale = torch.randint(-3, 3, (3, 8)), torch.randint(1, 3, (8,))
    for ours, eager in (
        (add_rms_norm(x, residual, weight, eps=EPS)[0], plain_norm(x + residual, weight)),
        (rms_norm(x, scale, eps=EPS), plain_norm(x, scale)),
    ):
        assert_all_close([ours], [eager])
        (a,), (b,) = (torch.autograd.grad(y.square().sum(), x) for y in (ours, eager))
        assert_all_close([a], [b])
