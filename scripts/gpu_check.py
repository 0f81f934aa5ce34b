"""Check fxfuse's ops on a GPU: numbers against fp64, repeatability, bandwidth, and whole blocks.

    python scripts/gpu_check.py                                    all of it, in under six minutes
    python scripts/gpu_check.py --output scripts/results/NAME.md   the same, kept as Markdown
    python scripts/gpu_check.py --json FILE --plot FILE.png        as JSON, and as a plot
    python scripts/gpu_check.py --wheels FOLDER                    with packages to compare with
    python scripts/gpu_check.py --dry-run                          tiny, on the CPU, no kernels
    python scripts/gpu_check.py --dry-run --interpret              kernels in Triton's interpreter

First the ops are checked, in as many processes as there are cores, which also compile what is timed
afterwards, one after the other. Exit code 1 when a check fails, or is not reached in time; a target
of speed that is missed, or a timing that is not reached, only stands in the report.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import gpu_block
import gpu_ceilings
import gpu_numbers
import gpu_parts
import gpu_peers
import gpu_plot
import gpu_pool
import gpu_race
import gpu_speed
import gpu_time
import torch
from gpu_parts import Part, Run
from op_cases import CASES

# Since the beginning, in seconds: when a part ends, or begins nothing new.
ENDS = {
    "numbers": 165, "large": 185, "ceilings": 195, "sweep": 215, "compare": 290, "block": 315,
    "race": 340,
}  # fmt: skip
PARTS = (*ENDS, "targets")
INTERPRETED_SECONDS = 3600  # for the numbers, which are all that is done there
DRY_WORKERS, MOST_WORKERS = 2, 16
SHOWN = 10  # failures of one task
Task = Callable[[], gpu_pool.Found]


# --- in processes of their own -------------------------------------------------------------


def tasks(run: Run, only: tuple[str, ...]) -> dict[str, Task]:
    """What is done in other processes: the checks first, and what would take long at the end."""
    checks = {
        f"check {name}, {str(dtype).removeprefix('torch.')}": functools.partial(
            checked, name, dtype, run
        )
        for dtype in scope(run).dtypes
        for name in CASES
    }
    found = compilations(run, only)
    blocks = {name: task for name, task in found.items() if name.startswith("compile blocks")}
    return blocks | (checks if "numbers" in only else {}) | found


def compilations(run: Run, only: tuple[str, ...]) -> dict[str, Task]:
    """What fills the caches for the parts that are timed."""
    if run.interpreted:
        return {}
    device, dry = run.device, run.dry
    found = {}
    found["block"] = {
        f"compile blocks, {name}": functools.partial(gpu_block.prepare, name, device, dry)
        for name in gpu_block.backends(dry)
    }
    found["compare"] = {
        f"compile {shape}": functools.partial(gpu_speed.prepare, shape, device, dry)
        for shape in gpu_speed.compared(dry)
    }
    found["race"] = {
        f"compile cuts of {shape}": functools.partial(gpu_race.prepare, shape, device, dry)
        for shape in gpu_race.shapes(dry)
    }
    found["sweep"] = {
        f"compile {name}": functools.partial(gpu_speed.prepare_ours, name, device, dry)
        for name in CASES
    }
    found["ceilings"] = {"compile ceilings": functools.partial(gpu_ceilings.prepare, device)}
    taken = {name: task for part in only for name, task in found.get(part, {}).items()}
    return {name: functools.partial(compiled, task) for name, task in taken.items()}


def compiled(task: Callable[[], None]) -> gpu_pool.Found:
    task()
    return {"failures": []}


def checked(name: str, dtype: torch.dtype, run: Run) -> gpu_pool.Found:
    checks, failures = gpu_numbers.check(CASES[name], dtype, run.device, scope(run))
    passed = checks - len({text.partition(": ")[0] for text in failures})
    return {"failures": failures, "passed": f"{passed} of {checks}"}


def scope(run: Run) -> gpu_numbers.Scope:
    if run.interpreted:
        return gpu_numbers.INTERPRETED
    return gpu_numbers.DRY if run.dry else gpu_numbers.FULL


def healthy() -> bool:
    """Whether the GPU still takes work: after a bad access it takes none from this process."""
    try:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def numbers(part: Part, run: Run, end: float, only: tuple[str, ...]) -> None:
    """Check all ops, and compile what is timed."""
    part.text = (
        "Outputs and gradients against fp64 and plain ops, in memory full of NaN; the bits of two "
        "runs; rows beside bad rows."
    )
    names = list(tasks(run, only))
    count = DRY_WORKERS if run.dry else min(MOST_WORKERS, len(os.sched_getaffinity(0)))
    given = [flag for flag, on in (("--dry-run", run.dry), ("--interpret", run.interpreted)) if on]
    given += ["--wheels", str(run.wheels)] if run.wheels else []
    command = [sys.executable, __file__, *given, "--worker"]
    seconds = INTERPRETED_SECONDS if run.interpreted else end - run.seconds
    found = {one.pop("task"): one for one in gpu_pool.run(names, command, count, seconds)}
    for name in names:
        failures = found[name].pop("failures")
        lines = [f"{name}, {text}" for text in failures[:SHOWN]]
        lines += [f"{name}: {len(failures) - SHOWN} more"] if failures[SHOWN:] else []
        late = name.startswith("compile") and failures in gpu_pool.LATE
        (part.notes if late else part.failures).extend(lines)
        part.rows.append({"": name, **found[name]})


# --- report --------------------------------------------------------------------------------


def head(run: Run) -> str:
    import triton

    name = f"CPU ({platform.machine()})" if run.dry else torch.cuda.get_device_name()
    text = f"# fxfuse on {name}, PyTorch {torch.__version__}, Triton {triton.__version__}\n"
    if run.interpreted:
        text += "\nTiny sizes in Triton's interpreter; not in bf16, to which it truncates.\n"
    elif run.dry:
        text += (
            "\nDry run: tiny sizes on the CPU, where the ops take their CPU path. "
            "No kernel ran and no figure below says anything about one.\n"
        )
    return text


def parts(run: Run, only: tuple[str, ...], plot: Path | None) -> Iterator[Part]:
    """The parts of the report, one after the other; each is made whatever the others found."""
    swept: list[gpu_speed.Row] = []
    compared: list[gpu_speed.Row] = []
    made = {
        "numbers": ("Numbers, and compiling what is timed", functools.partial(numbers, only=only)),
        "large": ("More than 2**31 elements", gpu_parts.large),
        "ceilings": ("Ceilings", gpu_parts.ceilings),
        "sweep": ("Shares of the ceilings", functools.partial(gpu_parts.sweep, kept=swept)),
        "compare": ("Beside others", functools.partial(gpu_parts.compare, kept=compared)),
        "block": ("Two blocks and a last norm in bf16, forward and backward", gpu_parts.block),
        "race": ("Cuts of the backward kernels", gpu_parts.race),
    }
    for name, (title, fill) in made.items():
        if name in only:
            begin = functools.partial(fill, run=run, end=ENDS[name])
            yield gpu_parts.finish(begin, Part(title))
    if "targets" in only:
        fill = functools.partial(gpu_parts.targets, swept=swept, compared=compared)
        yield gpu_parts.finish(fill, Part("Targets"))
    if plot is not None:
        yield plotted(swept, head(run).splitlines()[0].lstrip("# "), plot)


def plotted(rows: list[gpu_speed.Row], title: str, path: Path) -> Part:
    part = Part("Plot")
    try:
        gpu_plot.draw(rows, title, path)
        part.text = f"In {path}."
    except ImportError as error:
        part.notes = [f"no plot: {error}"]
    return part


def main() -> int:
    options = parsed()
    if not options.dry_run and not torch.cuda.is_available():
        print("There is no GPU here; --dry-run runs the script on the CPU.", file=sys.stderr)
        return 2
    run = Run(options.dry_run, options.interpret, options.wheels)
    only = ("numbers",) if options.interpret else tuple(options.only or PARTS)
    prepare_process(run)
    if options.worker:
        gpu_pool.answer(tasks(run, PARTS), healthy)
        return 0
    pieces, found = [head(run)], []
    print(pieces[0], flush=True)
    for part in parts(run, only, options.plot):
        print(part, flush=True)
        pieces.append(str(part))
        found.append(part)
    failures = sum(len(part.failures) for part in found)
    verdict = f"{failures} failures" if failures else "All checks passed"
    pieces.append(f"{verdict}; {run.seconds:.0f} seconds in all.\n")
    print(pieces[-1])
    write(options.output, "\n".join(pieces))
    kept = {"on": pieces[0].splitlines()[0].lstrip("# "), "dry": run.dry, "verdict": verdict}
    write(options.json, json.dumps(kept | {"parts": [p.as_json() for p in found]}, indent=1))
    return 1 if failures else 0


def prepare_process(run: Run) -> None:
    """Before anything is compiled or timed."""
    # One compiler a process: the processes are as many as the cores, and none disturbs a timing.
    torch._inductor.config.compile_threads = 1
    if run.interpreted:
        os.environ["TRITON_INTERPRET"] = "1"
    if run.wheels is not None:
        gpu_peers.add_folder(run.wheels)
    # What Inductor finds fastest while other processes use the GPU is not to be kept.
    torch._inductor.config.autotune_local_cache = False
    if run.dry:
        torch.set_num_threads(1)
    gpu_time.begin(run.device)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument("--interpret", action="store_true", help="kernels in Triton's interpreter")
    parser.add_argument("--only", nargs="+", choices=PARTS, metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write the report to it")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures to it")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw shares of the ceilings")
    parser.add_argument("--wheels", type=Path, metavar="FOLDER", help="packages to compare with")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.interpret and not options.dry_run:
        parser.error("--interpret goes with --dry-run")
    for path in (options.output, options.json, options.plot):
        if path is not None and path.is_dir():
            parser.error(f"{path} is a folder: give a file to write to")
    return options


def write(path: Path | None, text: str) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


if __name__ == "__main__":
    sys.exit(main())
