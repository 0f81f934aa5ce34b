"""The command line as its users meet it: output, exit codes, one line for each error."""

import json
import re
import subprocess
import sys
import textwrap

import pytest
import torch

from fxfuse import listing
from fxfuse.__main__ import main
from fxfuse.report import Miss, Report

SHOP = """
    import torch
    import torch.nn as nn

    print("the shop opens")

    class Block(nn.Module):
        def __init__(self, eps=1e-6):
            super().__init__()
            self.norm = nn.RMSNorm(2048, eps)

        def forward(self, x, residual):
            h = x + residual
            return self.norm(h), h

    class Stack(nn.Module):
        def __init__(self, depth=3):
            super().__init__()
            self.layers = nn.ModuleList(Block() for _ in range(depth))

        def forward(self, x, residual):
            for layer in self.layers:
                x, residual = layer(x, residual)
            return x

    class MeanNorm(nn.Module):
        def forward(self, x):
            return x * torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-6)

    def build():
        return Stack()

    def build_with_inputs():
        return Stack(), (torch.ones(2, 2048), torch.ones(2, 2048))

    def near_miss():
        return MeanNorm(), torch.ones(2, 4, 8)

    def broken():
        return Stack(), (torch.ones(2, 2048), torch.ones(2, 7))
    """
