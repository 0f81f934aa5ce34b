"""Errors that users see: one class per kind, one template each.

Every message says what is wrong, with which value, and what to do about it, in one line.
"""

from __future__ import annotations


class FxfuseError(Exception):
    """Base of all errors that fxfuse raises on purpose.

    A subclass holds a `template`; its keyword arguments fill it and stay readable as attributes.
    """

    template = "{message}"

    def __init__(self, **values: object) -> None:
        self.__dict__.update(values)
        super().__init__(self.template.format(**values))


class UnknownOption(FxfuseError, ValueError):
    template = "unknown option {option!r}: the options of fxfuse are {known}"


class BadOption(FxfuseError, ValueError):
    template = "option {option!r} is {value!r}: {expected}"


class UnknownPattern(FxfuseError, ValueError):
    template = "unknown pattern {pattern!r}: the patterns are {known}"


class BadPattern(FxfuseError, ValueError):
    template = "pattern {pattern!r} cannot be used: {problem}"


class BadGraph(FxfuseError, TypeError):
    template = (
        "fxfuse.apply takes a torch.fx.GraphModule or an ExportedProgram, not {kind}: "
        "trace the model first (torch.fx.symbolic_trace, torch.export.export, make_fx)"
    )


class BadExampleInputs(FxfuseError, ValueError):
    template = (
        "the graph does not run on example_inputs ({problem}): give what the graph takes, "
        "or leave example_inputs out"
    )


class NoValues(FxfuseError, ValueError):
    template = (
        "{what} is on the meta device, where nothing can be computed: make it on another device, "
        "or look at it with fxfuse.explain or fxfuse inspect"
    )


class CannotCopy(FxfuseError, ValueError):
    template = (
        "the model or its inputs cannot be copied ({problem}): each run needs a copy, so make "
        "copy.deepcopy work on them"
    )


class InnerFailed(FxfuseError, RuntimeError):
    template = (
        "the inner compiler {inner!r} cannot run this model, without a rewrite either "
        "({problem}): choose another, such as 'eager'"
    )


class TargetError(FxfuseError):
    """The command line's TARGET cannot be used."""


class BadTarget(TargetError):
    template = (
        "target {target!r} is none of path/to/file.py:factory, package.module:factory, "
        "hf:NAME, hf:path/to/config.json, path/to/program.pt2"
    )


class TargetMissing(TargetError):
    template = "{target}: there is no file {path!r}: check the path, it is relative to {cwd}"


class ModuleMissing(TargetError):
    template = "{target}: there is no module {module!r} here: name its file, or go to its folder"


class PackageMissing(TargetError):
    template = (
        "{target}: cannot be imported, since {wanted_by} needs {package!r}, which is not "
        "installed: install it in the environment of fxfuse"
    )


class TargetRaised(TargetError):
    template = (
        "{target}: {action} raised {kind} at {where}: {message} (--traceback shows all of it)"
    )


class NoFactory(TargetError):
    template = "{target}: {path} has no {name!r}: it defines {known}"


class NoModel(TargetError):
    template = (
        "{target}: the factory returned {got}: it has to return an nn.Module, "
        "(model, args) or (model, args, kwargs)"
    )


class NoInputs(TargetError):
    template = (
        "{target}: the model comes without inputs: let the factory return (model, args), "
        "or say --input 2x128xbfloat16 (repeat it, or name it: --input ids=1x2048xint64)"
    )


class UnknownArchitecture(TargetError):
    template = "{target}: transformers {version} has no model type {name!r}: {near}"


class CannotCut(TargetError):
    template = (
        "{target}: it does not run with two layers ({problem}): choose sizes with --set and say "
        "--full, or give a factory that makes a small one"
    )


class UnknownSetting(FxfuseError):
    template = "--set {setting!r}: {problem}"


class BadInput(FxfuseError):
    template = (
        "--input {text!r}: {problem}: write sizes joined by x, then a dtype if it is not the "
        "model's, as in 2x128xbfloat16, x=2x16x64, ids=1x2048xint64"
    )


class BadExpectation(FxfuseError):
    template = "--expect {text!r}: write PATTERN=COUNT, as in add_rms_norm=64"


class BadConfig(TargetError):
    template = "{target}: {path} is no config of transformers: {problem}"
