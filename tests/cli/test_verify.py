"""`fxfuse verify` as its users meet it, and targets with values."""

import json
import sys
import textwrap

import pytest
import torch

from fxfuse import architectures, cuts, errors, targets
from fxfuse.__main__ import main

SHOP = """
    import time

    import torch
    import torch.nn as nn

    print("the shop opens")

    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.norms = nn.ModuleList(nn.RMSNorm(16, 1e-6) for _ in range(2))
            self.drop = nn.Dropout(0.5)

        def forward(self, x, residual):
            for norm in self.norms:
                residual = x + residual
                x = self.drop(norm(residual)).sin()
            return x

    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.norm = nn.Embedding(7, 16), nn.RMSNorm(16)

        def forward(self, ids, attention_mask=None):
            return self.norm(self.embedding(ids))

    class Drifts(Stack):
        def forward(self, x, residual):
            return super().forward(x, residual) * time.perf_counter_ns()

    def build():
        return Stack()

    def build_with_inputs():
        return Stack(), (torch.ones(2, 16), torch.randn(2, 16))

    def words():
        return Words(), (), {"ids": torch.zeros(1, 3, dtype=torch.int64)}

    def drifts():
        return Drifts(), (torch.ones(2, 16), torch.randn(2, 16))

    def on_meta():
        return Stack().to("meta"), (torch.ones(2, 16), torch.randn(2, 16))

    def broken():
        return Stack(), (torch.ones(2, 16), torch.randn(2, 7))
    """
WRONG = """
    import dataclasses

    import fxfuse
    from fxfuse import match, registry
    from fxfuse.match import Call

    right = registry.patterns()["add_rms_norm"]

    @fxfuse.pattern("wrong_eps", right.expression, keep=right.keep, size=100)
    def build(b):
        call = right.build(b)
        if isinstance(call, Call) and "norms.1" in str(b.root.meta["nn_module_stack"]):
            call.kwargs["eps"] = 0.1
        return call
    """


@pytest.fixture(autouse=True)
def shop(tmp_path, monkeypatch):
    """A folder with a model file, and the process as it was afterwards."""
    from fxfuse import registry

    registry.patterns()
    monkeypatch.setattr(registry, "_KNOWN", dict(registry._KNOWN))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shop.py").write_text(textwrap.dedent(SHOP))
    (tmp_path / "wrong.py").write_text(textwrap.dedent(WRONG))
    seeds = torch.get_rng_state()
    yield
    torch.set_rng_state(seeds)
    for name in ("shop", "fxfuse_patterns_wrong"):
        sys.modules.pop(name, None)
    torch._logging.set_logs()


def lines(capsys, *arguments):
    code = main(["verify", *arguments])
    out, err = capsys.readouterr()
    return code, out.splitlines(), err.splitlines()


def test_a_good_model(capsys):
    code, out, _ = lines(capsys, "shop.py:build_with_inputs", "--policy", "always")
    assert code == 0
    assert out[0] == "good: fxfuse in front of aot_eager, policy always, forward and backward"
    assert "   2 x fxfuse::add_rms_norm (kernel)" in out
    assert any(line.split()[1:4] == ["add_rms_norm", "norms.0", "shop.py:17"] for line in out)
    assert any(line.startswith("gradients: 2, of which 0 differ") for line in out)
    assert max(map(len, out)) <= 80


def test_a_wrong_pattern_of_a_file(capsys):
    arguments = ("shop.py:build_with_inputs", "--patterns", "wrong.py", "--inner", "eager")
    code, out, err = lines(capsys, *arguments)
    assert code == 1 and err == ["the shop opens"]
    text = "\n".join(out)
    assert out[0].startswith("not good")
    assert "first site that differs: wrong_eps, norms.1, shop.py:17" in text
    assert "FXFUSE_FUEL=1 is the least with which it is rewritten" in text
    right = ("--inner", "eager", "--pattern", "add_rms_norm")
    assert lines(capsys, "shop.py:build_with_inputs", *right)[0] == 0


