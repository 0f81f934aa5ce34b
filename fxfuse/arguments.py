"""The options of the command line and their help."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

TARGETS = ("cpu", "sm_80", "sm_90", "sm_100", "sm_120", "gfx942")
_ABOUT = "Find norms, residual adds and silu gates in PyTorch models, and say what would be fused."
_TARGET = """\
TARGET is one of
  path/to/file.py:factory      the factory returns a model, (model, args) or (model, args, kwargs)
  package.module:factory
  hf:NAME                      a model type of the installed transformers, with its default config
  hf:path/to/config.json
  path/to/program.pt2          saved by torch.export.save
"""
_ON_META = """\
It is built and traced on the meta device: nothing is computed, and no weight is read.

"""
_REAL = """\
It is built and run, with random weights. An hf: model is cut to two layers and small widths, and a
program runs with the inputs that were saved with it.

examples
  fxfuse verify hf:qwen3 --set dtype=bfloat16
  fxfuse verify shop/model.py:build --input 2x128xbfloat16 --inner inductor
  fxfuse verify shop.model:build --device cuda --policy always --json > numbers.json

exit codes: 0 good, 1 the numbers differ, 2 the target cannot be used or is not deterministic
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


def _parser() -> argparse.ArgumentParser:
    top = _Parser(prog="fxfuse", description=_ABOUT, epilog=_EXAMPLES, **_AS_WRITTEN)
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    inspect = commands.add_parser(
        "inspect",
        help="show the sites of a model, and why the others are left alone",
        description="Show which sites of a model would be fused, and why the rest would not.",
        epilog=_TARGET + _ON_META + _EXAMPLES,
        **_AS_WRITTEN,
    )
    inspect.add_argument("target", metavar="TARGET", help="the model: see below")
    inspect.set_defaults(parser=inspect)
    add = inspect.add_argument_group("how to build and trace it").add_argument
    _add_building(add)
    text = "decide for this device (default: the GPU that is present, else sm_90)"
    add("--target", choices=TARGETS, dest="device", help=text)
    _add_looking(inspect.add_argument_group("what to look for").add_argument)
    add = inspect.add_argument_group("what to print").add_argument
    _add_reporting(add)
    _add_printing(add)
    _add_verify(commands)
    return top


def _add_verify(commands: argparse._SubParsersAction) -> None:
    verify = commands.add_parser(
        "verify",
        help="run a model fused and eager, and compare the numbers",
        description="Run a model fused and eager, and compare outputs, gradients and each site.",
        epilog=_TARGET + _REAL,
        **_AS_WRITTEN,
    )
    verify.add_argument("target", metavar="TARGET", help="the model: see below")
    verify.set_defaults(parser=verify)
    add = verify.add_argument_group("how to build and run it").add_argument
    _add_building(add)
    add("--full", action="store_true", help="an hf: model at its full size")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="where to run (default: cpu)")
    text = "who compiles the fused graph: aot_eager (default), inductor, eager"
    add("--inner", default="aot_eager", metavar="NAME", help=text)
    add("--seed", type=int, default=0, help="of weights, inputs and dropout (default: 0)")
    _add_looking(verify.add_argument_group("what to fuse").add_argument)
    _add_printing(verify.add_argument_group("what to print").add_argument)


def _add_building(add: Callable) -> None:
    text = "2x128xbfloat16, x=2x16x64, ids=1x2048xint64 (repeatable)"
    add("--input", action="append", metavar="SPEC", default=[], help=text)
    text = "a value of an hf: config, as in hidden_size=8192 (repeatable)"
    add("--set", action="append", metavar="KEY=VALUE", default=[], help=text)
    text = "with or without gradients and train mode (default: with, in the mode the model has)"
    add("--train", action=argparse.BooleanOptionalAction, default=None, help=text)


def _add_looking(add: Callable) -> None:
    add("--pattern", action="append", metavar="NAME", help="only this pattern (repeatable)")
    text = "a file with patterns of your own (repeatable)"
    add("--patterns", action="append", metavar="FILE", default=[], help=text)
    text = "auto: where it pays; always: wherever it is right; never: report only"
    add("--policy", choices=("auto", "always", "never"), default="auto", help=text)


def _add_reporting(add: Callable) -> None:
    add("--why", action="store_true", help="every near miss with its reason")
    text = "exit with 1 unless the pattern has this many sites (repeatable)"
    add("--expect", action="append", metavar="NAME=COUNT", default=[], help=text)


def _add_printing(add: Callable) -> None:
    add("--json", action="store_true", help="the report as JSON")
    text = "the whole traceback of what went wrong"
    add("--traceback", action="store_true", help=text)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options in `argv`; prints one line and raises SystemExit(2) where it cannot be read."""
    options, unknown = _parser().parse_known_args(argv)
    if unknown:
        known = [text for text in options.parser._option_string_actions if text.startswith("--")]
        options.parser.error(f"unknown option {unknown[0]}: the options are {', '.join(known)}")
    return options