PATTERN = """
    import torch
    from fxfuse.match import square, var
    from fxfuse.registry import pattern

    @pattern("my_square", square(var("x")), size=100)
    def build(b):
        return b.call(torch.ops.aten.square.default, b.x, outputs=("y",))
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
    (tmp_path / "mine.py").write_text(textwrap.dedent(PATTERN))
    yield
    sys.modules.pop("shop", None)
    torch._logging.set_logs()


def lines(capsys, *arguments):
    code = main(["inspect", *arguments])
    out, err = capsys.readouterr()
    return code, out.splitlines(), err.splitlines()


def test_sites_are_listed_with_all_that_is_known(capsys):
    code, out, _ = lines(capsys, "shop.py:build_with_inputs", "--target", "sm_90")
    assert code == 0
    text = "\n".join(out)
    assert "add_rms_norm: 3 sites" in out
    for words in ("x 2x2048 float32", "fxfuse::add_rms_norm", "eps=1e-06", "policy", "kB a site"):
        assert words in text, words
    sites = [line.split() for line in out if re.match(r"\s+\d+ ", line)]
    assert sites == [[str(i + 1), f"layers.{i}.norm", "shop.py:13"] for i in range(3)]
    assert out[-3:-1] == ["near misses: none", ""]
    assert out[-1].startswith("total: 3 add_rms_norm;")


def test_output_of_the_model_file_goes_to_stderr(capsys):
    code, out, err = lines(capsys, "shop.py:build_with_inputs", "--json")
    assert code == 0
    report = json.loads("\n".join(out))
    assert report["counts"] == {"add_rms_norm": 3}
    assert report["matches"][0]["module"] == "layers.0.norm"
    assert err == ["the shop opens"]


def test_inputs_target_and_policy(capsys):
    inputs = ("--input", "4x2048", "--input", "residual=4x2048xfloat32")
    _, out, _ = lines(capsys, "shop.py:build", *inputs, "--target", "cpu", "--json")
    (first, *_) = json.loads("\n".join(out))["matches"]
    assert tuple(first["shapes"]["x"]) == (4, 2048)
    assert first["dtypes"] == dict.fromkeys(first["dtypes"], "float32")
    assert "CPU" in first["policy"]
    code, out, _ = lines(capsys, "shop.py:build", *inputs, "--policy", "never")
    assert code == 0 and out[-1].startswith("total: no site")


def test_near_misses_in_one_line_or_in_full(capsys):
    _, out, _ = lines(capsys, "shop.py:near_miss")
    (summary,) = [line for line in out if line.startswith("near misses: 1 (")]
    assert summary.endswith("--why lists them")
    _, out, _ = lines(capsys, "shop.py:near_miss", "--why")
    assert any("near miss of" in line and "reason" in line for line in out)
    assert any("shop.py:" in line for line in out)


def test_equal_misses_are_one_row_and_the_most_frequent_come_first():
    rare = Miss("rms_norm", "a", "first", "model.py:1", "it is rare")
    often = [Miss("rms_norm", "b", f"layers.{i}", "model.py:2", "it is frequent") for i in range(3)]
    rows = listing.misses(Report(misses=[rare, *often]), why=True).splitlines()[2:]
    assert "layers.0 and 2 more" in rows[0] and "it is frequent" in rows[0]
    assert "first" in rows[1] and "more" not in rows[1]


@pytest.mark.parametrize(
    "expected, code",
    [("add_rms_norm=3", 0), ("add_rms_norm=4", 1), ("rms_norm=0", 0), ("rms_norm=1", 1)],
)
def test_expectation(capsys, expected, code):
    got, out, err = lines(capsys, "shop.py:build_with_inputs", "--expect", expected)
    assert got == code
    assert out[-1].startswith("total: 3 add_rms_norm")
    name, count = expected.split("=")
    wrong = (
        f"fxfuse: not as expected: {name} {3 if name == 'add_rms_norm' else 0} instead of {count}"
    )
    assert (wrong in err) == bool(code)


def test_only_the_named_patterns(capsys):
    _, out, _ = lines(capsys, "shop.py:build_with_inputs", "--pattern", "rms_norm")
    assert out[-1].startswith("total: 3 rms_norm")


def test_patterns_of_a_file(capsys):
    code, out, _ = lines(
        capsys, "shop.py:near_miss", "--patterns", "mine.py", "--expect", "my_square=1"
    )
    assert code == 0
    assert any("aten::square" in line for line in out)


def test_saved_program(capsys):
    program = torch.export.export(torch.nn.RMSNorm(16), (torch.ones(2, 16),))
    torch.export.save(program, "norm.pt2")
    code, out, _ = lines(capsys, "norm.pt2")
    assert code == 0 and out[-1].startswith("total: 1 rms_norm")


def test_config_of_a_published_size(capsys):
    """70 billion parameters, cut in depth: its widths are those of the full size."""
    config = {
        "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672,
        "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
        "vocab_size": 128256, "torch_dtype": "bfloat16",
    }  # fmt: skip
    with open("config.json", "w") as file:
        json.dump(config, file)
    code, out, _ = lines(
        capsys, "hf:config.json", "--set", "num_hidden_layers=4",
        "--expect", "add_rms_norm=8", "--expect", "rms_norm=1",
    )  # fmt: skip
    assert code == 0
    text = "\n".join(out)
    assert "x 1x2048x8192 bfloat16" in text
    for module in ("model.layers.0.input_layernorm", "model.layers.3.post_attention_layernorm"):
        assert re.search(rf"{re.escape(module)} +transformers/\S+/modeling_llama.py:\d+", text)


BAD = [
    (["absent.py:build"], ["absent.py", "no file"]),
    (["shop.py:bild"], ["'bild'", "build_with_inputs"]),
    (["shop.py:build"], ["--input 2x128xbfloat16"]),
    (["shop.py:build", "--input", "2xx3"], ["'2xx3'", "2x128xbfloat16"]),
    (["shop.py:broken"], ["RuntimeError", "shop.py:13"]),
    (["shop.py:build_with_inputs", "--pattern", "add_norm"], ["'add_norm'", "add_rms_norm"]),
    (["shop.py:build_with_inputs", "--expect", "add_norm=3"], ["'add_norm'", "add_rms_norm"]),
    (["shop.py:build_with_inputs", "--expect", "add_rms_norm"], ["PATTERN=COUNT"]),
    (["shop.py:build_with_inputs", "--patterns", "absent.py"], ["absent.py"]),
    (["shop.py:build_with_inputs", "--graph", "out.svg"], ["--graph", "--why", "--json"]),
    (["shop.py:build_with_inputs", "--policy", "perhaps"], ["perhaps", "always"]),
    (["shop.py:build_with_inputs", "--target", "sm_10"], ["sm_10", "sm_100"]),
    (["hf:lama"], ["'lama'", "llama"]),
    ([], ["TARGET"]),
]


@pytest.mark.parametrize("arguments, words", BAD, ids=[" ".join(a) or "nothing" for a, _ in BAD])
def test_what_cannot_be_used_is_one_line(capsys, arguments, words):
    code, out, err = lines(capsys, *arguments)
    assert code == 2
    assert out == []
    (line,) = [line for line in err if line != "the shop opens"]
    assert line.startswith("fxfuse")
    for word in words:
        assert word in line


def test_unknown_command_lists_the_commands(capsys):
    assert main(["bench", "hf:llama"]) == 2
    assert "inspect" in capsys.readouterr().err


def test_traceback_on_demand(capsys):
    code, _, err = lines(capsys, "shop.py:broken", "--traceback")
    assert code == 2
    assert any(line.startswith("Traceback") for line in err)
    assert err[-1].startswith("fxfuse: shop.py:broken: ")


def test_help_is_there_before_anything_heavy(tmp_path):
    heavy = "{'transformers', 'triton', 'tabulate', 'torch._dynamo.convert_frame'}"
    code = "import sys, fxfuse.__main__ as m; c = m.main(['inspect', '--help']); "
    code += f"sys.exit(c or len({heavy} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    for word in ("examples", "exit codes", "hf:NAME", "--input", "--expect"):
        assert word in done.stdout


def test_module_and_process_stay_quiet(tmp_path):
    """In a process of its own: one line, without logs or warnings of torch and transformers."""
    command = [sys.executable, "-m", "fxfuse", "inspect"]
    done = subprocess.run(
        [*command, "shop.py:broken"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[0] == "the shop opens"
    assert len(done.stderr.splitlines()) == 2
