"""The parts of the report: what each measures, and what it says."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gpu_block
import gpu_ceilings
import gpu_large
import gpu_race
import gpu_speed
import gpu_targets
import torch
from gpu_peers import CARRY, PEERS
from gpu_pool import said
from gpu_speed import FUSED, OURS, THEIRS, Row, Shape
from tabulate import tabulate


@dataclass(frozen=True)
class Run:
    """What this run does, and since when.

    dry: tiny sizes on the CPU. interpreted: there, the kernels in Triton's interpreter.
    wheels: a folder of packages to compare with.
    """

    dry: bool
    interpreted: bool = False
    wheels: Path | None = None
    begin: float = field(default_factory=time.monotonic)

    @property
    def device(self) -> str:
        return "cpu" if self.dry else "cuda"

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.begin


@dataclass
class Part:
    """One part of the report.

    text: Markdown in front of the rows; rows: the table, as JSON too; after: Markdown behind it.
    failures: what is wrong; notes: what was left out, which is no failure.
    """

    title: str
    text: str = ""
    rows: list[dict] = field(default_factory=list)
    after: str = ""
    failures: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0
    shown: Callable[[dict], dict] = dict  # a row as the table has it

    def __str__(self) -> str:
        table = tabulate(
            [self.shown(row) for row in self.rows],
            headers="keys", tablefmt="github", floatfmt=".4g", missingval="-",
        )  # fmt: skip
        lines = "".join(f"* {line}\n" for line in (*self.failures, *self.notes))
        body = "\n\n".join(t.rstrip() for t in (self.text, table, self.after, lines) if t)
        return f"## {self.title}: {self.seconds:.0f} seconds\n\n{body}\n"

    def as_json(self) -> dict[str, object]:
        kept = ("title", "seconds", "rows", "failures", "notes", "after")
        return {name: getattr(self, name) for name in kept}


def finish(fill: Callable[[Part], None], part: Part) -> Part:
    """The part as `fill` leaves it, with its time; an error is one of its failures."""
    begin = time.monotonic()
    try:
        fill(part)
    except Exception as error:
        traceback.print_exc()
        part.failures.append(said(error))
    part.seconds = time.monotonic() - begin
    return part


def each(part: Part, run: Run, end: float, items: Iterable, do: Callable[[Any], None]) -> None:
    """Do this with each item that is reached in time; an error is a failure of that one only."""
    for item in items:
        if run.seconds > end:
            part.notes.append(f"{item}: not reached in time")
            continue
        try:
            do(item)
        except Exception as error:
            traceback.print_exc()
            part.failures.append(f"{item}: {said(error)}")
        if not run.dry:
            torch.cuda.empty_cache()


def large(part: Part, run: Run, end: float) -> None:
    part.text = "Outputs, gradients of the rows and of the weights, against fp64, in bf16."

    def check(one: gpu_large.Large) -> None:
        begin = time.monotonic()
        part.failures += [f"{one}: {text}" for text in gpu_large.check(one, run.device, run.dry)]
        seconds = round(time.monotonic() - begin, 1)
        elements = one.M * one.N / 2**31
        part.rows.append({"": str(one), "2**31 elements": elements, "seconds": seconds})

    each(part, run, end, gpu_large.sizes(run.dry), check)
    part.failures += part.notes  # a check that was not made has not passed
    part.notes = []


def ceilings(part: Part, run: Run, end: float) -> None:
    part.text = "GB/s of kernels that only read and write so many tensors of 1 GiB: the best."
    part.rows += gpu_ceilings.rows(run.device)


SHARES = (
    "Our kernels without autograd, on inputs that the L2 cache does not hold: medians, replayed "
    "from a CUDA graph. GB/s by the fewest bytes that must move. Alone: launched one at a time."
)
RATIOS = (
    "How many times as fast as each other side our kernel is. Ours, Liger and QuACK are called as "
    "such; autograd runs the backward of all but ours. Liger and QuACK take one gradient of y: of "
    "several, one compiled kernel makes the sum first."
)


def sweep(part: Part, run: Run, end: float, kept: list[Row]) -> None:
    part.text, part.shown = SHARES, shares

    def measure(shape: Shape) -> None:
        keep(part, gpu_speed.measure(shape, [gpu_speed.ours(shape.case)], run.device), kept)

    each(part, run, end, gpu_speed.swept(run.dry), measure)


def compare(part: Part, run: Run, end: float, kept: list[Row]) -> None:
    part.text, part.shown = RATIOS, ratios
    absent = [reason for peer in PEERS if (reason := peer.missing())]
    part.after = "\n".join((*absent, "", CARRY)) if absent else ""

    def measure(shape: Shape) -> None:
        sides = list(gpu_speed.sides(shape.case, run.dry))
        sides, lines = gpu_speed.agreeing(sides, shape, run.device)
        part.notes += lines
        keep(part, gpu_speed.measure(shape, sides, run.device), kept)

    each(part, run, end, gpu_speed.compared(run.dry), measure)


def keep(part: Part, found: Iterable[Row | str], kept: list[Row]) -> None:
    for one in found:
        if isinstance(one, str):
            part.failures.append(one)
        else:
            kept.append(one)
            part.rows.append(as_json(one))


def as_json(row: Row) -> dict[str, object]:
    shape = row.shape
    return {
        "op": shape.name + ", strided gate" * shape.strided,
        "rows": shape.M,
        "columns": shape.N,
        "dtype": str(shape.dtype).removeprefix("torch."),
        "pass": row.pass_,
        "GB/s": row.rate,
        "of the ceiling": row.share,
        "times": {name: time_.as_json() for name, time_ in row.times.items()},
    }


def shares(row: dict) -> dict[str, object]:
    """A row of the sweep for people."""
    alone = row["times"][OURS]["alone_ms"]
    kept = {key: row[key] for key in ("op", "columns", "pass", "GB/s")}
    return kept | {"of the ceiling": f"{row['of the ceiling']:.0%}", "alone, ms": alone}


def ratios(row: dict) -> dict[str, object]:
    """A row of the comparison for people."""
    best = {name: t["replayed_ms"] or t["alone_ms"] for name, t in row["times"].items()}
    kept = {key: row[key] for key in ("op", "rows", "columns", "dtype", "pass", "GB/s")}
    kept["of the ceiling"] = f"{row['of the ceiling']:.0%}"
    others = (THEIRS, FUSED, "eager", *(peer.name for peer in PEERS))
    return kept | {
        f"x {name}": best[name] / best[OURS] if name in best else None for name in others
    }


def race(part: Part, run: Run, end: float) -> None:
    part.text = (
        "The backward kernels in other cuts than the one that is chosen, M N = 64 Mi in bf16; "
        "medians behind a flushed cache."
    )
    part.shown, results = gpu_race.shown, []

    def compete(shape: Shape) -> None:
        result, failures = gpu_race.run(shape, run.device, run.dry)
        results.append(result)
        part.rows.append(result.as_json(run.device))
        part.failures += failures

    each(part, run, end, gpu_race.shapes(run.dry), compete)
    lines = "\n".join(gpu_race.table(results)) or "# nothing is faster than what is chosen"
    part.after = f"Overrides:\n\n```python\n{lines}\n```"


def block(part: Part, run: Run, end: float) -> None:
    part.text = "Medians of alternating runs; peak memory beyond the weights."

    def measure(_: str) -> None:
        part.rows, part.failures = gpu_block.measure(run.device, run.dry)

    each(part, run, end, ["blocks"], measure)


def targets(part: Part, swept: list[Row], compared: list[Row]) -> None:
    part.text = "A missed target is no failure, a wrong number is."
    part.rows = [target.as_json() for target in gpu_targets.targets(swept, compared)]
