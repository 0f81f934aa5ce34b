"""How exact every op is, in each of its forms, as a table that the tests compare with.

    python scripts/accuracy.py            measure and print what is kept, write the table anew
    python scripts/accuracy.py OP ...     print these ops in every width and dtype, write nothing
    python scripts/accuracy.py --sample   measure what the tests do, and show what got worse

No GPU is needed. Each line is about one output or gradient of an op: how many of its bits are those
of eager PyTorch, and how far both are from fp64. The forms: Inductor's own code for the chain of
plain ops; the op in an eager graph on a CPU; inline code under Inductor; and the Triton kernels in
Triton's interpreter (in fp32 and fp16, since it truncates where a GPU rounds to bf16).
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import itertools
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
from gpu_numbers import Inputs, Results, allowed, by_chain
from op_cases import BF16, CASES, FP16, FP32, Case, Tensors
from tabulate import tabulate
from torch import Tensor

import fxfuse

TABLE = Path(__file__).parents[1] / "tests" / "kernels" / "accuracy.tsv"
# The dtypes of rows and of weights.
DTYPES = {"fp32": (FP32, FP32), "fp16": (FP16, FP16), "bf16": (BF16, BF16), "mixed": (BF16, FP32)}
INDUCTOR, EAGER_OP, INLINE, KERNEL = "inductor", "op", "inline", "kernel"
FORMS = (EAGER_OP, INLINE, INDUCTOR, KERNEL)
WIDTHS = (1, 7, 64, 128, 256, 1000, 2880, 4096, 8192, 16384, 65536, 131072)
# What is kept as a table: each of these is a compilation of seconds.
KEPT = {"bf16": (1, 64, 1000, 4096, 131072), "fp32": (7, 1000, 131072), "fp16": (1000,)}
KEPT |= {"mixed": (1000,)}
KEPT_FORMS = {EAGER_OP: KEPT, INLINE: KEPT, INDUCTOR: dict.fromkeys(DTYPES, (1000,))}
KEPT_FORMS[KERNEL] = dict.fromkeys(("fp32", "fp16"), (1, 7, 64, 1000, 2880, 8192))
# Elements of a tensor: from so many on the op runs a compiled formula; the interpreter is slow.
ELEMENTS, KERNEL_ELEMENTS = 1 << 16, 1 << 13
FEWEST_ROWS, MOST_KERNEL_ROWS = 4, 512
# Gradients of weights have as many elements as there are columns. There are so many draws that
# their errors are not those of a handful of numbers.
WEIGHTS = 128


@dataclass(frozen=True)
class Place:
    """What is measured together: an op, N columns, and dtypes by the name that they have here."""

    op: str
    N: int
    dtypes: str
    form: str

    @property
    def rows(self) -> int:
        if self.form == KERNEL:
            return max(min(KERNEL_ELEMENTS // self.N, MOST_KERNEL_ROWS), FEWEST_ROWS)
        return max(-(-ELEMENTS // self.N), FEWEST_ROWS)

    @property
    def draws(self) -> int:
        if not CASES[self.op].weights:
            return 1
        return min(-(-WEIGHTS // self.N), 8 if self.form == KERNEL else WEIGHTS)


@dataclass(frozen=True)
class Accuracy:
    """Of one output or gradient.

    dtype: of the tensor. equal, one, more: the percentages of its elements that have eager's bits,
    are the next number of the dtype, or are farther away. largest: the most such steps. error:
    relative RMS distance from fp64. eager: the same of the chain of plain ops.
    """

    dtype: str
    equal: float
    one: float
    more: float
    largest: int
    error: float
    eager: float


Line = tuple[Place, str]  # of which output or gradient


# ------------------------------------------------------------ what is measured


def kept() -> Iterator[Place]:
    """The lines of the table."""
    for op, (form, widths) in itertools.product(CASES, KEPT_FORMS.items()):
        for dtypes, some in widths.items():
            yield from (Place(op, N, dtypes, form) for N in some if N % groups(op) == 0)


def all_of(ops: Iterable[str]) -> Iterator[Place]:
    for op, form, dtypes, N in itertools.product(ops, FORMS, DTYPES, WIDTHS):
        if N % groups(op) == 0 and (form != KERNEL or dtypes in KEPT_FORMS[KERNEL]):
            yield Place(op, N, dtypes, form)


def groups(op: str) -> int:
    return CASES[op].statistics if op.startswith("silu_gate_rms_norm") else 1


def sample() -> list[Place]:
    """All ops, and between them all dtypes, on a CPU in one of the two forms."""
    dtypes = itertools.cycle(("bf16", "fp32", "fp16"))
    forms = itertools.cycle((INLINE, INLINE, EAGER_OP, EAGER_OP))
    found = [Place(op, 1000, name, form) for op, name, form in zip(CASES, dtypes, forms)]
    dtypes = itertools.cycle(KEPT_FORMS[KERNEL])
    return found + [Place(op, 1000, name, KERNEL) for op, name in zip(CASES, dtypes)]


def draw(case: Case, place: Place, seed: int) -> Inputs:
    """Normal operands, gradients of y and, where the op takes it, the residual gradient."""
    M, N = place.rows, place.N
    rows, weights = DTYPES[place.dtypes]
    generator = torch.Generator().manual_seed(seed * 1000003 + N)

    def normal(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    operands = [normal(rows, M, N) for _ in case.rows] + [normal(weights, N) for _ in case.weights]
    dres = normal(rows, M, N) if case.results > 1 else None
    return Inputs(operands, [normal(rows, M, N)], dres)


def with_a_reader(x: Tensor, weight: Tensor) -> Tensors:
    """What becomes a fork: x is normed, and read afterwards."""
    y, x = CASES["rms_norm"].chain(x, weight)
    return y, x * 1.0


def case_of(place: Place) -> Case:
    case = CASES[place.op]
    return replace(case, chain=with_a_reader) if place.op == "rms_norm_fork" else case


# ------------------------------------------------------------ the forms


def measure(place: Place) -> dict[str, Accuracy]:
    """By name, the outputs and gradients of an op."""
    case, tallies = case_of(place), {}
    torch._dynamo.reset()
    with fxfuse.record() as reports:
        form = replace(case, chain=form_of(place.form, case.chain))
        for seed in range(place.draws):
            inputs = draw(case, place, seed)
            found, eager = by_chain(form, inputs), by_chain(case, inputs)
            exact = by_chain(case, inputs, exact=True)
            for name in names(case, exact):
                tally = tallies.setdefault(name, Tally(found[name].dtype))
                tally.add(found[name], eager[name], exact[name])
    must_be_fused(place, reports)
    return {name: tally.result() for name, tally in tallies.items()}


def form_of(form: str, chain: Callable) -> Callable:
    compile_ = functools.partial(torch.compile, chain, dynamic=False, fullgraph=True)
    if form == INDUCTOR:
        return compile_()
    if form == INLINE:
        return compile_(backend=fxfuse.backend)
    return compile_(backend=fxfuse.make_backend("eager", policy="always"))


def names(case: Case, found: Results) -> list[str]:
    """Without an input that is only handed on."""
    sums = "residual" in case.rows
    return [name for name in found if name != "h" or sums]


def must_be_fused(place: Place, reports: Sequence[fxfuse.Report]) -> None:
    if place.form == INDUCTOR:
        return
    ops = {match.op for report in reports for match in report.matches}
    if ops != {f"fxfuse::{place.op.partition(',')[0]}"}:
        raise RuntimeError(f"{place} was not fused: {ops}")


class Tally:
    """Adds up how far tensors of one dtype are from eager's and from fp64."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.steps = dtype, [0, 0, 0]
        self.largest, self.squares = 0, [0.0, 0.0, 0.0]

    def add(self, found: Tensor, eager: Tensor, exact: Tensor) -> None:
        apart = steps_apart(found, eager)
        for i, equal in enumerate((apart == 0, apart == 1, apart > 1)):
            self.steps[i] += int(equal.sum())
        self.largest = max(self.largest, int(apart.max()))
        for i, t in enumerate((found.double() - exact, eager.double() - exact, exact)):
            self.squares[i] += float(t.square().sum())

    def result(self) -> Accuracy:
        shares = (round(100 * n / sum(self.steps), 4) for n in self.steps)
        *errors, scale = (s**0.5 for s in self.squares)
        errors = (float(f"{e / max(scale, 1e-300):.4e}") for e in errors)
        return Accuracy(str(self.dtype).removeprefix("torch."), *shares, self.largest, *errors)


