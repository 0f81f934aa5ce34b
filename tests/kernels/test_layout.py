"""Where the outputs lie in memory: as in eager code, and as the fake implementations say."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.library import opcheck
from torch.nn import functional as F

from fxfuse.kernels import compiled, ops  # noqa: F401

FXFUSE = torch.ops.fxfuse
rms_norm, add_rms_norm = FXFUSE.rms_norm.default, FXFUSE.add_rms_norm.default
BF16 = torch.bfloat16
EPS = 1e-6

LAYOUTS = {
    "contiguous": lambda: torch.randn(2, 3, 4, 8),
    "transposed": lambda: torch.randn(2, 4, 3, 8).transpose(1, 2),
    "reversed": lambda: torch.randn(4, 3, 2, 8).permute(2, 1, 0, 3),
    "sliced": lambda: torch.randn(2, 3, 4, 20)[..., :8],
    "transposed and sliced": lambda: torch.randn(2, 4, 3, 20)[..., :8].transpose(1, 2),
    "fewer rows": lambda: torch.randn(2, 9, 4, 8)[:, ::3],
    "expanded": lambda: torch.randn(3, 1, 8).expand(2, 3, 4, 8),
    "expanded columns": lambda: torch.randn(2, 3, 4, 1).expand(2, 3, 4, 8),
    "columns first": lambda: torch.randn(2, 3, 8, 4).transpose(2, 3),
    "every other column": lambda: torch.randn(2, 3, 4, 16)[..., ::2],
    "one batch": lambda: torch.randn(1, 4, 3, 8).transpose(1, 2),
    "one row": lambda: torch.randn(1, 1, 8),
    "odd strides": lambda: torch.randn(3, 8, 1).transpose(1, 2),
    "odd strides of one": lambda: torch.randn(8, 1, 1).permute(1, 2, 0),
    "one column": lambda: torch.randn(3, 5, 1).transpose(0, 1),
    "one dim": lambda: torch.randn(8),
    "one dim strided": lambda: torch.randn(16)[::2],
    "empty": lambda: torch.randn(4, 0, 8).transpose(0, 1),
    "no columns": lambda: torch.randn(4, 3, 0).transpose(0, 1),
}
DENSE = ("contiguous", "transposed", "reversed", "columns first", "one batch", "one dim")
layouts = pytest.mark.parametrize("layout", LAYOUTS)
either = pytest.mark.parametrize("contiguous", [False, True])


def check_fake(op, arguments, attributes):
    opcheck(op, arguments, attributes, test_utils=("test_schema", "test_faketensor"))


def spelt_out(h, weight):
    return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS) * weight


def strides(*tensors):
    """The strides that matter, those of the dims that have several elements."""
    return [[s for s, size in zip(t.stride(), t.shape) if size > 1 and t.numel()] for t in tensors]


# -------------------------------------------------------------- real and fake strides agree


@either
@layouts
def test_fake_strides_of_the_norm(layout, contiguous):
    h = LAYOUTS[layout]()
    attributes = {"eps": EPS, "contiguous": contiguous}
    check_fake(FXFUSE.rms_norm_fwd.default, (h, torch.randn(h.shape[-1])), attributes)
    y, _ = FXFUSE.rms_norm_fwd.default(h, None, **attributes)
    expected = torch.empty(h.shape) if contiguous else torch.empty_like(h)
    assert strides(y) == strides(expected)


@either
@pytest.mark.parametrize("other", ["like x", "contiguous", "one row for all"])
@layouts
def test_fake_strides_of_the_sum(layout, other, contiguous):
    x = LAYOUTS[layout]()
    residual = {
        "like x": LAYOUTS[layout],
        "contiguous": lambda: torch.randn(x.shape).to(BF16),
        "one row for all": lambda: torch.randn(x.shape[-1:]).expand(x.shape),
    }[other]()
    weight, attributes = torch.randn(x.shape[-1]), {"eps": EPS, "contiguous": contiguous}
    check_fake(FXFUSE.add_rms_norm_fwd.default, (x, residual, weight), attributes)
    y, h, _ = FXFUSE.add_rms_norm_fwd.default(x, residual, weight, **attributes)
    expected = x + residual
    assert torch.equal(h, expected) and h.stride() == expected.stride()
    expected = torch.empty(h.shape) if contiguous else torch.empty_like(h)
    assert strides(y) == strides(expected)


@layouts
def test_fake_strides_of_the_gradient(layout):
    h, dres = LAYOUTS[layout](), LAYOUTS[layout]()
    weight = torch.randn(h.shape[-1])
    _, rstd = FXFUSE.rms_norm_fwd.default(h, weight, eps=EPS)
    arguments = ([torch.randn(h.shape), dres], h, weight, rstd, dres)
    check_fake(FXFUSE.rms_norm_bwd.default, arguments, {"need_dweight": True})
    dh, _ = FXFUSE.rms_norm_bwd.default(*arguments, need_dweight=True)
    assert strides(dh) == strides(torch.empty_like(h))


@either
@pytest.mark.parametrize("side", ["kernel", "inline"])
@pytest.mark.parametrize("layout", ["transposed", "transposed and sliced", "expanded"])
def test_opcheck_of_the_outer_ops(layout, side, contiguous):
    x, residual = (LAYOUTS[layout]().requires_grad_() for _ in range(2))
    attributes = {"eps": EPS, "contiguous": contiguous, "forward": side, "backward": side}
    opcheck(rms_norm, (x, torch.randn(8)), attributes)
    opcheck(add_rms_norm, (x, residual, torch.randn(8)), attributes)


# ------------------------------------------------------------------ eager and fused agree


@pytest.fixture(params=["plain", "compiled"])
def path(request, monkeypatch):
    """Also small inputs are compiled where a test asks for it."""
    if request.param == "compiled":
        monkeypatch.setattr(compiled, "SMALLEST", 1)


@pytest.mark.parametrize("side", ["kernel", "inline"])
@pytest.mark.parametrize("layout", DENSE)
def test_strides_are_those_of_eager(layout, side, path):
    x, residual = (LAYOUTS[layout]().requires_grad_() for _ in range(2))
    weight = torch.randn(x.shape[-1])
    sides = {"eps": EPS, "forward": side, "backward": side}
    h = x + residual
    eager = (spelt_out(x, weight), spelt_out(h, weight), h)
    ours = (rms_norm(x, weight, **sides), *add_rms_norm(x, residual, weight, **sides))
    for a, b in zip(ours, eager):
        assert strides(a) == strides(b)
        torch.testing.assert_close(a, b)
    (dx,) = torch.autograd.grad(ours[0], x, torch.randn_like(x))
    assert strides(dx) == strides(x)


@pytest.mark.parametrize("side", ["kernel", "inline"])
@pytest.mark.parametrize("layout", DENSE)
def test_a_contiguous_output_is_that_of_a_whole_norm(layout, side, path):
    x, residual = LAYOUTS[layout](), LAYOUTS[layout]()
    weight = torch.randn(x.shape[-1])
    attributes = {"eps": EPS, "contiguous": True, "forward": side}
    for y, h in (
        (rms_norm(x, weight, **attributes), x),
        add_rms_norm(x, residual, weight, **attributes),
    ):
        expected = F.rms_norm(h, h.shape[-1:], weight, EPS)
        assert expected.is_contiguous() and strides(y) == strides(expected)
        torch.testing.assert_close(y, expected)


@pytest.mark.parametrize("layout", ["transposed", "reversed", "one batch"])
def test_dense_rows_are_not_copied(layout, monkeypatch):
    """The formula is given the rows as they lie, and its outputs are returned as they are."""
    seen = []
    for name in ("rms_norm", "add_rms_norm", "rms_norm_bwd"):
        function = getattr(compiled, name)

        def spy(*arguments, function=function, **attributes):
            results = function(*arguments, **attributes)
            tensors = [t for t in arguments if isinstance(t, torch.Tensor)]
            seen.append(([t.data_ptr() for t in tensors], [t.is_contiguous() for t in tensors]))
            seen[-1][0].extend(t.data_ptr() for t in results)
            return results

        monkeypatch.setattr(compiled, name, spy)
    x, residual, weight = LAYOUTS[layout](), LAYOUTS[layout](), torch.randn(8)
    y, h, rstd = FXFUSE.add_rms_norm_fwd.default(x, residual, weight, eps=EPS)
    assert {t.data_ptr() for t in (x, residual, y, h, rstd)} <= set(seen[-1][0])
    y, rstd = FXFUSE.rms_norm_fwd.default(x, weight, eps=EPS)
    assert {t.data_ptr() for t in (x, y, rstd)} <= set(seen[-1][0])
    dh, _ = FXFUSE.rms_norm_bwd.default([y], x, weight, rstd, residual, need_dweight=True)
    assert {t.data_ptr() for t in (x, rstd, residual, dh)} <= set(seen[-1][0])
    assert all(all(whole) for _, whole in seen)


class Heads(torch.nn.Module):
    """Norms of single heads, whose outputs are viewed as whole rows again."""

    def __init__(self, side):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(8) + 0.5)
        self.attributes = {"eps": EPS, "forward": side, "backward": side}

    def forward(self, x, residual):
        q, k = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in (x * 2, residual))
        y = rms_norm(q, self.weight, **self.attributes)
        z, h = add_rms_norm(q, k, self.weight, **self.attributes)
        return [t.transpose(1, 2).view(x.shape) for t in (y, z, h)]


@pytest.mark.parametrize(
    "backend, side",
    [("eager", "kernel"), ("eager", "inline"), ("aot_eager", "kernel"), ("aot_eager", "inline"),
     ("inductor", "kernel")],
)  # fmt: skip
@pytest.mark.parametrize("dynamic", [False, True])
def test_heads_are_viewed_as_rows_again(backend, side, dynamic):
    torch._dynamo.reset()
    heads = Heads(side)
    inputs = [torch.randn(2, 3, 16, requires_grad=True) for _ in range(2)]
    model = torch.compile(heads, backend=backend, fullgraph=True, dynamic=dynamic)
    q, k = (t.view(2, 3, 2, 8) for t in (inputs[0] * 2, inputs[1]))
    h = q + k
    expected = [
        t.view(2, 3, 16) for t in (spelt_out(q, heads.weight), spelt_out(h, heads.weight), h)
    ]
    results = model(*inputs)
    for a, b in zip(results, expected):
        torch.testing.assert_close(a, b)
    ours, eager = (torch.autograd.grad(sum(map(torch.sum, r)), inputs) for r in (results, expected))
    for a, b in zip(ours, eager):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("side", ["kernel", "inline"])
def test_layouts_need_no_guards_on_sizes(side):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    heads = Heads(side)
    model = torch.compile(heads, backend=counter, fullgraph=True, dynamic=True)
    compilations = set()
    for batch, length in ((2, 3), (3, 2), (4, 32), (32, 7)):
        inputs = [torch.randn(batch, length, 16, requires_grad=True) for _ in range(2)]
        results = model(*inputs)
        for a, b in zip(results, heads(*inputs)):
            torch.testing.assert_close(a, b)
        sum(map(torch.sum, results)).backward()
        compilations.add(counter.frame_count)
    assert len(compilations) == 1
