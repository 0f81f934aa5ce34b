"""The table of accuracies: what every op keeps of eager's bits, and how far it is from fp64.

scripts/accuracy.py writes it; here it is judged, and a sample is measured anew.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import accuracy

TABLE = accuracy.read()
SAMPLE = {form: [p for p in accuracy.sample() if p.form == form] for form in accuracy.FORMS}
ON_CPU = SAMPLE[accuracy.EAGER_OP] + SAMPLE[accuracy.INLINE]


def wrong(found: dict) -> list[str]:
    """The bounds that are not kept, and what the table says was better."""
    broken = [
        f"{line}: {text}" for line, one in found.items() for text in accuracy.faults(*line, one)
    ]
    return broken + [f"{line}: {text}" for line, text in accuracy.losses(found, TABLE)]


def test_the_table_has_every_place():
    assert list(dict.fromkeys(place for place, _ in TABLE)) == list(accuracy.kept())


def test_the_table_keeps_the_bounds():
    assert not wrong(TABLE)


@pytest.mark.parametrize("place", ON_CPU, ids=lambda p: f"{p.op} {p.dtypes} {p.form}")
def test_a_sample_is_as_exact_as_the_table_says(place):
    assert not wrong({(place, name): one for name, one in accuracy.measure(place).items()})


def test_a_sample_of_the_kernels_is_as_exact_as_the_table_says():
    pytest.importorskip("triton")
    assert not wrong(accuracy.measure_all(SAMPLE[accuracy.KERNEL], processes=2))


# ------------------------------------------------------------ what would be seen


def line(op: str, dtypes: str, form: str, name: str = "y") -> tuple:
    return accuracy.Place(op, 1000, dtypes, form), name


@pytest.mark.parametrize(
    "change, words",
    [
        ({"error": 1.03}, "from fp64, was"),
        ({"equal": 0.996}, "of the bits are eager's, were"),
        ({"equal": 0.98}, "of the bits are eager's"),
        ({"error": 1.2}, "from fp64, allowed are"),
    ],
)
def test_a_loss_is_seen(change, words):
    key = line("add_rms_norm", "bf16", accuracy.INLINE)
    ((name, factor),) = change.items()
    worse = replace(TABLE[key], **{name: getattr(TABLE[key], name) * factor})
    assert any(words in text for text in wrong({key: worse}))


def test_more_steps_are_seen():
    key = line("add_rms_norm", "fp16", accuracy.EAGER_OP)
    assert "2 steps from eager" in wrong({key: replace(TABLE[key], largest=2)})[0]


def test_what_inductor_alone_does_is_no_fault():
    """It drops roundings between fused steps: that is what the bits of the table show."""
    key = line("rms_norm_silu_gate", "bf16", accuracy.INDUCTOR)
    assert TABLE[key].equal < 90 and not wrong({key: TABLE[key]})


def test_the_tally_counts_steps_and_measures_errors():
    tally = accuracy.Tally(torch.bfloat16)
    eager = torch.tensor([1.0, 2.0, -4.0, 0.0], dtype=torch.bfloat16)
    found = torch.tensor([1.0, 2.015625, -4.0625, -0.0], dtype=torch.bfloat16)
    tally.add(found, eager, eager.double())
    one = tally.result()
    assert (one.equal, one.one, one.more, one.largest) == (50.0, 25.0, 25.0, 2)
    assert one.eager == 0 and one.error == pytest.approx(
        (0.015625**2 + 0.0625**2) ** 0.5 / 21**0.5, rel=1e-4
    )


def test_a_table_is_read_as_it_was_written(tmp_path):
    accuracy.write(TABLE, tmp_path / "table.tsv")
    assert accuracy.read(tmp_path / "table.tsv") == TABLE
