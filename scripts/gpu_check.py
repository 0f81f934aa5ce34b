"""Check fxfuse's ops on a GPU: numbers against fp64, repeatability, bandwidth, and whole blocks.

    python scripts/gpu_check.py                                    all of it, in under five minutes
    python scripts/gpu_check.py --output scripts/results/NAME.md   the same, kept as Markdown
    python scripts/gpu_check.py --dry-run                          tiny, on the CPU, no kernels

First the ops are checked, each in a process of its own, all at a time, and others compile what is
timed afterwards, one after the other. Exit code 1 when a check fails, or is not reached in time.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import itertools
import json
import os
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import gpu_block
import gpu_numbers
import gpu_speed
import torch
from op_cases import CASES, Case
from tabulate import tabulate

# Since the beginning: when a part ends, or begins nothing new.
NUMBERS_END, BANDWIDTHS_END, BLOCKS_END = 160, 235, 280
DRY_WORKERS = 2
SHOWN = 10  # failures of one op


@dataclass(frozen=True)
class Run:
    """What this run does: where, how large, and since when."""

    dry: bool
    begin: float = field(default_factory=time.monotonic)

    @property
    def device(self) -> str:
        return "cpu" if self.dry else "cuda"

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.begin


@dataclass
class Part:
    """One part of the report: its title, Markdown, and what was wrong."""

    title: str
    text: str = ""
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def __str__(self) -> str:
        wrong = "".join(f"* {failure}\n" for failure in self.failures)
        body = "\n\n".join(t.rstrip() for t in (self.text, wrong) if t)
        return f"## {self.title}: {self.seconds:.0f} seconds\n\n{body}\n"


# --- in processes of their own -------------------------------------------------------------

Task = Callable[[Run], tuple[int, list[str]]]  # the number of checks, and what was wrong


def check(case: Case, run: Run) -> tuple[int, list[str]]:
    return gpu_numbers.check(case, run.device, run.dry)


def compile_op(case: Case, run: Run) -> tuple[int, list[str]]:
    gpu_speed.prepare(case, run.device, run.dry)
    return 0, []


def compile_blocks(run: Run) -> tuple[int, list[str]]:
    gpu_block.prepare(run.device, run.dry)
    return 0, []


TASKS: dict[str, Task] = {
    "compile blocks": compile_blocks,
    **{f"check {name}": functools.partial(check, case) for name, case in CASES.items()},
    **{
        f"compile {name}": functools.partial(compile_op, case)
        for name, case in CASES.items()
        if case.timed
    },
}


def first(run: Run) -> Part:
    """Check all ops, and compile what is timed."""
    count = DRY_WORKERS if run.dry else len(TASKS)
    shares = [list(TASKS)[i::count] for i in range(count)]
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        lines = itertools.chain(*pool.map(lambda names: start(names, run), shares))
    found = {line.pop("task"): line for line in lines}
    rows, failures = [], []
    for name in TASKS:
        line = found[name]
        failures += shown(name, line.pop("failures"))
        rows.append({"": name, **line})
    text = "Outputs and gradients against fp64 and plain ops, two runs, rows beside bad rows.\n\n"
    return Part("Numbers, and compiling what is timed", text + table(rows), failures)


def start(names: list[str], run: Run) -> list[dict]:
    """What a process finds out about the tasks of these names."""
    command = [sys.executable, __file__, *(["--dry-run"] if run.dry else []), "--worker", *names]
    limit, ended = NUMBERS_END - run.seconds, "not finished in time"
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, timeout=limit)
        output, ended = done.stdout, f"the process ended with {done.returncode}"
    except subprocess.TimeoutExpired as error:
        output = error.stdout or b""
    found = [json.loads(line) for line in output.splitlines() if line.startswith(b"{")]
    missing = set(names) - {line["task"] for line in found}
    return found + [{"task": name, "failures": [ended]} for name in missing]


def work(names: list[str], run: Run) -> None:
    """Do these tasks, and print what was found as a line of JSON each."""
    for name in names:
        begin = time.monotonic()
        try:
            checks, failures = TASKS[name](run)
        except Exception as error:
            traceback.print_exc()
            checks, failures = 0, [said(error)]
        passed = checks - len({text.partition(": ")[0] for text in failures})
        line = {"task": name, "failures": failures}
        line |= {"passed": f"{passed} of {checks}"} if checks else {}
        print(json.dumps(line | {"seconds": round(time.monotonic() - begin, 1)}), flush=True)


def shown(name: str, failures: list[str]) -> Iterator[str]:
    yield from (f"{name}, {text}" for text in failures[:SHOWN])
    if len(failures) > SHOWN:
        yield f"{name}: {len(failures) - SHOWN} more"


# --- times, one after the other ------------------------------------------------------------


def bandwidths(run: Run) -> Part:
    part, rows = Part("Bandwidth in bf16"), []
    for case in CASES.values():
        for N in gpu_speed.widths(case, run.dry):
            if run.seconds > BANDWIDTHS_END:
                part.failures.append(f"{case.name}, {N} columns: not reached in time")
                continue
            try:
                rows.append(gpu_speed.measure(case, N, run.device, run.dry))
            except Exception as error:
                traceback.print_exc()
                part.failures.append(f"{case.name}, {N} columns: {said(error)}")
    part.text = (
        "GB/s by the fewest bytes that must move, medians. The backward gets a gradient for each "
        "result, autograd included; with three gradients of y and the residual's where there can "
        "be one it is the inner op. A copy is a kernel with as many reads and writes.\n\n"
    ) + table(rows)
    return part


def blocks(run: Run) -> Part:
    part = Part("Two blocks and a last norm in bf16, forward and backward")
    if run.seconds > BLOCKS_END:
        part.failures.append("block: not reached in time")
        return part
    rows, part.failures = gpu_block.measure(run.device, run.dry)
    part.text = "Medians of alternating runs; peak memory beyond the weights.\n\n" + table(rows)
    return part


# --- report --------------------------------------------------------------------------------


def table(rows: list[dict]) -> str:
    return tabulate(rows, headers="keys", tablefmt="github", floatfmt=".4g")


def said(error: Exception) -> str:
    """The kind of an error and its first line."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def finish(make: Callable[[Run], Part], run: Run) -> Part:
    """A part, with its time; an error in it is one of its failures."""
    begin = time.monotonic()
    try:
        part = make(run)
    except Exception as error:
        traceback.print_exc()
        part = Part(make.__name__.capitalize(), failures=[said(error)])
    part.seconds = time.monotonic() - begin
    return part