def ordinal(t: Tensor) -> Tensor:
    """The place of each element among all numbers of its dtype, so that neighbours differ by 1."""
    bits = t.contiguous().view({2: torch.int16, 4: torch.int32}[t.element_size()]).long()
    return torch.where(bits < 0, -(bits & (2 ** (8 * t.element_size() - 1) - 1)), bits)


def steps_apart(a: Tensor, b: Tensor) -> Tensor:
    """How many numbers of their dtype two tensors are from one another, element by element."""
    assert a.dtype == b.dtype
    return (ordinal(a) - ordinal(b)).abs()


# ------------------------------------------------------------ the bounds

# Of forward outputs in half precision: the least percentage with eager's bits, and the most steps.
EQUAL = 99.0
# Against the table: errors are those of roundings, which an order of sums hardly changes in half
# precision, but in fp32; LEAST is half a step of fp32. Percentages of bits, where few differ.
HALF_SLACK, FP32_SLACK, LEAST = 1.02, 1.25, 2.0**-25
EQUAL_SLACK = 0.25
# The most steps from eager's: one for the order of a sum, two where a chain rounds before the end.
STEPS = {"rms_norm": 1, "rms_norm_fork": 1, "add_rms_norm": 1}


def faults(place: Place, name: str, found: Accuracy) -> Iterator[str]:
    """The bounds that a result of ours does not keep."""
    if place.form == INDUCTOR:
        return
    dtype = getattr(torch, found.dtype)
    most = allowed(name, found.eager, dtype)
    if found.error > most:
        yield f"{found.error:.3e} from fp64, allowed are {most:.3e}"
    if dtype != FP32 and not name.startswith("d"):
        if found.equal < EQUAL:
            yield f"{found.equal} % of the bits are eager's"
        if found.largest > STEPS.get(place.op, 2):
            yield f"{found.largest} steps from eager"


