"""The command line: `fxfuse inspect TARGET` and `fxfuse verify TARGET`.

Exit codes: 0 done, 1 an `--expect` does not hold or the numbers differ, 2 the command or its target
cannot be used (one line on stderr). torch is imported only once a command has been understood.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import sys
import traceback
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence

from fxfuse import arguments, errors


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv`, by default that of the process; returns the exit code."""
    try:
        options = arguments.parse(argv)
    except SystemExit as end:
        return end.code
    try:
        command = {"inspect": inspect_target, "verify": verify_target}[options.command]
        return command(options)
    except errors.FxfuseError as error:
        if options.traceback:
            traceback.print_exception(error.__cause__ or error)
        print(f"fxfuse: {error}", file=sys.stderr)
        return 2


def inspect_target(options: Namespace) -> int:
    """`fxfuse inspect`: print the sites of a model."""
    expected = dict(_expectation(text) for text in options.expect)
    _quieten()
    from fxfuse import listing, placing

    _load_patterns(options.patterns, (*(options.pattern or ()), *expected))
    with contextlib.redirect_stdout(sys.stderr):  # what the model prints is not ours
        report = look(
            options.target,
            given=options.input,
            settings=options.set,
            train=options.train,
            device=options.device,
            patterns=options.pattern,
            policy=options.policy,
        )
    if options.json:
        print(report.to_json())
    else:
        parts = (
            listing.decided_for(
                options.device or placing.present(), asked=options.device is not None
            ),
            listing.sites(report),
            listing.misses(report, options.why),
            listing.totals(report),
        )
        print("\n\n".join(part for part in parts if part))
    wrong = [(n, want, report.counts.get(n, 0)) for n, want in expected.items()]
    wrong = [f"{n} {found} instead of {want}" for n, want, found in wrong if found != want]
    if wrong:
        print(f"fxfuse: not as expected: {', '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


def verify_target(options: Namespace) -> int:
    """`fxfuse verify`: print whether a model computes the same fused and eager."""
    _quieten()
    _load_patterns(options.patterns, options.pattern or ())
    with contextlib.redirect_stdout(sys.stderr):
        note, found = check(
            options.target,
            given=options.input,
            settings=options.set,
            train=options.train,
            device=options.device,
            full=options.full,
            seed=options.seed,
            patterns=options.pattern,
            policy=options.policy,
            inner=options.inner,
        )
    if note:
        print(note, file=sys.stderr if options.json else sys.stdout, end="\n\n")
    print(found.to_json() if options.json else found.to_table())
    if not found.deterministic:
        print(f"fxfuse: {options.target}: {found.reason}", file=sys.stderr)
        return 2
    return 0 if found else 1


def _load_patterns(files: Iterable[str], names: Iterable[str]) -> None:
    from fxfuse import registry

    for path in files:
        registry.load_file(path)
    for name in names:
        registry.select([name])


def check(
    target: str,
    given: Iterable[str] = (),
    settings: Iterable[str] = (),
    train: bool | None = None,
    device: str = "cpu",
    full: bool = False,
    seed: int = 0,
    **choice: object,
):
    """How a TARGET was made smaller, in words, and its `Verification`.

    given, settings: the texts of --input and --set. choice: `patterns`, `policy` and `inner` as in
    `verify`. Seeds the random numbers of the process. Raises `errors.TargetError`.
    """
    import torch

    from fxfuse import targets
    from fxfuse.verifying import verify

    if device == "cuda" and not torch.cuda.is_available():
        expected = "PyTorch finds no GPU here, so say cpu"
        raise errors.BadOption(option="--device", value=device, expected=expected)
    torch.manual_seed(seed)
    found = targets.load(target, given, settings, train, targets.Real(device, full))
    choice["train"] = train is not False
    try:
        return found.note, verify(found.model, *found.args, **choice, **found.kwargs)
    except errors.FxfuseError:
        raise
    except Exception as error:
        raise targets.blame(target, "running the model", error) from error


def look(
    target: str,
    given: Iterable[str] = (),
    settings: Iterable[str] = (),
    train: bool | None = None,
    device: str | None = None,
    **choice: object,
):
    """The `Report` on a TARGET.

    given, settings: the texts of --input and --set. device: one of `arguments.TARGETS`.
    choice: `patterns` and `policy` as in `explain`. Raises `errors.TargetError`.
    """
    from fxfuse import placing, targets
    from fxfuse.rewrite import rewrite
    from fxfuse.trace import explain

    found = targets.load(target, given, settings, train)
    choice["target"] = device or placing.present()
    try:
        if found.program is not None:
            return rewrite(found.program.graph_module, compiled=True, **choice)
        choice["train"] = train is not False
        with _no_collection():
            return explain(found.model, *found.args, **choice, **found.kwargs)
    except errors.FxfuseError:
        raise
    except Exception as error:
        raise targets.blame(target, "tracing the model", error) from error


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """A trace is made of objects that stay: looking for garbage takes a tenth of its time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _expectation(text: str) -> tuple[str, int]:
    name, _, count = text.partition("=")
    if not name or not count.isdecimal():
        raise errors.BadExpectation(text=text)
    return name, int(count)


def _quieten() -> None:
    """One line says what is wrong; the logs of torch and transformers say it in many."""
    import torch

    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if "TORCH_LOGS" not in os.environ:
        torch._logging.set_logs(all=logging.CRITICAL)
