"""Writes, hooks and moves that are easy to overlook: each gave a wrong number without its guard."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.testing
from torch import fx, nn

import fxfuse
from fxfuse.errors import BadExampleInputs
from tests.dialects import DIALECTS, compiled
from tests.engine.test_guard import N, check, flat, inputs, reasons, rms


class Leaf(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.norm = nn.RMSNorm(N, **options)
        self.w = nn.Parameter(torch.linspace(0.5, 1.5, N))


def compiled_like_eager(model, inner="eager"):
    """Compile, compare outputs and gradients with eager's, return the report."""
    torch._dynamo.reset()
    results = []
    with fxfuse.record() as reports:
        for run in (torch.compile(model, backend=fxfuse.make_backend(inner)), model):
            leaves = [a.requires_grad_() for a in inputs()]
            outs = run(*leaves)
            sum(o.square().sum() for o in outs).backward()
            results.append([*outs, *(leaf.grad for leaf in leaves)])
    for got, want in zip(*results):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    return fxfuse.Report.merge(reports)


def test_leaf_module_that_writes():
    class Model(Leaf):
        def __init__(self):
            super().__init__()
            self.act = nn.ReLU(inplace=True)

        def forward(self, x, r):
            x = x * 2
            h = x + r
            a = self.act(x)
            return self.norm(h), a

    report = check(Model(), inputs((4, N), (4, N)))
    assert report.counts == {"rms_norm": 1} and "is written by act" in reasons(report)


def test_functional_that_writes():
    def model(x, r, w):
        x = x * 2
        h = x + r
        torch.nn.functional.relu(x, True)
        return rms(h, w), x

    assert check(model, inputs()).counts == {"rms_norm": 1}


def test_foreach_writes_to_a_list():
    def model(x, r, w):
        x = x * 2
        h = x + r
        torch._foreach_add_([x], 1.0)
        return rms(h, w), x

    assert check(model, inputs()).counts == {"rms_norm": 1}


def increment(x):
    x.add_(1)


def test_custom_op_that_writes():
    with torch.library._scoped_library("fxfuse_test", "DEF") as library:
        library.define("inc(Tensor(a!) x) -> ()")
        library.impl("inc", increment, "CompositeExplicitAutograd")

        def model(x, r, w):
            x = x * 2
            h = x + r
            torch.ops.fxfuse_test.inc(x)
            return rms(h, w), x

        gm = fxfuse.apply(fx.symbolic_trace(model), policy="always")
        assert gm.meta["fxfuse"].counts == {"rms_norm": 1}
        for got, want in zip(gm(*inputs()), model(*inputs())):
            torch.testing.assert_close(got, want)


def test_checkpointed_body_that_writes():
    def body(a):
        a.add_(1)
        return a * 2

    def model(x, r, w):
        x = x * 2
        h = x + r
        z = torch.utils.checkpoint.checkpoint(body, x, use_reentrant=False)
        return rms(h, w), z

    with torch.no_grad():
        torch._dynamo.reset()
        with fxfuse.record() as reports:
            got = torch.compile(model, backend=fxfuse.make_backend("eager"))(*inputs())
        for one, other in zip(got, model(*inputs())):
            torch.testing.assert_close(one, other)
    assert "add_rms_norm" not in fxfuse.Report.merge(reports).counts


def test_nested_graph_module_that_writes():
    class Inner(nn.Module):
        def forward(self, a):
            return a.add_(1) * 2

    class Model(Leaf):
        def __init__(self):
            super().__init__()
            self.inner = fx.symbolic_trace(Inner())

        def forward(self, x, r):
            x = x * 2
            h = x + r
            return self.inner(x), self.norm(h)

    class Tracer(fx.Tracer):
        def is_leaf_module(self, module, name):
            return isinstance(module, fx.GraphModule) or super().is_leaf_module(module, name)

    model = Model()
    gm = fxfuse.apply(fx.GraphModule(model, Tracer().trace(model)))
    assert gm.meta["fxfuse"].counts == {"rms_norm": 1}
    for got, want in zip(gm(*inputs()[:2]), model(*inputs()[:2])):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_what_a_moved_weight_reads_is_written_in_between(inner):
    def model(a, b, w):
        x, r, v = a * 2, b * 2, w * 1.5
        h = x + r
        z = h * 2
        v.mul_(2)
        return rms(h) * (v / 3), z

    compiled_like_eager(model, inner)


def test_weight_of_a_leaf_module_is_written_in_between():
    class Model(Leaf):
        def forward(self, a, b):
            x, r = a * 2, b * 2
            h = x + r
            z = h * 2
            self.norm.weight.mul_(2)
            return self.norm(h), z

    model = Model().requires_grad_(False)
    gm = fx.symbolic_trace(model)
    first = [t.clone() for t in gm(*inputs()[:2])]
    model.norm.weight.div_(2)
    fxfuse.apply(gm)
    for got, want in zip(gm(*inputs()[:2]), first):
        torch.testing.assert_close(got, want)


