"""TARGET and --input: what is built, and the line that says why it is not."""

import json
import textwrap

import pytest
import torch

from fxfuse import errors, inputs, targets


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A working directory of its own, and nothing imported from it left behind."""
    import sys

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def write(name, text):
    with open(name, "w") as file:
        file.write(textwrap.dedent(text))


SHOP = """
    import torch
    import torch.nn as nn

    def model():
        return nn.Linear(4, 4)

    def with_args():
        return nn.Linear(4, 4), (torch.ones(2, 4),)

    def with_kwargs():
        return nn.Linear(4, 4), (), {"input": torch.ones(2, 4)}

    def one_tensor():
        return nn.Linear(4, 4), torch.ones(2, 4)

    def reads_values():
        model = nn.Linear(4, 4)
        model.scale = model.weight.sum().item()
        return model, (torch.ones(2, 4),)

    def a_class():
        return nn.Linear

    def broken():
        raise ValueError("the shop is closed")

    def needs_package():
        import a_package_nobody_has_installed

    instance = nn.Linear(4, 4).eval()
    """


@pytest.mark.parametrize("name", ["with_args", "one_tensor", "reads_values"])
def test_factory_with_positional_inputs(name):
    write("shop.py", SHOP)
    target = targets.load(f"shop.py:{name}")
    assert [tuple(t.shape) for t in target.args] == [(2, 4)]
    assert target.kwargs == {}
    tensors = [*target.model.parameters(), *target.args]
    assert {t.device.type for t in tensors} == {"meta"}


def test_factory_with_named_inputs():
    write("shop.py", SHOP)
    target = targets.load("shop.py:with_kwargs")
    assert target.args == ()
    assert target.kwargs["input"].device.type == "meta"


def test_inputs_on_the_command_line_replace_those_of_the_factory():
    write("shop.py", SHOP)
    assert targets.load("shop.py:with_args", ["7x4xbfloat16"]).args[0].shape == (7, 4)
    assert targets.load("shop.py:with_kwargs", ["input=9x4"]).kwargs["input"].shape == (9, 4)


def test_train_and_eval():
    write("shop.py", SHOP)
    assert not targets.load("shop.py:instance", ["2x4"]).model.training
    assert targets.load("shop.py:instance", ["2x4"], train=True).model.training
    assert targets.load("shop.py:with_args").model.training
    assert not targets.load("shop.py:with_args", train=False).model.training


def test_module_and_its_neighbours_are_importable():
    import os

    os.mkdir("parts")
    write("parts/inner.py", "import torch.nn as nn\ndef make(): return nn.Linear(3, 3)")
    write("parts/outer.py", "from inner import make\n")
    assert targets.load("parts/outer.py:make", ["2x3"]).model.in_features == 3
    write("parts/__init__.py", "")
    write("parts/third.py", "from .inner import make\n")
    assert targets.load("parts.third:make", ["2x3"]).model.in_features == 3


def test_saved_program():
    torch.export.save(torch.export.export(torch.nn.Linear(4, 4), (torch.ones(2, 4),)), "p.pt2")
    assert targets.load("p.pt2").program.graph_signature.user_inputs


BAD = [
    ("shop", errors.BadTarget, ["'shop'", "path/to/file.py:factory"]),
    ("absent.py:model", errors.TargetMissing, ["absent.py", "no file"]),
    ("absent.pt2", errors.TargetMissing, ["absent.pt2", "no file"]),
    ("absent_package.part:model", errors.ModuleMissing, ["absent_package"]),
    ("shop.py:modle", errors.NoFactory, ["'modle'", "model", "with_args", "broken"]),
    ("shop.py:broken", errors.TargetRaised, ["ValueError", "the shop is closed", "shop.py:26"]),
    ("shop.py:needs_package", errors.PackageMissing, ["nobody_has_installed", "shop.py:29"]),
    ("shop.py:a_class", errors.NoModel, ["the class Linear, not an instance"]),
    ("shop.py:model", errors.NoInputs, ["--input 2x128xbfloat16"]),
    ("broken.py:model", errors.TargetRaised, ["SyntaxError", "broken.py"]),
    ("quits.py:model", errors.TargetRaised, ["SystemExit", "quits.py:2"]),
    ("hf:lama", errors.UnknownArchitecture, ["'lama'", "llama"]),
    ("hf:some/checkpoint", errors.UnknownArchitecture, ["nothing is downloaded"]),
    ("hf:absent.json", errors.TargetMissing, ["absent.json"]),
    ("hf:untyped.json", errors.BadConfig, ["untyped.json", "model_type"]),
    ("hf:garbled.json", errors.BadConfig, ["garbled.json"]),
]


@pytest.mark.parametrize("text, kind, words", BAD, ids=[text for text, *_ in BAD])
def test_bad_target_is_one_line(text, kind, words):
    write("shop.py", SHOP)
    write("broken.py", "def model(:")
    write("quits.py", "import sys\nsys.exit(3)")
    write("untyped.json", "{}")
    write("garbled.json", "{'a")
    with pytest.raises(kind) as caught:
        targets.load(text)
    line = str(caught.value)
    assert "\n" not in line
    assert text in line
    for word in words:
        assert word in line


def test_import_error_names_the_file_that_wanted_the_package():
    write("shop_model.py", "import shop_layers\ndef build(): pass")
    write("shop_layers.py", "import a_package_nobody_has_installed")
    with pytest.raises(errors.PackageMissing) as caught:
        targets.load("shop_model.py:build")
    assert "shop_layers.py:1 needs 'a_package_nobody_has_installed'" in str(caught.value)
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_architecture_by_name_has_tokens_and_no_cache():
    target = targets.load("hf:llama", settings=["num_hidden_layers=3", "dtype=bfloat16"])
    assert type(target.model).__name__ == "LlamaForCausalLM"
    assert len(target.model.model.layers) == 3
    assert target.kwargs["input_ids"].shape == (1, 2048)
    assert target.kwargs["use_cache"] is False
    assert {p.dtype for p in target.model.parameters()} == {torch.bfloat16}
    assert {p.device.type for p in target.model.parameters()} == {"meta"}


def test_architecture_without_a_causal_model_is_the_base_model():
    target = targets.load("hf:t5", settings=["num_layers=1"])
    assert type(target.model).__name__ == "T5Model"
    assert {"input_ids", "decoder_input_ids"} <= set(target.kwargs)


def test_architecture_from_a_config():
    config = {
        "model_type": "qwen3", "architectures": ["Qwen3ForSequenceClassification"],
        "num_hidden_layers": 2, "torch_dtype": "float16", "max_position_embeddings": 512,
    }  # fmt: skip
    write("config.json", json.dumps(config))
    target = targets.load("hf:config.json", settings=["num_hidden_layers=1"])
    assert type(target.model).__name__ == "Qwen3ForSequenceClassification"
    assert len(target.model.model.layers) == 1
    assert target.model.dtype == torch.float16
    assert target.kwargs["input_ids"].shape == (1, 512)


def test_nested_settings_and_inputs_of_an_architecture():
    target = targets.load("hf:gemma3", ["2x64"], ["text_config.num_hidden_layers=1"])
    assert target.model.config.text_config.num_hidden_layers == 1
    assert target.kwargs["input_ids"].shape == (2, 64)
    assert target.kwargs["input_ids"].dtype == torch.int64


@pytest.mark.parametrize(
    "target, setting, words",
    [
        ("hf:llama", "hiden_size=8", ["'hiden_size'", "hidden_size"]),
        ("hf:llama", "hidden_size", ["KEY=VALUE"]),
        ("hf:gemma3", "text_config.layers=8", ["'text_config.layers'"]),
        ("shop.py:model", "a=3", ["only hf: targets"]),
    ],
)
def test_bad_setting(target, setting, words):
    with pytest.raises(errors.UnknownSetting) as caught:
        targets.load(target, settings=[setting])
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "text, name, shape, dtype",
    [
        ("2x128xbfloat16", None, (2, 128), torch.bfloat16),
        ("2x128xbf16", None, (2, 128), torch.bfloat16),
        ("x=2x16x64", "x", (2, 16, 64), None),
        ("ids=1x2048xint64", "ids", (1, 2048), torch.int64),
        ("7", None, (7,), None),
        ("mask=3xbool", "mask", (3,), torch.bool),
        ("0x4", None, (0, 4), None),
    ],
)
def test_input(text, name, shape, dtype):
    assert inputs.parse(text) == inputs.Input(name, shape, dtype)


@pytest.mark.parametrize("text", ["", "x=", "2xx3", "axb", "2x3xfloat33", "2,3", "-1x4", "2x3xnn"])
def test_bad_input(text):
    with pytest.raises(errors.BadInput, match="2x128xbfloat16"):
        inputs.parse(text)


def test_input_given_twice():
    with pytest.raises(errors.BadInput, match="'x' is given twice"):
        inputs.parse_all(["x=2", "x=3"])


def test_dtype_of_an_input_follows_the_model():
    write("half.py", "import torch\ndef make(): return torch.nn.Linear(4, 4, dtype=torch.half)")
    target = targets.load("half.py:make", ["2x4", "position_ids=2x4", "other=2x4xfloat64"])
    assert target.args[0].dtype == torch.half
    assert target.kwargs["position_ids"].dtype == torch.int64
    assert target.kwargs["other"].dtype == torch.float64
