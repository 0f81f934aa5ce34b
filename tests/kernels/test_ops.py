"""The ops as ops: registration, gradients, transforms, compilers, and what they must not do."""

import itertools
import logging

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import forward_ad
from torch.library import opcheck
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from fxfuse.kernels import compiled, ops, reference  # noqa: F401

FXFUSE = torch.ops.fxfuse
rms_norm, add_rms_norm = FXFUSE.rms_norm.default, FXFUSE.add_rms_norm.default
FP32, FP16, BF16, FP64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
EPS = 1e-6
SIDES = list(itertools.product(("kernel", "inline"), repeat=2))
ATTRIBUTES = {
    "plain": {"eps": EPS},
    "llama": {"eps": None, "unit_dtype": "input"},
    "zero_centred": {"eps": EPS, "weight_offset": 1.0, "out_dtype": "input"},
    "fp64": {"eps": EPS, "compute_dtype": "float64", "out_dtype": "float32"},
}
attribute_sets = pytest.mark.parametrize("attributes", ATTRIBUTES.values(), ids=ATTRIBUTES)


def leaves(*shapes, dtype=FP32):
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def plain_norm(h, weight, eps=EPS):
    """The norm in h's dtype by autograd alone."""
    return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps) * weight


class Calls(TorchDispatchMode):
    """The inner ops that run inside it, with their arguments."""

    def __enter__(self):
        self.seen = []
        return super().__enter__()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "fxfuse":
            self.seen.append((function._opname, args, kwargs or {}))
        return function(*args, **(kwargs or {}))

    @property
    def names(self):
        return [name for name, *_ in self.seen]


# --------------------------------------------------------------------------- registration


@pytest.mark.parametrize(
    "forward, backward, attributes",
    [(side, side, attributes) for side in ("kernel", "inline") for attributes in ATTRIBUTES]
    + [("kernel", "inline", "plain"), ("inline", "kernel", "plain")],
)
def test_opcheck_outer(forward, backward, attributes):
    attributes = ATTRIBUTES[attributes]
    sides = {"forward": forward, "backward": backward}
    x, residual, weight = leaves((2, 4, 8), (2, 4, 8), (8,))
    opcheck(rms_norm, (x, weight), attributes | sides)
    opcheck(rms_norm, (x, None), attributes | sides)
    opcheck(add_rms_norm, (x, residual, weight), attributes | sides)
    opcheck(add_rms_norm, (x.detach(), residual, weight.detach()), attributes | sides)


@attribute_sets
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_opcheck_inner(dtype, attributes):
    x, residual = torch.randn(2, 4, 8).to(dtype), torch.randn(4, 1).to(FP32)
    transposed, weight = torch.randn(8, 4).to(dtype).t(), torch.randn(8)
    opcheck(FXFUSE.rms_norm_fwd.default, (x, weight), attributes)
    opcheck(FXFUSE.rms_norm_fwd.default, (transposed, None), attributes)
    opcheck(FXFUSE.add_rms_norm_fwd.default, (x, x.clone(), weight), attributes)
    opcheck(FXFUSE.add_rms_norm_fwd.default, (transposed, transposed.clone(), weight), attributes)
    opcheck(FXFUSE.add_rms_norm_fwd.default, (x, residual, weight), attributes)


@pytest.mark.parametrize("count", [1, 3, 5])
@pytest.mark.parametrize("dres", [True, False])
@pytest.mark.parametrize("need_dweight", [True, False])
def test_opcheck_backward(count, dres, need_dweight):
    h, weight = torch.randn(3, 8).to(BF16), torch.randn(8)
    dys = [torch.randn(8, 3).to(BF16).t() for _ in range(count)]
    arguments = (dys, h, weight, torch.rand(3), torch.randn(3, 8).to(BF16) if dres else None)
    attributes = {"need_dweight": need_dweight, "weight_offset": 1.0}
    opcheck(FXFUSE.rms_norm_bwd.default, arguments, attributes)
    dh, dweight = FXFUSE.rms_norm_bwd.default(*arguments, **attributes)
    assert dh.dtype == BF16 and dweight.dtype == FP32
    assert dweight.shape == ((8,) if need_dweight else (0,))


@pytest.mark.parametrize(
    "attributes, words",
    [
        ({"forward": "fused"}, "fxfuse::rms_norm: forward is 'fused'"),
        ({"backward": ""}, "fxfuse::rms_norm: backward is ''"),
        ({"unit_dtype": "bf16"}, "dtype 'bf16' is not known"),
        ({"out_dtype": "nn"}, "dtype 'nn' is not known"),
    ],
)
def test_unknown_attribute_values(attributes, words):
    with pytest.raises(ValueError, match=words):
        rms_norm(torch.randn(2, 8), None, eps=EPS, **attributes)


