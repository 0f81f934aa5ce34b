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


class UnsupportedTransform(FxfuseError, RuntimeError):
    template = "{op} does not support {transform}: {advice}"