def test_view_that_einsum_returns():
    def model(x, r, w):
        x = x * 2
        view = torch.einsum("ij->ji", x)
        h = x + r
        view.mul_(2)
        return rms(h, w), x

    assert check(model, inputs()).counts == {"rms_norm": 1}


def test_out_of_inner_steps_is_kept():
    class Model(Leaf):
        def __init__(self):
            super().__init__()
            self.register_buffer("b", torch.zeros(4, N))

        def forward(self, x):
            mean = torch.pow(x, 2, out=self.b).mean(-1, keepdim=True)
            return self.b, x * torch.rsqrt(mean + 1e-6)

    gm = fxfuse.apply(fx.symbolic_trace(Model()))
    (x,) = inputs((4, N))
    assert torch.equal(gm(x)[0], x.square())


def test_hooks_and_replaced_forwards():
    class Hooked(Leaf):
        def __init__(self):
            super().__init__()
            self.identity = nn.Identity()
            self.identity.register_forward_hook(lambda module, args, out: out * 3)

        def forward(self, x, r):
            h = self.identity(x + r)
            return h, self.norm(h)

    class Patched(Leaf):
        def __init__(self):
            super().__init__()
            old = self.norm.forward
            self.norm.forward = lambda x: old(x) * 2

        def forward(self, x, r):
            return self.norm(x + r)

    assert check(Hooked(), inputs((4, N), (4, N))).counts == {"rms_norm": 1}
    report = check(Patched(), inputs((4, N), (4, N)))
    assert report.counts == {} and "a forward of its own" in reasons(report)


def test_subclass_of_rms_norm():
    class Doubled(nn.RMSNorm):
        def forward(self, x):
            return super().forward(x) * 2

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = Doubled(N)

        def forward(self, x):
            return self.norm(x)

    class Tracer(fx.Tracer):
        def is_leaf_module(self, module, name):
            return isinstance(module, nn.RMSNorm)

    model = Model()
    report = fxfuse.apply(fx.GraphModule(model, Tracer().trace(model))).meta["fxfuse"]
    assert report.counts == {} and "is a Doubled" in reasons(report)


def test_the_gradient_of_the_sum_is_watched():
    class Model(Leaf):
        def forward(self, x, r):
            h = x + r
            h.retain_grad()
            return self.norm(h), h

    gm, grads = fx.symbolic_trace(Model()), []
    for _ in range(2):
        x, r = (a.requires_grad_() for a in inputs((4, N), (4, N)))
        y, h = gm(x, r)
        (y.square().sum() + h.sum()).backward()
        grads.append(h.grad)
        fxfuse.apply(gm)
    torch.testing.assert_close(*grads)


def test_a_number_is_no_residual():
    def model(x, r, w):
        return rms(x + x.shape[0], w)

    x = torch.randn(5, N)
    torch._dynamo.reset()
    torch._dynamo.mark_dynamic(x, 0)
    with fxfuse.record() as reports:
        got = torch.compile(model, backend=fxfuse.make_backend("eager"))(x, *inputs()[1:])
    torch.testing.assert_close(got, model(x, *inputs()[1:]))
    assert fxfuse.Report.merge(reports).counts == {"rms_norm": 1}
    gm = fxfuse.apply(fx.symbolic_trace(lambda x, w: rms(x + x.size(0), w)))
    torch.testing.assert_close(gm(x, inputs()[2]), model(x, None, inputs()[2]))


def test_eps_attribute_under_dynamic_shapes():
    class Model(Leaf):
        def __init__(self):
            super().__init__(eps=1e-5)
            self.eps = 1e-6

        def forward(self, x, r):
            h = x + r
            y = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps) * self.w
            return self.norm(y + h)

    torch._dynamo.reset()
    model = Model()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    with fxfuse.record() as reports:
        compiled = torch.compile(model, backend=fxfuse.make_backend(counter), dynamic=True)
        for rows in (3, 5, 9):
            args = inputs((rows, N), (rows, N))
            torch.testing.assert_close(compiled(*args), model(*args))
    assert [r.counts for r in reports] == [{"add_rms_norm": 2}]


def test_example_inputs_leave_the_model_as_it_was():
    class Model(Leaf):
        def __init__(self):
            super().__init__()
            self.batch = nn.BatchNorm1d(N)

        def forward(self, x):
            return self.norm(self.batch(x))

    model = Model().train()
    gm = fx.symbolic_trace(model)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    fxfuse.apply(gm, inputs((4, N)))
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert gm.meta["fxfuse"].counts == {"rms_norm": 1}