def head(run: Run) -> str:
    import triton

    name = f"CPU ({platform.machine()})" if run.dry else torch.cuda.get_device_name()
    text = f"# fxfuse on {name}, PyTorch {torch.__version__}, Triton {triton.__version__}\n"
    if run.dry:
        text += (
            "\nDry run: tiny sizes on the CPU, where the ops take their CPU path. "
            "No kernel ran and no figure below says anything about one.\n"
        )
    return text


def report(run: Run) -> Iterator[tuple[str, bool]]:
    """The report piece by piece, each with whether all is well."""
    yield head(run), True
    failures = 0
    for make in (first, bandwidths, blocks):
        part = finish(make, run)
        failures += len(part.failures)
        yield str(part), not part.failures
    verdict = f"{failures} failures" if failures else "All checks passed"
    yield f"{verdict}; {run.seconds:.0f} seconds in all.\n", not failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument("--output", type=Path, help="also write the report to this file")
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.dry_run and not torch.cuda.is_available():
        print("There is no GPU here; --dry-run runs the script on the CPU.", file=sys.stderr)
        return 2
    # One compiler a process: the processes are as many as the cores, and none disturbs a timing.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    if options.dry_run:
        torch.set_num_threads(1)
    run = Run(options.dry_run)
    if options.worker:
        work(options.worker, run)
        return 0
    pieces, passed = [], True
    for piece, well in report(run):
        print(piece, flush=True)
        pieces.append(piece)
        passed &= well
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text("\n".join(pieces))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
