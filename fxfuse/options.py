"""What a user may choose, and the options of `torch.compile(options=...)` that say it.

Keys `fxfuse.*` are ours, all others go to Inductor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fxfuse import fuel, policy as policies, registry
from fxfuse.errors import UnknownOption
from fxfuse.match import Fusion

_OURS = {
    "fxfuse.policy": policies.check,
    "fxfuse.patterns": registry.select,
    "fxfuse.target": policies.check_target,
}


@dataclass(frozen=True)
class Settings:
    """How graphs are to be rewritten; patterns None stands for all."""

    policy: str = "auto"
    patterns: tuple[Fusion, ...] | None = None
    target: str | None = None

    @property
    def choices(self) -> dict[str, object]:
        """The keyword arguments of `rewrite` that say the same."""
        return {"patterns": self.patterns, "policy": self.policy, "target": self.target}

    @property
    def identity(self) -> str:
        """The same for the same rewriting, in every process: a part of cache keys.

        Fuel is in it, since the rewrite of a backward graph, which a cache skips, takes its share.
        """
        patterns = map(registry.identity, registry.select(self.patterns))
        limit = "" if fuel.left() is None else f" fuel {fuel.left()}"
        return f"{self.policy} {self.target} {' '.join(patterns)}{limit}"


def split(options: Mapping[str, object] | None) -> tuple[dict[str, object], dict[str, object]]:
    """(ours without their prefix, Inductor's). Raises UnknownOption, BadOption, UnknownPattern."""
    ours, others = {}, {}
    for key, value in (options or {}).items():
        if key.startswith("fxfuse."):
            if key not in _OURS:
                raise UnknownOption(option=key, known=", ".join(sorted(_OURS)))
            ours[key.removeprefix("fxfuse.")] = _OURS[key](value)
        else:
            others[key] = value
    return ours, others