def test_json_and_no_gradients(capsys):
    code, out, err = lines(
        capsys, "shop.py:build", "--input", "2x16", "--input", "residual=2x16", "--no-train",
        "--inner", "eager", "--json",
    )  # fmt: skip
    assert code == 0 and err == ["the shop opens"]
    found = json.loads("\n".join(out))
    assert found["ok"] is True and found["train"] is False and found["gradients"] == []
    assert found["counts"] == {"add_rms_norm": 2} and found["inner"] == "eager"
    assert [site["ok"] for site in found["sites"]] == [True, True]
    assert found["outputs"][0]["shape"] == [2, 16]


def test_the_seed_decides_weights_and_inputs(capsys):
    def errors_of(seed):
        arguments = ("shop.py:build", "--input", "2x16", "--input", "residual=2x16", "--inner",
                     "eager", "--json", "--seed", seed)  # fmt: skip
        code, out, _ = lines(capsys, *arguments)
        assert code == 0
        return [one["eager_error"] for one in json.loads("\n".join(out))["gradients"]]

    assert errors_of("3") == errors_of("3") != errors_of("4")


def test_a_model_that_is_not_deterministic(capsys):
    code, out, err = lines(capsys, "shop.py:drifts", "--inner", "eager")
    assert code == 2
    line = err[-1]
    assert line.startswith("fxfuse: shop.py:drifts: the model is not deterministic: two eager runs")
    assert not any("first site" in line for line in out)


def test_a_saved_program(capsys):
    program = torch.export.export(torch.nn.RMSNorm(16), (torch.ones(2, 16),))
    torch.export.save(program, "norm.pt2")
    code, out, _ = lines(capsys, "norm.pt2", "--inner", "eager")
    assert code == 0 and "   1 x fxfuse::rms_norm (kernel)" in out
    program._example_inputs = None
    torch.export.save(program, "bare.pt2")
    code, _, err = lines(capsys, "bare.pt2", "--inner", "eager")
    assert code == 2 and "--input 2x128xbfloat16" in err[0] and len(err) == 1
    assert lines(capsys, "bare.pt2", "--inner", "eager", "--input", "2x16")[0] == 0


def test_an_architecture_is_cut_and_says_so(capsys):
    code, out, _ = lines(capsys, "hf:llama", "--inner", "eager", "--no-train")
    assert code == 0
    assert out[0] == "hf:llama is cut to 2 layers and small widths (--full leaves it as it is)"
    text = "\n".join(out)
    for words in ("4 x fxfuse::add_rms_norm", "2 x fxfuse::silu_gate", "output.logits"):
        assert words in text


BAD = [
    (["absent.py:build"], ["absent.py", "no file"]),
    (["shop.py:build"], ["--input 2x128xbfloat16"]),
    (["shop.py:broken"], ["running the model raised RuntimeError", "shop.py:17"]),
    (["shop.py:on_meta"], ["shop.py:on_meta: the model is on the meta device"]),
    (["shop.py:build_with_inputs", "--inner", "nobody"], ["'nobody'", "aot_eager"]),
    (["shop.py:build_with_inputs", "--policy", "perhaps"], ["perhaps", "always"]),
    (["shop.py:build_with_inputs", "--pattern", "add_norm"], ["'add_norm'", "add_rms_norm"]),
    (["shop.py:build_with_inputs", "--expect", "rms_norm=1"], ["--expect", "--inner", "--full"]),
    (["shop.py:build_with_inputs", "--device", "tpu"], ["tpu", "cuda"]),
    (["hf:lama"], ["'lama'", "llama"]),
]