# ------------------------------------------------------------------------------ gradients


@pytest.mark.parametrize("compute_dtype", ["float64", "input"])
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("forward, backward", SIDES)
def test_gradcheck(forward, backward, offset, compute_dtype):
    attributes = {
        "eps": EPS, "weight_offset": offset, "compute_dtype": compute_dtype,
        "forward": forward, "backward": backward,
    }  # fmt: skip
    x, residual, weight = leaves((3, 2, 5), (3, 2, 5), (5,), dtype=FP64)
    check = torch.autograd.gradcheck
    assert check(lambda *a: rms_norm(*a, **attributes), (x, weight))
    assert check(lambda x: rms_norm(x, None, **attributes), (x,))
    assert check(lambda *a: add_rms_norm(*a, **attributes), (x, residual, weight))
    assert check(lambda *a: add_rms_norm(*a, **attributes), (x, residual[0, 0], weight))
    assert check(lambda *a: add_rms_norm(*a, **attributes), (x[:1, :1], residual, weight))


@pytest.mark.parametrize("forward, backward", SIDES)
def test_a_gradient_can_be_differentiated_again(forward, backward):
    attributes = {
        "eps": EPS, "compute_dtype": "input", "forward": forward, "backward": backward,
    }  # fmt: skip
    x, residual, weight = leaves((3, 5), (3, 5), (5,), dtype=FP64)
    check = torch.autograd.gradgradcheck
    assert check(lambda *a: rms_norm(*a, **attributes), (x, weight))
    assert check(lambda *a: add_rms_norm(*a, **attributes), (x, residual, weight))


def test_a_gradient_penalty():
    x, weight = leaves((4, 8), (8,))

    def penalty(norm):
        (dx,) = torch.autograd.grad(norm(x, weight).sum(), x, create_graph=True)
        return torch.autograd.grad(dx.pow(2).sum(), (x, weight))

    for a, b in zip(penalty(lambda x, w: rms_norm(x, w, eps=EPS)), penalty(plain_norm)):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("used", ["y", "h", "both"])
@pytest.mark.parametrize("shape", [(4, 8), (512, 256)], ids=["plain", "compiled"])
def test_either_output_may_be_left_unused(shape, used):
    inputs = leaves(shape, shape, shape[-1:])
    dy, dh = torch.randn(shape), torch.randn(shape)

    def loss(y, h):
        terms = {"y": y * dy, "h": h * dh, "both": y * dy + h * dh}
        return terms[used].sum()

    ours = torch.autograd.grad(loss(*add_rms_norm(*inputs, eps=EPS)), inputs, allow_unused=True)
    h = inputs[0] + inputs[1]
    eager = torch.autograd.grad(loss(plain_norm(h, inputs[2]), h), inputs, allow_unused=True)
    for a, b in zip(ours, eager):
        assert (a is None) == (b is None)
        if b is not None:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_a_gradient_of_h_alone_needs_no_kernel():
    inputs = leaves((4, 8), (4, 8), (8,))
    _, h = add_rms_norm(*inputs, eps=EPS)
    with Calls() as calls:
        torch.autograd.grad(h.sum(), inputs[:2])
    assert calls.names == []


@pytest.mark.parametrize("wanted", list(itertools.product([True, False], repeat=3)))
def test_only_what_needs_a_gradient_gets_one(wanted):
    inputs = leaves((4, 8), (4, 8), (8,))
    for tensor, want in zip(inputs, wanted):
        tensor.requires_grad_(want)
    y, h = add_rms_norm(*inputs, eps=EPS)
    assert y.requires_grad == any(wanted) and h.requires_grad == any(wanted[:2])
    if not any(wanted):
        return
    with Calls() as calls:
        (y.square().sum() + h.sum()).backward()
    ((name, _, kwargs),) = calls.seen
    assert name == "rms_norm_bwd" and kwargs["need_dweight"] == wanted[2]
    assert [t.grad is not None for t in inputs] == list(wanted)


def test_a_frozen_weight_gets_no_gradient():
    x, weight = leaves((4, 8), (8,))
    with Calls() as calls:
        rms_norm(x, weight.requires_grad_(False), eps=EPS).sum().backward()
    assert calls.seen[-1][2]["need_dweight"] is False
    assert x.grad is not None and weight.grad is None


