"""Options of `torch.compile(options=...)`: keys `fxfuse.*` are ours, all others go to Inductor."""

from __future__ import annotations

from collections.abc import Mapping

from fxfuse import policy as policies, registry
from fxfuse.errors import UnknownOption

_OURS = {
    "fxfuse.policy": policies.check,
    "fxfuse.patterns": registry.select,
    "fxfuse.target": policies.check_target,
}


def split(options: Mapping[str, object] | None) -> tuple[dict[str, object], dict[str, object]]:
    """(ours without their prefix, Inductor's). Raises UnknownOption, BadOption, UnknownPattern."""
    ours, others = {}, {}
    for key, value in (options or {}).items():
        if key.startswith("fxfuse."):
            if key not in _OURS:
                raise UnknownOption(option=key, known=", ".join(sorted(_OURS)))
            _OURS[key](value)
            ours[key.removeprefix("fxfuse.")] = value
        else:
            others[key] = value
    return ours, others
