"""Runs a program along routes, with fxfuse and without, and says what is wrong."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import torch

from scripts.fuzzing.judge import Complaint, Runs, judge
from scripts.fuzzing.noise import Noisy
from scripts.fuzzing.outcome import Outcome, run
from scripts.fuzzing.program import Program
from scripts.fuzzing.routes import ROUTES, NoRoute, Prepared, Route

# The inputs by which a suspicion is judged.
SEEDS = range(8)


@dataclass(frozen=True)
class Failure:
    """A program that fxfuse gets wrong along a route."""

    program: Program
    route: str
    complaints: tuple[Complaint, ...]

    @property
    def kinds(self) -> set[str]:
        return {c.kind for c in self.complaints}

    def __str__(self) -> str:
        what = "\n".join(f"# {self.route}: {c}" for c in self.complaints)
        return f"{what}\n{self.program.source}"


@dataclass
class Checked:
    """What came of a program. sites: by pattern, of all its routes."""

    failures: list[Failure] = field(default_factory=list)
    sites: Counter = field(default_factory=Counter)
    routes: Counter = field(default_factory=Counter)


def check(program: Program, routes: Iterable[str]) -> Checked:
    """Run a program along the routes of these names."""
    found = Checked()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in routes:
            route = ROUTES[name]
            try:
                complaints, sites = _along(program, route)
            except NoRoute:
                continue
            found.routes[name] += 1
            found.sites += sites
            if complaints:
                found.failures.append(Failure(program, name, tuple(complaints)))
    return found


def _along(program: Program, route: Route) -> tuple[list[Complaint], Counter]:
    try:
        prepared = route.prepare(program)
    except NoRoute:
        raise
    except Exception as error:
        return [Complaint("raises", "fxfuse", f"{type(error).__name__}: {error}")], Counter()
    exact, narrow = _twins(program)

    def runs_of(seeds: Iterable[int], noisy: bool = False) -> Runs:
        calls = prepared.reference, prepared.fused
        ran = [[run(program, call, seed) for seed in seeds] for call in calls]
        noise = _noisy(program, seeds) if noisy else []
        return Runs(program, *ran, exact(seeds), narrow(seeds), noise)

    runs, sites = runs_of([0]), prepared.counts()
    complaints = judge(runs, bits=route.exact)
    if any(c.kind == "numbers" for c in complaints):
        runs = runs_of(SEEDS, noisy=True)
        complaints = judge(runs, bits=route.exact)
    return _ours(complaints, runs, prepared, route), sites


def _ours(
    complaints: list[Complaint], runs: Runs, prepared: Prepared, route: Route
) -> list[Complaint]:
    """The complaints that the same route without fxfuse does not give rise to as well."""
    if not complaints:
        return []
    call = prepared.plain()
    plain = [run(runs.program, call, seed) for seed in range(len(runs.fused))]
    theirs = judge(replace(runs, fused=plain), route.exact)
    known = {(c.kind, c.what) for c in theirs}
    if plain[0].stage == "forward" or any(c.kind == "raises" for c in theirs):
        return []
    return [c for c in complaints if (c.kind, c.what) not in known]


def _noisy(program: Program, seeds: Iterable[int]) -> list[Outcome]:
    """The runs of a program with steps that err."""
    found = []
    for seed in seeds:
        with Noisy(seed):
            found.append(run(program, program.function(), seed))
    return [] if any(o.stage for o in found) else found


def _twins(program: Program) -> tuple[Callable, Callable]:
    """The runs of a program in fp64, and in fp32 where it is in fp64 itself, by their seeds."""

    def in_dtype(dtype: torch.dtype) -> Callable[[Iterable[int]], list[Outcome]]:
        def outcomes(seeds: Iterable[int]) -> list[Outcome]:
            twin = program.twin(dtype).function()
            found = [run(program, twin, seed, dtype) for seed in seeds]
            return [] if any(o.stage for o in found) else found

        return outcomes

    only_fp64 = program.dtypes() == {torch.float64}
    return in_dtype(torch.float64), in_dtype(torch.float32) if only_fp64 else lambda seeds: []
