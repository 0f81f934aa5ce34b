"""The command line: `fxfuse inspect TARGET`.

Exit codes: 0 done, 1 an `--expect` does not hold, 2 the command or its target cannot be used (one
line on stderr). torch is imported only once a command has been understood.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
import traceback
from collections.abc import Callable, Sequence

from fxfuse import errors

TARGETS = ("cpu", "sm_80", "sm_90", "sm_100")
_ABOUT = "Find residual-add + RMSNorm in PyTorch models, and say what would be fused and why not."
_TARGET = """\
TARGET is one of
  path/to/file.py:factory      the factory returns a model, (model, args) or (model, args, kwargs)
  package.module:factory
  hf:NAME                      a model type of the installed transformers, with its default config
  hf:path/to/config.json
  path/to/program.pt2          saved by torch.export.save
It is built and traced on the meta device: nothing is computed, and no weight is read.

"""
_EXAMPLES = """\
examples
  fxfuse inspect hf:llama --set num_hidden_layers=4
  fxfuse inspect shop/model.py:build --input 2x128xbfloat16 --target sm_90 --why
  fxfuse inspect shop.model:build --input ids=1x2048xint64 --expect add_rms_norm=64
  fxfuse inspect hf:configs/llama70b.json --json > report.json

exit codes: 0 done, 1 an --expect does not hold, 2 the target cannot be used
"""
_AS_WRITTEN = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}


class _Parser(argparse.ArgumentParser):
    """Errors are one line, without the usage."""

    def error(self, message: str):
        print(f"{self.prog}: {message} (see {self.prog} --help)", file=sys.stderr)
        sys.exit(2)


def parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    top = _Parser(prog="fxfuse", description=_ABOUT, epilog=_EXAMPLES, **_AS_WRITTEN)
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    inspect = commands.add_parser(
        "inspect",
        help="show the sites of a model, and why the others are left alone",
        description="Show which sites of a model would be fused, and why the rest would not.",
        epilog=_TARGET + _EXAMPLES,
        **_AS_WRITTEN,
    )
    inspect.add_argument("target", metavar="TARGET", help="the model: see below")
    inspect.set_defaults(run=inspect_target, parser=inspect)
    _add_building(inspect.add_argument_group("how to build and trace it").add_argument)
    _add_looking(inspect.add_argument_group("what to look for").add_argument)
    _add_printing(inspect.add_argument_group("what to print").add_argument)
    return top


def _add_building(add: Callable) -> None:
    text = "2x128xbfloat16, x=2x16x64, ids=1x2048xint64 (repeatable)"
    add("--input", action="append", metavar="SPEC", default=[], help=text)
    text = "a value of an hf: config, as in hidden_size=8192 (repeatable)"
    add("--set", action="append", metavar="KEY=VALUE", default=[], help=text)
    text = "decide for this device (default: the GPU that is present, else sm_90)"
    add("--target", choices=TARGETS, dest="device", help=text)
    text = "with or without gradients and train mode (default: with, in the mode the model has)"
    add("--train", action=argparse.BooleanOptionalAction, default=None, help=text)


def _add_looking(add: Callable) -> None:
    add("--pattern", action="append", metavar="NAME", help="only this pattern (repeatable)")
    text = "a file with patterns of your own (repeatable)"
    add("--patterns", action="append", metavar="FILE", default=[], help=text)
    text = "auto: where it pays; always: wherever it is right; never: report only"
    add("--policy", choices=("auto", "always", "never"), default="auto", help=text)


def _add_printing(add: Callable) -> None:
    add("--why", action="store_true", help="every near miss with its reason")
    add("--json", action="store_true", help="the report as JSON")
    text = "exit with 1 unless the pattern has this many sites (repeatable)"
    add("--expect", action="append", metavar="NAME=COUNT", default=[], help=text)
    text = "the whole traceback of what went wrong"
    add("--traceback", action="store_true", help=text)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv`, by default that of the process; returns the exit code."""
    try:
        options = _parse(argv)
    except SystemExit as end:
        return end.code
    try:
        return options.run(options)
    except errors.FxfuseError as error:
        if options.traceback:
            traceback.print_exception(error.__cause__ or error)
        print(f"fxfuse: {error}", file=sys.stderr)
        return 2


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    options, unknown = parser().parse_known_args(argv)
    if unknown:
        known = [text for text in options.parser._option_string_actions if text.startswith("--")]
        options.parser.error(f"unknown option {unknown[0]}: the options are {', '.join(known)}")
    return options


def inspect_target(options: argparse.Namespace) -> int:
    """`fxfuse inspect`: print the sites of a model."""
    expected = dict(_expectation(text) for text in options.expect)
    _quieten()
    from fxfuse import listing, registry

    for path in options.patterns:
        registry.load_file(path)
    for name in (*(options.pattern or ()), *expected):
        registry.select([name])
    with contextlib.redirect_stdout(sys.stderr):  # what the model prints is not ours
        report = _look(options)
    if options.json:
        print(report.to_json())
    else:
        parts = (listing.sites(report), listing.misses(report, options.why), listing.totals(report))
        print("\n\n".join(part for part in parts if part))
    wrong = [(n, want, report.counts.get(n, 0)) for n, want in expected.items()]
    wrong = [f"{n} {found} instead of {want}" for n, want, found in wrong if found != want]
    if wrong:
        print(f"fxfuse: not as expected: {', '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


def _look(options: argparse.Namespace):
    """The report on the target that the options name."""
    from fxfuse import targets
    from fxfuse.rewrite import rewrite
    from fxfuse.trace import explain

    target = targets.load(options.target, options.input, options.set, options.train)
    choice = {
        "patterns": options.pattern,
        "policy": options.policy,
        "target": options.device or _device(),
    }
    try:
        if target.program is not None:
            return rewrite(target.program.graph_module, compiled=True, **choice)
        train = options.train is not False
        return explain(target.model, *target.args, train=train, **choice, **target.kwargs)
    except errors.FxfuseError:
        raise
    except Exception as error:
        raise targets.blame(options.target, "tracing the model", error) from error


def _expectation(text: str) -> tuple[str, int]:
    name, _, count = text.partition("=")
    if not name or not count.isdecimal():
        raise errors.BadExpectation(text=text)
    return name, int(count)


def _device() -> str:
    """The GPU that is present, as the newest of `TARGETS` that is not newer; else sm_90."""
    import torch

    if not torch.cuda.is_available() or torch.version.hip:
        return "sm_90"
    major, minor = torch.cuda.get_device_capability()
    known = [t for t in TARGETS[1:] if int(t[3:]) <= 10 * major + minor]
    return known[-1] if known else TARGETS[1]


def _quieten() -> None:
    """One line says what is wrong; the logs of torch and transformers say it in many."""
    import torch

    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if "TORCH_LOGS" not in os.environ:
        torch._logging.set_logs(all=logging.CRITICAL)
