"""Reports of one compilation: in which order they come, and what a cache hit gives back."""

from __future__ import annotations

import pytest
import torch
from torch import fx

import fxfuse
from fxfuse import compilation, stored
from fxfuse.compilation import Compilation
from fxfuse.report import Match, Miss, Report

MATCH = Match(
    "rms_norm", "fxfuse::rms_norm", ("a", "b"), "norm", "model.py:3", {"x": (2, "s0")},
    {"x": "float32"}, {"eps": 1e-6}, "kernel: because", 12,
)  # fmt: skip


def report(name: str) -> Report:
    return Report([MATCH], [Miss(name, "n", "m", "w.py:1", "a reason")], 0.5, True)


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


def test_a_report_survives_json():
    one = report("x")
    again = Report.from_json(one.to_json())
    assert (again.matches, again.misses, again.modified) == (one.matches, one.misses, True)


def test_the_first_report_comes_first():
    """A backward may be compiled before the compiler of the whole is done."""
    told = []
    job, first, early, late = Compilation("key", told.append), *map(report, "abc")
    job.later(early)
    assert told == []
    job.first(first)
    assert told == [first, early]
    job.later(late)
    assert told == [first, early, late]


def test_what_was_found_is_told_again_where_no_hook_ran():
    one = Compilation("key", [].append)
    one.later(report("a"))
    one.later(report("b"))
    told = []
    other = Compilation("key", told.append)
    other.first(report("c"))
    assert [m.pattern for r in told for m in r.misses] == ["c", "a", "b"]
    other.later(report("a"))
    assert len(told) == 2, "it has been told already"


def test_a_compiler_without_caches_is_not_told_what_others_found():
    Compilation("key", [].append).later(report("a"))
    told = []
    Compilation("key", told.append, cached=False).first(report("b"))
    assert len(told) == 1


def test_nothing_found_is_not_kept():
    Compilation("key", [].append).later(Report())
    assert stored.load("key") is None


def test_a_file_that_cannot_be_read_is_no_report(tmp_path):
    stored.save("key", [report("a")])
    (file,) = (tmp_path / "fxfuse").glob("*.json")
    file.write_text("{")
    assert stored.load("key") is None


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path):
    (tmp_path / "fxfuse").write_text("a file where the folder would be")
    stored.save("key", [report("a")])
    assert stored.load("key") is None


def test_the_key_is_of_the_graph_and_of_the_settings():
    def graph(factor: float, dtype: torch.dtype = torch.float32) -> fx.GraphModule:
        gm = fx.symbolic_trace(lambda x: x * factor)
        next(iter(gm.graph.nodes)).meta["example_value"] = torch.empty(3, dtype=dtype)
        return gm

    keys = [
        stored.key_of(graph(2.0), "auto"), stored.key_of(graph(3.0), "auto"),
        stored.key_of(graph(2.0), "always"), stored.key_of(graph(2.0, torch.float64), "auto"),
    ]  # fmt: skip
    assert len(set(keys)) == 4
    assert stored.key_of(graph(2.0), "auto") == keys[0]


def test_the_key_is_left_on_our_nodes():
    gm = fxfuse.apply(fx.symbolic_trace(torch.nn.Sequential(torch.nn.RMSNorm(4))))
    assert compilation.key_in(gm.graph) is None
    compilation.mark(gm, "key")
    assert compilation.key_in(gm.graph) == "key"
    assert compilation.key_in(fx.symbolic_trace(torch.nn.Linear(2, 2)).graph) is None
