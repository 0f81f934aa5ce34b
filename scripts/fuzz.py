"""Random models, run with fxfuse and without, until the time is up. See scripts/fuzzing/.

A model for which the two differ is cut down to the smallest that still does, and printed as Python
source that `Program.parse` reads. Exit code 1 if there was one.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import queue
import random
import sys
import tempfile
import time
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

# A program that takes longer than this hangs.
PATIENCE = 300.0
# How many programs also go along these routes, which cost more or find less.
SHARES = {"symbolic_trace": 0.3, "symbolic_trace with inputs": 0.3, "make_fx": 0.3, "export": 0.03}
INDUCTOR = ("inductor auto", "inductor always")


@dataclass(frozen=True)
class Report:
    """What a worker says of one program. failures: each in words, with its smallest program."""

    worker: int
    seed: int
    sites: Counter
    routes: Counter
    failures: tuple[str, ...]


@dataclass
class Worker:
    """A process that checks one program after the other."""

    number: int
    process: multiprocessing.Process
    seed: object
    since: float = field(default_factory=time.monotonic)


def routes_of(seed: int, inductor: float) -> list[str]:
    """The routes that the program of a seed takes."""
    choices = random.Random(f"routes {seed}")
    found = ["eager", "aot_eager"]
    found += [name for name, share in SHARES.items() if choices.random() < share]
    return found + (list(INDUCTOR) if choices.random() < inductor else [])


def check_seed(seed: int, inductor: float, ignored: frozenset[str]) -> tuple:
    """Sites, routes, and failures of a seed's program, the first of them cut down."""
    from scripts.fuzzing.check import check
    from scripts.fuzzing.generate import generate
    from scripts.fuzzing.shrink import shrink

    checked = check(generate(seed), routes_of(seed, inductor))
    failures = [f for f in checked.failures if f.kinds - ignored]
    told = [f"# seed {seed}\n{shrink(f)}" for f in failures[:1]]
    told += [f"# seed {seed}, {f.route}: {f.complaints[0]}" for f in failures[1:]]
    return checked.sites, checked.routes, tuple(told)


def work(
    number: int, seeds: object, seed: object, reports: object, inductor: float, ignored: frozenset
) -> None:
    """The loop of a worker. seeds: the next seed of all; seed: where this worker is."""
    import torch

    torch.set_num_threads(1)
    torch._logging.set_logs(all=logging.CRITICAL)
    warnings.simplefilter("ignore")
    while True:
        with seeds.get_lock():
            seed.value = seeds.value
            seeds.value += 1
        reports.put(Report(number, seed.value, *check_seed(seed.value, inductor, ignored)))


class Fuzz:
    """The workers, and what they have found."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.context = multiprocessing.get_context("spawn")
        self.seeds = self.context.Value("q", options.seed)
        self.reports = self.context.Queue()
        self.workers = [self._start(i) for i in range(options.start)]
        self.sites, self.routes, self.programs, self.fused = Counter(), Counter(), 0, 0
        self.failures: list[str] = []

    def run(self) -> None:
        begin = told = time.monotonic()
        end = begin + 60 * self.options.minutes
        while time.monotonic() < end:
            try:
                self._take(self.reports.get(timeout=1.0))
            except queue.Empty:
                self._look_after()
            if time.monotonic() - told > 30:
                told = time.monotonic()
                print(f"{told - begin:6.0f} s: {self.summary()}", flush=True)
        for worker in self.workers:
            worker.process.kill()
            worker.process.join()

    def summary(self) -> str:
        return (
            f"{self.programs} programs, {self.fused} with something fused, "
            f"{sum(self.sites.values())} sites, {len(self.failures)} failures"
        )

    def _start(self, number: int) -> Worker:
        seed = self.context.Value("q", -1)
        ignored = frozenset(self.options.ignore)
        arguments = (number, self.seeds, seed, self.reports, self.options.inductor, ignored)
        process = self.context.Process(target=work, args=arguments, daemon=True)
        process.start()
        return Worker(number, process, seed)

    def _take(self, report: Report) -> None:
        self.programs += 1
        self.fused += bool(report.sites)
        self.sites += report.sites
        self.routes += report.routes
        self.workers[report.worker].since = time.monotonic()
        for failure in report.failures:
            self._tell(failure)

    def _tell(self, failure: str) -> None:
        self.failures.append(failure)
        print(f"\n{failure}", flush=True)
        if self.options.append:
            with self.options.append.open("a") as file:
                file.write(f"{failure}\n\n")

    def _look_after(self) -> None:
        """Start a worker anew that has died, or that has been at one program for too long."""
        for worker in list(self.workers):
            hangs = time.monotonic() - worker.since > PATIENCE
            if worker.process.is_alive() and not hangs:
                continue
            how = "hangs" if hangs else f"ended the process ({worker.process.exitcode})"
            worker.process.kill()
            self._tell(f"# seed {worker.seed.value}: {how}")
            self.workers[worker.number] = self._start(worker.number)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument(
        "--inductor", type=float, default=0.02, metavar="SHARE",
        help="how many of the programs are compiled by Inductor, too (seconds each)",
    )  # fmt: skip
    parser.add_argument("--start", type=int, default=2, metavar="N", help="processes")
    parser.add_argument("--append", type=Path, metavar="FILE", help="write failures there, too")
    parser.add_argument(
        "--ignore", action="append", default=[], metavar="KIND",
        choices=("raises", "facts", "strides", "numbers"),
        help="failures to pass over, while one of that kind is known and not mended",
    )  # fmt: skip
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    with tempfile.TemporaryDirectory(prefix="fxfuse-fuzz-") as cache:
        os.environ.update(TORCHINDUCTOR_CACHE_DIR=cache, TORCHINDUCTOR_COMPILE_THREADS="1")
        fuzz = Fuzz(options)
        fuzz.run()
    print(f"\n{fuzz.summary()}")
    for title, counts in (("sites", fuzz.sites), ("programs along", fuzz.routes)):
        for name, count in counts.most_common():
            print(f"  {title} {name}: {count}")
    return 1 if fuzz.failures else 0


if __name__ == "__main__":
    sys.exit(main())