def test_bad_example_inputs():
    gm = fx.symbolic_trace(lambda x, r: rms(x @ r))
    code = gm.code
    for bad in (inputs((4, N)), inputs((4, N), (3, 3)), [None, None]):
        with pytest.raises(BadExampleInputs, match="does not run on example_inputs"):
            fxfuse.apply(gm, bad)
    assert gm.code == code


def test_data_dependent_graphs_take_example_inputs():
    gm = fx.symbolic_trace(lambda x, r: rms(x[r > 0]))
    x = torch.randn(N)
    report = fxfuse.apply(gm, (x, torch.ones(N))).meta["fxfuse"]
    torch.testing.assert_close(gm(x, torch.ones(N)), rms(x))
    assert report.misses or report.counts


def test_arguments_by_name():
    def model(x, r, w):
        h = torch.add(input=x, other=r)
        mean = torch.mean(input=torch.pow(input=h, exponent=2), dim=-1, keepdim=True)
        unit = torch.mul(input=h, other=torch.rsqrt(input=torch.add(mean, other=1e-6)))
        return torch.mul(input=w, other=unit.type_as(other=x))

    assert check(model, inputs()).counts == {"add_rms_norm": 1}
    gm = fx.symbolic_trace(model)
    fxfuse.apply(gm)
    torch.testing.assert_close(gm(*inputs()), model(*inputs()))


def test_fuel_is_named_as_the_reason(monkeypatch):
    monkeypatch.setenv("FXFUSE_FUEL", "0")
    report = fxfuse.apply(fx.symbolic_trace(lambda x: rms(x))).meta["fxfuse"]
    assert report.counts == {} and "FXFUSE_FUEL has run out" in reasons(report)


def test_dropout_that_returns_its_input_is_no_fresh_tensor():
    """In an exported model that is not in training, whatever the schema of dropout says."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.drop = nn.RMSNorm(8), nn.Dropout(0.1)

        def forward(self, x, r):
            h = self.drop(x)
            h += r
            return self.norm(h) + x

    model, args = Model().eval(), (torch.randn(4, 8), torch.randn(4, 8))
    program = torch.export.export(model, tuple(a.clone() for a in args))
    fxfuse.apply(program)
    got = program.module()(*(a.clone() for a in args))
    torch.testing.assert_close(got, model(*(a.clone() for a in args)))


def test_what_an_out_argument_returns_is_no_fresh_tensor():
    def model(a, b, g):
        c = torch.empty_like(a)
        d = torch.add(a, b, out=c)
        d.mul_(torch.nn.functional.silu(g))
        return c + 1.0

    args = [torch.randn(4, 8) for _ in range(3)]
    gm = fxfuse.apply(fx.symbolic_trace(model), args)
    torch.testing.assert_close(gm(*args), model(*args))


# ---- a wider copy that is edited before it is normed: the op must not read the narrow one --------


def zeroed(h):
    h[:, 1:].zero_()


def clamped(h):
    h.clamp_(-0.5, 0.5)


def added_to(h):
    h[:, 1:].add_(1)


def filled(h):
    h.select(-1, 3).fill_(2)


def written_before(edit):
    def model(x, r):
        h = x.float()
        edit(h)
        return rms(h, torch.ones(N)), r

    return model


def written_between(edit):
    def model(x, r):
        h = x.float()
        root = torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
        edit(h.view(h.shape))
        return h * root, r

    return model


def sum_copied_and_written(edit):
    def model(x, r):
        s = x + r
        h = s.float()
        edit(h)
        return rms(h, torch.ones(N)), s

    return model


def gate_copied_and_written(edit):
    def model(x, r):
        g = r.float()
        edit(g)
        return x.float() * torch.nn.functional.silu(g), r

    return model


def source_written_after_the_copy(edit):
    def model(x, r):
        x = x * 1
        h = x.float()
        edit(x)
        return rms(h, torch.ones(N)), h, x

    return model


@pytest.mark.parametrize("dialect", ["symbolic_trace", "export", "make_fx", "dynamo"])
@pytest.mark.parametrize("edit", [zeroed, clamped, added_to, filled], ids=lambda e: e.__name__)
@pytest.mark.parametrize(
    "make",
    [written_before, written_between, sum_copied_and_written, gate_copied_and_written,
     source_written_after_the_copy],
    ids=lambda m: m.__name__,
)  # fmt: skip
def test_a_wider_copy_that_is_written(make, edit, dialect):
    class Model(nn.Module):
        def forward(self, x, r):
            return make(edit)(x, r)

    def operands():
        generator = torch.Generator().manual_seed(0)
        return tuple(torch.randn(4, N, generator=generator).bfloat16() for _ in range(2))

    if dialect == "dynamo":
        found, _ = compiled(Model(), operands())
    else:
        gm = fxfuse.apply(DIALECTS[dialect](Model(), operands()), operands())
        found = gm(*operands())
    for got, want in zip(flat(found), Model()(*operands())):
        torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)