@pytest.mark.parametrize("arguments, words", BAD, ids=[" ".join(a) for a, _ in BAD])
def test_what_cannot_be_used_is_one_line(capsys, arguments, words):
    code, out, err = lines(capsys, *arguments)
    assert code == 2 and out == []
    (line,) = [line for line in err if line != "the shop opens"]
    assert line.startswith("fxfuse")
    for word in words:
        assert word in line


def test_a_gpu_that_is_not_there(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, _, (line,) = lines(capsys, "shop.py:build_with_inputs", "--device", "cuda")
    assert code == 2 and "'--device' is 'cuda'" in line and "say cpu" in line


def test_help(capsys):
    assert main(["verify", "--help"]) == 0
    text = capsys.readouterr().out
    for words in ("--inner", "--full", "--seed", "cut to two layers", "exit codes: 0 good"):
        assert words in text


# ---- targets with values ------------------------------------------------------------------------


def test_values_of_inputs():
    given = ["1x5xint64", "attention_mask=1x5"]
    target = targets.load("shop.py:words", given, real=targets.Real())
    (ids,) = target.args
    assert ids.device.type == "cpu" and ids.min() >= 0 and ids.max() < 7
    assert torch.equal(target.kwargs["attention_mask"], torch.ones(1, 5, dtype=torch.int64))
    assert torch.equal(target.kwargs["ids"], torch.zeros(1, 3, dtype=torch.int64))
    target = targets.load("shop.py:build", ["3x16", "3x16xfloat16"], real=targets.Real())
    assert all(t.requires_grad and t.std() > 0.5 for t in target.args)
    assert target.args[1].dtype == torch.float16
    assert all(p.device.type == "cpu" for p in target.model.parameters())


def test_an_architecture_with_values():
    target = targets.load("hf:gemma", ["2x8"], real=targets.Real())
    model, ids = target.model, target.kwargs["input_ids"]
    assert ids.shape == (2, 8) and len(model.model.layers) == 2
    assert ids.max() < model.config.vocab_size == 1024
    weight = model.model.layers[0].input_layernorm.weight
    assert 0.05 < weight.std() < 0.2
    assert target.note.startswith("hf:gemma is cut to 2 layers and small widths")


def test_an_architecture_at_its_size():
    settings = ["hidden_size=32", "intermediate_size=64", "num_hidden_layers=3", "vocab_size=64",
                "num_attention_heads=2", "num_key_value_heads=2"]  # fmt: skip
    target = targets.load("hf:llama", settings=settings, real=targets.Real(full=True))
    assert len(target.model.model.layers) == 3 and target.note == ""
    assert target.kwargs["input_ids"].shape == (1, 2048)


def test_the_cut_leaves_what_was_set_and_keeps_each_kind_of_layer():
    model, words = architectures.build_with_values("hf:qwen3_next", ["hidden_size=64"])
    assert words == "2 layers and small widths"
    assert model.config.hidden_size == 64
    assert model.config.layer_types == ["linear_attention", "full_attention"]


def test_what_cannot_be_made_narrow_is_cut_in_depth_alone(monkeypatch):
    monkeypatch.setattr(cuts, "_WIDTHS", {"hidden_size": 33, "vocab_size": 1024})
    settings = ["intermediate_size=64", "vocab_size=32"]
    full = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4}
    with open("config.json", "w") as file:
        json.dump(full, file)
    model, words = architectures.build_with_values("hf:config.json", settings)
    assert words == "2 layers"
    assert (model.config.hidden_size, len(model.model.layers)) == (64, 2)


def test_what_cannot_be_cut_is_not_built_at_its_size(monkeypatch):
    monkeypatch.setattr(cuts, "smaller", lambda config: [({"num_attention_heads": 3}, "no")])
    with pytest.raises(errors.CannotCut, match=r"hf:llama: it does not run .*--full"):
        targets.load("hf:llama", real=targets.Real())


def test_a_model_on_the_meta_device_has_no_values():
    with pytest.raises(errors.NoValues, match="fxfuse inspect"):
        targets.load("shop.py:on_meta", real=targets.Real())