def losses(found: dict[Line, Accuracy], before: dict[Line, Accuracy]) -> Iterator[tuple[Line, str]]:
    """What is worse than it was, by more than another order of sums makes of it."""
    for line, one in found.items():
        old = before[line]
        if one.dtype != old.dtype:
            yield line, f"{one.dtype}, was {old.dtype}"
        half = one.dtype != "float32"
        if one.error > (HALF_SLACK if half else FP32_SLACK) * old.error + LEAST:
            yield line, f"{one.error:.3e} from fp64, was {old.error:.3e}"
        if half and one.equal < old.equal - EQUAL_SLACK:
            yield line, f"{one.equal} % of the bits are eager's, were {old.equal} %"


# ------------------------------------------------------------ the table


HEAD = (*(f.name for f in fields(Place)), "result", *(f.name for f in fields(Accuracy)))


def write(found: dict[Line, Accuracy], path: Path = TABLE) -> None:
    lines = [HEAD] + [
        (*vars(place).values(), name, *vars(accuracy).values())
        for (place, name), accuracy in found.items()
    ]
    path.write_text("".join("\t".join(map(str, line)) + "\n" for line in lines))


def read(path: Path = TABLE) -> dict[Line, Accuracy]:
    found = {}
    for line in path.read_text().splitlines()[1:]:
        op, N, dtypes, form, name, dtype, equal, one, more, largest, *errors = line.split("\t")
        shares, errors = map(float, (equal, one, more)), map(float, errors)
        place = Place(op, int(N), dtypes, form)
        found[place, name] = Accuracy(dtype, *shares, int(largest), *errors)
    return found


def measure_all(chosen: Sequence[Place], processes: int | None = None) -> dict[Line, Accuracy]:
    """In processes of their own, since Triton's interpreter is chosen for a whole process."""
    found = {}
    for interpreted in (False, True):
        some = [place for place in chosen if (place.form == KERNEL) == interpreted]
        with concurrent.futures.ProcessPoolExecutor(
            processes,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=prepare,
            initargs=(interpreted,),
        ) as pool:
            found |= dict(zip(some, pool.map(measure, some)))
    return {(place, name): found[place][name] for place in chosen for name in found[place]}


def prepare(interpreted: bool) -> None:
    """Before Triton is imported."""
    torch.set_num_threads(1)
    os.environ["TRITON_INTERPRET"] = str(int(interpreted))


def show(found: dict[Line, Accuracy]) -> str:
    head = (
        "op", "columns", "dtypes", "form", "", "dtype", "equal %", "one step %", "more %",
        "largest", "error", "eager's", "ratio",
    )  # fmt: skip
    rows = [
        (*vars(place).values(), name, *vars(one).values(), one.error / max(one.eager, 1e-300))
        for (place, name), one in found.items()
    ]
    return tabulate(rows, head, floatfmt=(*[""] * 6, ".2f", ".3f", ".3f", "", ".2e", ".2e", ".3f"))


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ops", nargs="*", metavar="OP", help=f"any of {', '.join(CASES)}")
    parser.add_argument("--sample", action="store_true", help="compare a sample with the table")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args(argv)
    unknown = [op for op in options.ops if op not in CASES]
    if unknown:
        parser.error(f"no op {unknown[0]!r}: choose from {', '.join(CASES)}")
    chosen = sample() if options.sample else list(all_of(options.ops) if options.ops else kept())
    found = measure_all(chosen, options.processes)
    print(show(found))
    wrong = [f"{line}: {text}" for line, one in found.items() for text in faults(*line, one)]
    if options.sample:
        wrong += [f"{line}: {text}" for line, text in losses(found, read())]
    elif not options.ops:
        write(found)
    print(*wrong, sep="\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
