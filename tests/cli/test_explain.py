"""explain: the report is right, and the model is as it was."""

import copy

import pytest
import torch
from torch import nn

from fxfuse import errors
from fxfuse.report import Report
from fxfuse.trace import TRACING, explain


class Block(nn.Module):
    """Adds, norms and projects; counts its calls in a buffer and in Python."""

    def __init__(self, branch=False, width=32):
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.proj = nn.Linear(width, width)
        self.branch = branch
        self.calls = 0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x, residual):
        self.calls += 1
        self.seen += 1
        h = x + residual
        if self.branch and h.sum().item() > 1e9:
            h = h * 2
        return self.proj(self.norm(h)), h


class Stack(nn.Module):
    def __init__(self, depth, branch=False):
        super().__init__()
        self.layers = nn.ModuleList(Block(branch) for _ in range(depth))

    def forward(self, x, residual):
        for layer in self.layers:
            x, residual = layer(x, residual)
        return x


def pair(device=None):
    return torch.randn(2, 4, 32, device=device), torch.randn(2, 4, 32, device=device)


def config_of_dynamo():
    return torch._dynamo.config.get_config_copy()


@pytest.mark.parametrize("branch", [False, True], ids=["one graph", "pieces"])
def test_nothing_is_run_or_changed(branch):
    model, inputs = Stack(3, branch), pair()
    state = copy.deepcopy(model.state_dict())
    given = [t.clone() for t in inputs]
    random, config = torch.get_rng_state(), config_of_dynamo()
    report = explain(model, *inputs)
    assert sum(report.counts.values()) == 3
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name
    assert [layer.calls for layer in model.layers] == [0, 0, 0]
    assert all(torch.equal(a, b) for a, b in zip(inputs, given))
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), random)
    assert config_of_dynamo() == config


def test_sites_say_where_they_are():
    report = explain(Stack(2), *pair())
    assert report.counts == {"add_rms_norm": 2}
    assert [m.module for m in report.matches] == ["layers.0.norm", "layers.1.norm"]
    assert all("test_explain.py:" in m.where for m in report.matches)
    assert not report.misses


def test_broken_graph_counts_each_call_of_a_piece_and_says_where_it_breaks():
    report = explain(Stack(5, branch=True), *pair())
    assert report.counts == {"rms_norm": 5}  # the adds lie in other graphs
    (miss,) = [m for m in report.misses if m.pattern == TRACING]
    assert "breaks here" in miss.reason
    assert "test_explain.py:" in miss.where


def test_broken_graph_on_meta_says_where_tracing_ended():
    report = explain(Stack(2, branch=True).to("meta"), *pair("meta"))
    assert report.counts == {}
    assert "tracing ended here" in report.misses[-1].reason
    assert "test_explain.py:" in report.misses[-1].where


def test_meta_model_that_makes_tensors_as_it_runs():
    class Masked(Block):
        def forward(self, x, residual):
            return super().forward(x * torch.ones(32).cumsum(0), residual)

    report = explain(Masked().to("meta"), *pair("meta"))
    assert report.counts == {"add_rms_norm": 1}


def test_function_of_tensors():
    def f(x, residual, *, weight):
        h = x + residual
        return h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6) * weight

    assert explain(f, *pair(), weight=torch.ones(32)).counts == {"add_rms_norm": 1}


def test_closure_is_left_alone_when_pieces_run():
    model = Block(branch=True)

    def f(x, residual):
        return model(x, residual)[0]

    assert explain(f, *pair()).counts == {"rms_norm": 1}
    assert model.calls == 0 and model.seen == 0


def test_model_without_a_norm():
    report = explain(nn.Linear(32, 32), torch.ones(2, 32))
    assert isinstance(report, Report)
    assert report.counts == {} and not report.misses


def test_gradients_follow_grad_mode_unless_told(monkeypatch):
    seen = []

    def watching(gm, **options):
        seen.append(torch.is_grad_enabled())
        return Report()

    monkeypatch.setattr("fxfuse.trace.rewrite", watching)
    explain(Stack(1), *pair())
    with torch.no_grad():
        explain(Stack(1), *pair())
        explain(Stack(1), *pair(), train=True)
    explain(Stack(1), *pair(), train=False)
    assert seen == [True, False, True, False]
    assert torch.is_grad_enabled()


def test_target_and_policy_reach_the_sites():
    sides = {
        device: explain(Stack(1), *pair(), target=device).matches[0].policy
        for device in ("cpu", "sm_90")
    }
    assert sides["cpu"] != sides["sm_90"]
    assert explain(Stack(1), *pair(), policy="never").counts == {}
    assert explain(Stack(1), *pair(), patterns=["rms_norm"]).counts == {"rms_norm": 1}


@pytest.mark.parametrize("options", [{"patterns": ["rms_nrom"]}, {"policy": "perhaps"}])
def test_unknown_option_is_an_error_of_ours(options):
    with pytest.raises((errors.UnknownPattern, errors.BadOption)):
        explain(Stack(1), *pair(), **options)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_errors_of_the_model_are_raised_as_they_are(device):
    class Closed(Block):
        def forward(self, x, residual):
            if x.shape[0] == 2:
                raise KeyError("the shop is closed")
            return super().forward(x, residual)

    with pytest.raises(KeyError, match="the shop is closed"):
        explain(Closed().to(device), *pair(device))
    with pytest.raises(RuntimeError, match="32"):
        explain(Block().to(device), torch.randn(2, 4, 31, device=device), *pair(device)[:1])
    with pytest.raises(TypeError):
        explain(Block().to(device), *pair(device), *pair(device))


def test_compiled_functions_of_the_user_stay_compiled():
    compilations = []

    def backend(gm, example_inputs):
        compilations.append(gm)
        return gm

    class Branching(nn.Module):
        """Breaks, and holds no count of calls, on which Dynamo would compile anew each time."""

        def forward(self, x, residual):
            h = x + residual
            if h.sum().item() > 1e9:
                h = h * 2
            return nn.functional.rms_norm(h, (32,))

    model, inputs = Branching(), pair()
    compiled = torch.compile(model, backend=backend)
    compiled(*inputs)
    before = len(compilations)
    assert before == 2
    for _ in range(torch._dynamo.config.recompile_limit):
        explain(model, *inputs)
    explain(compiled, *inputs)
    compiled(*inputs)
    assert len(compilations) == before
    compiled(*(t[:1] for t in inputs))  # and others can still be made
    assert len(compilations) > before


def test_many_models_in_one_process():
    """Each trace has code of its own, so that no recompile limit is ever reached."""
    for width in range(8, 10 + torch._dynamo.config.recompile_limit):
        model = Block(width=width)
        x = torch.randn(2, width)
        assert explain(model, x, x).counts == {"add_rms_norm": 1}


def test_transformers_model():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        vocab_size=64,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    ids = torch.randint(64, (1, 16))
    with torch.no_grad():
        report = explain(model, input_ids=ids, use_cache=False)
    assert report.counts == {"add_rms_norm": 4, "rms_norm": 1, "silu_gate": 2}
    assert report.matches[-1].module == "model.norm" or "model.norm" in {
        m.module for m in report.matches
    }