@pytest.mark.parametrize("shape", [(64, 64), (512, 512)], ids=["plain", "compiled"])
@pytest.mark.parametrize("kind", ["expanded", "transposed", "sliced"])
def test_gradients_of_any_strides(kind, shape):
    inputs = leaves(shape, shape, shape[-1:])
    dy, dh = {
        "expanded": lambda: (torch.randn(()).expand(shape), torch.randn(shape[-1:]).expand(shape)),
        "transposed": lambda: (torch.randn(shape).t(), torch.randn(shape).t()),
        "sliced": lambda: torch.randn(shape[0], 2 * shape[1]).chunk(2, -1),
    }[kind]()
    y, h = add_rms_norm(*inputs, eps=EPS)
    ours = torch.autograd.grad((y, h), inputs, (dy, dh))
    h = inputs[0] + inputs[1]
    eager = torch.autograd.grad((plain_norm(h, inputs[2]), h), inputs, (dy, dh))
    for a, b in zip(ours, eager):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_retained_graph():
    x, weight = leaves((4, 8), (8,))
    y = rms_norm(x, weight, eps=EPS).square().sum()
    first = torch.autograd.grad(y, (x, weight), retain_graph=True)
    second = torch.autograd.grad(y, (x, weight))
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y, x)


# ------------------------------------------------------------------------ shapes and dtypes

MIXED = [
    (BF16, BF16, FP32),
    (BF16, FP32, BF16),
    (FP32, BF16, BF16),
    (FP16, FP16, FP32),
    (FP16, BF16, FP32),
    (FP32, FP32, BF16),
    (FP64, FP32, FP32),
]


@pytest.mark.parametrize(
    "shape, dtypes",
    [((4, 8), dtypes) for dtypes in MIXED] + [((512, 256), dtypes) for dtypes in MIXED[:3]],
    ids=lambda value: "-".join(str(part).removeprefix("torch.") for part in value),
)
def test_mixed_dtypes(shape, dtypes):
    x, residual, weight = inputs = [
        torch.randn(s).to(d).requires_grad_() for s, d in zip((shape, shape, shape[-1:]), dtypes)
    ]
    wide = FP64 if FP64 in dtypes else FP32
    attributes = {"eps": EPS, "compute_dtype": str(wide)[6:], "unit_dtype": "input"}
    y, h = add_rms_norm(*inputs, **attributes)
    s = (x + residual).to(wide)
    unit = (s * torch.rsqrt(s.pow(2).mean(-1, keepdim=True) + EPS)).to(h.dtype)
    expected = unit * weight
    assert h.dtype == (x + residual).dtype and torch.equal(h, x + residual)
    step = torch.finfo(h.dtype).eps  # an element may be rounded the other way
    torch.testing.assert_close(y, expected, rtol=max(step, 1e-5), atol=1e-5)
    grads = torch.autograd.grad((y, h), inputs, (torch.ones_like(y), torch.ones_like(h)))
    others = torch.autograd.grad((expected, s), inputs, (torch.ones_like(y), torch.ones_like(s)))
    assert [g.dtype for g in grads] == list(dtypes)
    for a, b, tensor in zip(grads, others, inputs):
        bound = 0.02 if BF16 in dtypes or FP16 in dtypes else 1e-4
        torch.testing.assert_close(a, b, rtol=bound, atol=bound * b.abs().max().item())
        assert a.shape == tensor.shape


@pytest.mark.parametrize(
    "x, residual",
    [((2, 3, 8), (8,)), ((2, 3, 8), (1, 3, 8)), ((8,), (2, 3, 8)), ((2, 1, 8), (1, 3, 8)),
     ((2, 3, 8), (2, 3, 1)), ((2, 3, 1), (8,)), ((2, 3, 8), ())],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("forward, backward", SIDES)
def test_operands_that_broadcast(x, residual, forward, backward):
    inputs = leaves(x, residual, (8,))
    y, h = add_rms_norm(*inputs, eps=EPS, forward=forward, backward=backward)
    dy, dh = torch.randn(y.shape), torch.randn(y.shape)
    ours = torch.autograd.grad((y, h), inputs, (dy, dh))
    expected = inputs[0] + inputs[1]
    eager = torch.autograd.grad((plain_norm(expected, inputs[2]), expected), inputs, (dy, dh))
    assert torch.equal(h, expected)
    for a, b in zip(ours, eager):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(1,), (3, 8), (3, 1), ()], ids=str)
def test_a_weight_of_another_shape_is_broadcast(shape):
    x, residual, weight = inputs = leaves((2, 3, 8), (2, 3, 8), shape)
    y, _ = add_rms_norm(*inputs, eps=EPS)
    torch.testing.assert_close(y, plain_norm(x + residual, weight))
    grads = torch.autograd.grad(y.square().sum(), inputs)
    others = torch.autograd.grad(plain_norm(x + residual, weight).square().sum(), inputs)
    for a, b in zip(grads, others):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(rms_norm(x, weight, eps=EPS), plain_norm(x, weight))


