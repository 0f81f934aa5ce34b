"""The patterns that are known: ours, those of other packages, and those of a file."""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Callable, Iterable
from importlib.metadata import entry_points
from pathlib import Path

from fxfuse.errors import BadPattern, UnknownPattern
from fxfuse.match import Builder, Expr, Fusion, NearMiss

_KNOWN: dict[str, Fusion] = {}
_loaded = False


def pattern(
    name: str,
    expression: Expr,
    *,
    keep: tuple[str, ...] = (),
    size: int = 0,
    near_miss: NearMiss | None = None,
    backward: bool = False,
    any_dim: bool = False,
) -> Callable[[Builder], Fusion]:
    """Register a pattern; decorates its `build(b)`.

    name: under which it is counted and chosen. expression: what to look for (`fxfuse.match`).
    keep: bound names whose values may be used outside of the match, because the op returns them.
    size: of two patterns that fit at one node, the one with the larger size is tried first.
    near_miss: `(view, node)` to the reason why a node that looks like it was not matched, or None.
    backward: it is about backward ops; such patterns are tried after all others.
    any_dim: norms in it may be over another dimension than the last: it looks at `b.facts.dim`.
    build: returns `b.call(op, ...)`, `b.decline(reason)`, or None for "not in this way".

    Raises BadPattern if the expression has no outermost word, or the name is taken.
    """

    if expression.words is None:
        raise BadPattern(pattern=name, problem="its outermost part fits any node")

    def register(build: Builder) -> Fusion:
        known = _KNOWN.get(name)
        if known is not None and known.build.__module__ != build.__module__:
            raise BadPattern(pattern=name, problem=f"{known.build.__module__} has one of this name")
        fusion = Fusion(name, expression, build, keep, size, near_miss, backward, any_dim)
        _KNOWN[name] = fusion
        return fusion

    return register


def patterns() -> dict[str, Fusion]:
    """All known patterns by name; loads ours and the entry points `fxfuse.patterns` once."""
    global _loaded
    if not _loaded:
        _loaded = True
        package = importlib.import_module("fxfuse.patterns")
        for module in sorted(m.name for m in pkgutil.iter_modules(package.__path__)):
            importlib.import_module(f"fxfuse.patterns.{module}")
        for entry in entry_points(group="fxfuse.patterns"):
            entry.load()
    return dict(_KNOWN)


@functools.lru_cache(maxsize=256)
def identity(fusion: Fusion) -> str:
    """The name of a pattern, with a hash of the file that defines it."""
    source = Path(fusion.build.__code__.co_filename)
    text = source.read_bytes() if source.is_file() else b""
    return f"{fusion.name}:{hashlib.sha256(text).hexdigest()[:16]}"


def load_file(path: str | Path) -> list[str]:
    """Run a file that defines patterns; returns the names that it added."""
    before = set(patterns())
    path = Path(path)
    if not path.is_file():
        raise BadPattern(pattern=str(path), problem="there is no such file")
    name = f"fxfuse_patterns_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BadPattern:
        raise
    except Exception as error:
        raise BadPattern(pattern=str(path), problem=f"{type(error).__name__}: {error}") from error
    added = sorted(set(patterns()) - before)
    if not added:
        raise BadPattern(pattern=str(path), problem="the file defines no new pattern")
    return added


def select(chosen: Iterable[str | Fusion] | str | None) -> tuple[Fusion, ...]:
    """The patterns to use, largest first; None means all.

    Raises UnknownPattern for a name that is not registered.
    """
    known = patterns()
    if chosen is None:
        found = list(known.values())
    else:
        names = chosen.split(",") if isinstance(chosen, str) else chosen
        found = [_one(item, known) for item in names]
    return tuple(sorted(found, key=lambda f: (-f.size, f.name)))


def _one(item: str | Fusion, known: dict[str, Fusion]) -> Fusion:
    if isinstance(item, Fusion):
        return item
    if item not in known:
        raise UnknownPattern(pattern=item, known=", ".join(sorted(known)))
    return known[item]