def test_outputs_are_fresh_and_inputs_untouched():
    for shape in ((4, 8), (512, 256)):
        x, residual, weight = (torch.randn(s) for s in (shape, shape, shape[-1:]))
        before = [t.clone() for t in (x, residual, weight)]
        y, h, rstd = FXFUSE.add_rms_norm_fwd.default(x, residual, weight, eps=EPS)
        dh, dw = FXFUSE.rms_norm_bwd.default([y], h, weight, rstd, x, need_dweight=True)
        places = {t.data_ptr() for t in (x, residual, weight, y, h, rstd, dh, dw)}
        assert len(places) == 8
        assert all(torch.equal(a, b) for a, b in zip((x, residual, weight), before))


# ------------------------------------------------------------------- modes and transforms


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("shape", [(4, 8), (512, 256)], ids=["plain", "compiled"])
def test_without_gradients(mode, shape):
    inputs = leaves(shape, shape, shape[-1:])
    expected = add_rms_norm(*inputs, eps=EPS)
    with mode():
        results = add_rms_norm(*inputs, eps=EPS)
    for a, b in zip(results, expected):
        assert torch.equal(a, b) and not a.requires_grad and b.requires_grad


@pytest.mark.parametrize("side", ["kernel", "inline"])
def test_transforms(side):
    x, residual, weight = (torch.randn(s, dtype=FP64) for s in ((3, 8), (3, 8), (8,)))
    attributes = {"eps": EPS, "compute_dtype": "float64", "forward": side, "backward": side}
    scale = torch.arange(8)

    def ours(x, w=weight):
        return rms_norm(x, w, **attributes) + add_rms_norm(x, residual, w, **attributes)[0]

    def eager(x, w=weight):
        return plain_norm(x, w) + plain_norm(x + residual, w)

    def results(f):
        yield torch.func.grad(lambda x: (f(x) * scale).sum())(x)
        yield torch.func.hessian(lambda x: (f(x) * scale).sum())(x)
        yield torch.func.jacrev(f)(x)
        yield torch.func.jvp(f, (x,), (residual,))[1]
        yield torch.func.vmap(f)(torch.stack([x, 2 * x]))
        yield torch.func.vmap(f, (None, 0))(x, torch.stack([weight, -weight]))
        yield torch.func.vmap(torch.func.grad(lambda x: f(x).sum()))(torch.stack([x, 2 * x]))
        with forward_ad.dual_level():
            tangent = forward_ad.unpack_dual(f(forward_ad.make_dual(x, residual))).tangent
        yield tangent

    for a, b in zip(results(ours), results(eager)):
        assert b.abs().max() > 0
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("cache", [True, False])
def test_autocast_leaves_the_ops_alone(cache):
    x, weight = leaves((4, 8), (8,))
    with torch.autocast("cpu", dtype=BF16, cache_enabled=cache):
        y = rms_norm(x, weight, eps=EPS)
    assert torch.equal(y, rms_norm(x, weight, eps=EPS)) and y.dtype == FP32


# ------------------------------------------------------------------------------ compilers


class Block(torch.nn.Module):
    def __init__(self, width=8, **attributes):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(width) + 0.5)
        self.attributes = {"eps": EPS, **attributes}

    def forward(self, x, residual):
        y, h = add_rms_norm(x * 2, residual, self.weight, **self.attributes)
        return F.silu(y), h + rms_norm(h, self.weight, **self.attributes)


def train(model, block, shape=(4, 8)):
    torch.manual_seed(1)
    x, residual = leaves(shape, shape)
    block.zero_grad()
    y, h = model(x, residual)
    (y.square().sum() + h.square().sum()).backward()
    return y, h, x.grad, residual.grad, block.weight.grad


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("forward, backward", SIDES)
def test_compiled_training(forward, backward, backend):
    torch._dynamo.reset()
    block = Block(forward=forward, backward=backward)
    compiled_block = torch.compile(block, backend=backend, fullgraph=True)
    for a, b in zip(train(compiled_block, block), train(block, block)):
        torch.testing.assert_close(a, b)


def test_the_compiled_kernel_op_may_compile_its_own_code():
    """The op calls a function that Inductor compiled from code that Inductor compiled."""
    torch._dynamo.reset()
    block = Block(width=256)
    compiled_block = torch.compile(block, backend="inductor", fullgraph=True)
    results = zip(train(compiled_block, block, (512, 256)), train(block, block, (512, 256)))
    for a, b in results:
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def graphs_of(block, mode):
    """The targets in the graphs that AOTAutograd makes of a block: forward, then backward."""
    graphs = []

    def keep(graph_module, _):
        graphs.append([str(n.target) for n in graph_module.graph.nodes if n.op == "call_function"])
        return graph_module.forward

    torch._dynamo.reset()
    model = torch.compile(block, backend=aot_autograd(fw_compiler=keep), fullgraph=True)
    with mode():
        x, residual = torch.randn(4, 8), torch.randn(4, 8)
        y, h = model(x, residual)
        if y.requires_grad:
            (y.sum() + h.sum()).backward()
    return graphs


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("forward, backward", SIDES)
def test_what_compilers_see(forward, backward, mode):
    graphs = graphs_of(Block(forward=forward, backward=backward), mode)
    expected = [["fxfuse.add_rms_norm_fwd.default", "fxfuse.rms_norm_fwd.default"]]
    if forward == "inline":
        expected = [[]]
        assert "aten.rsqrt.default" in graphs[0]
    if mode is torch.enable_grad:
        expected.append(["fxfuse.rms_norm_bwd.default"] * (2 if backward == "kernel" else 0))
    assert [[t for t in targets if "fxfuse" in t] for targets in graphs] == expected


@pytest.mark.parametrize("side", ["kernel", "inline"])
def test_one_compilation_for_any_number_of_rows(side):
    torch._dynamo.reset()
    block = Block(forward=side, backward=side)
    counter = CompileCounterWithBackend("aot_eager")
    model = torch.compile(block, backend=counter, fullgraph=True, dynamic=True)
    compilations = set()
    for rows in (4, 7, 32, 64, 33):
        for a, b in zip(train(model, block, (rows, 8)), train(block, block, (rows, 8))):
            torch.testing.assert_close(a, b)
        compilations.add(counter.frame_count)
    assert len(compilations) == 1


@pytest.mark.parametrize("side", ["kernel", "inline"])
def test_export_keeps_the_outer_op(side):
    block = Block(forward=side, backward=side)
    arguments = (torch.randn(4, 8), torch.randn(4, 8))
    program = torch.export.export(block, arguments, strict=False)
    targets = [n.target for n in program.graph.nodes]
    assert targets.count(add_rms_norm) == targets.count(rms_norm) == 1
    lowered = program.run_decompositions()
    kept = [str(n.target) for n in lowered.graph.nodes if "fxfuse" in str(n.target)]
    inner = ["fxfuse.add_rms_norm_fwd.default", "fxfuse.rms_norm_fwd.default"]
    assert kept == (inner if side == "kernel" else [])
    for module in (program.module(), lowered.module()):
        for a, b in zip(module(*arguments), block(*arguments)):
            torch.testing.assert_close(a, b)


# --------------------------------------------------------------- the compiled CPU formulas


def test_the_cpu_formula_is_compiled_once_for_any_number_of_rows():
    torch._dynamo.utils.counters.clear()
    weight = torch.randn(320)
    seen = []
    for rows in (512, 1024, 2048, 640):
        rms_norm(torch.randn(rows, 320), weight, eps=EPS)
        seen.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert len(set(seen)) == 1
    assert any("320" in str(key) and function for key, function in compiled._functions.items())


@pytest.fixture
def no_compiler(monkeypatch):
    def failing(*_):
        def run(*_, **__):
            raise RuntimeError("no C++ compiler\nand more")

        return run

    monkeypatch.setattr(compiled, "_functions", {})
    monkeypatch.setattr(compiled, "_compile", failing)
    monkeypatch.setattr(compiled, "_warned", False)


@pytest.fixture
def messages():
    """What the package has logged."""
    seen = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())
    logger = logging.getLogger("fxfuse")
    logger.addHandler(handler)
    yield seen
    logger.removeHandler(handler)


def test_without_a_compiler_the_plain_formula_runs(no_compiler, messages):
    x, weight = leaves((512, 256), (256,))
    for _ in range(2):
        y = rms_norm(x, weight, eps=EPS)
        y.sum().backward()
    torch.testing.assert_close(y, plain_norm(x, weight))
    (message,) = messages
    assert "no C++ compiler" in message and "and more" not in message


def test_the_plain_formula_runs_inside_another_compilation(monkeypatch):
    monkeypatch.setattr(compiled, "_run", None)
    x = torch.randn(512, 256)
    with torch._guards.tracing(torch._guards.TracingContext(None)):
        y, _ = FXFUSE.rms_norm_fwd.default(x, None, eps=EPS)
    torch.testing.assert_close(y, plain_norm(x, 1))
