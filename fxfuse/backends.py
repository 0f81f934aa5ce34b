"""fxfuse as a torch.compile backend, and as hooks for people who own their Inductor options."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace

import torch
from torch import fx

from fxfuse import options as option_keys, policy as policies, registry, stored
from fxfuse.compilation import Compilation
from fxfuse.errors import BadOption
from fxfuse.match import Fusion
from fxfuse.options import Settings
from fxfuse.report import Report
from fxfuse.rewrite import rewrite

log = logging.getLogger("fxfuse")
_recording: ContextVar[tuple[list[Report], ...]] = ContextVar("fxfuse_recording", default=())
_POST_GRAD = "post_grad_custom_pre_pass"
_PRE_GRAD = "pre_grad_custom_pass"
_TIMING = "pre_grad_pass_timing"

Inner = str | Callable
Patterns = Iterable[str | Fusion] | str | None


@contextlib.contextmanager
def record() -> Iterator[list[Report]]:
    """Collect the reports of all rewrites by backends and hooks inside the `with`, in order.

    Of compilations that this thread begins; the reports of their backward graphs come with them.
    """
    reports: list[Report] = []
    token = _recording.set((*_recording.get(), reports))
    try:
        yield reports
    finally:
        _recording.reset(token)


def _publisher() -> Callable[[Report], None]:
    """What publishes the reports of a compilation that begins now.

    A backward graph may be compiled later, and in a thread where `record` is not known.
    """
    recorders = _recording.get()

    def publish(report: Report) -> None:
        for reports in recorders:
            reports.append(report)
        from torch._dynamo.utils import counters

        for name, count in report.counts.items():
            counters["fxfuse"][name] += count
        log.info("fused %s, left %d sites alone", report.counts or "nothing", len(report.misses))
        for miss in report.misses:
            log.debug("%s at %s (%s): %s", miss.pattern, miss.node, miss.where, miss.reason)
        _trace(report)

    return publish


def _trace(report: Report) -> None:
    from torch._logging import trace_structured

    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": "fxfuse_report", "encoding": "json"},
        payload_fn=report.to_json,
    )


def backend(
    gm: fx.GraphModule,
    example_inputs: Sequence[object],
    *,
    mode: str | None = None,
    options: Mapping[str, object] | None = None,
) -> Callable:
    """The backend for `torch.compile(model, backend=fxfuse.backend)`: fuse, then Inductor.

    mode and options are those of torch.compile; options named `fxfuse.*` are ours ("fxfuse.policy",
    "fxfuse.patterns", "fxfuse.target"), all others are Inductor's.
    Raises UnknownOption, BadOption, UnknownPattern.
    """
    return _compile(gm, example_inputs, "inductor", Settings(), mode, options)


def make_backend(
    inner: Inner = "inductor", patterns: Patterns = None, policy: str = "auto"
) -> Callable:
    """A backend of your own: `torch.compile(model, backend=fxfuse.make_backend("aot_eager"))`.

    inner: who compiles the rewritten graph: "inductor", "aot_eager", "eager", the name of any other
    registered backend, or a callable `(gm, example_inputs)`. patterns: names to use, None for all.
    policy: "auto", "always" or "never". Raises BadOption, UnknownPattern.
    """
    policies.check(policy)
    chosen = registry.select(patterns) if patterns is not None else None
    if not callable(inner) and inner not in torch._dynamo.list_backends(exclude_tags=()):
        names = ", ".join(torch._dynamo.list_backends(exclude_tags=()))
        expected = f"use a callable or one of {names}"
        raise BadOption(option="inner", value=inner, expected=expected)

    def fxfuse_backend(
        gm: fx.GraphModule,
        example_inputs: Sequence[object],
        *,
        mode: str | None = None,
        options: Mapping[str, object] | None = None,
    ) -> Callable:
        settings = Settings(policy, chosen)
        return _compile(gm, example_inputs, inner, settings, mode, options)

    return fxfuse_backend


def _compile(
    gm: fx.GraphModule,
    example_inputs: Sequence[object],
    inner: Inner,
    settings: Settings,
    mode: str | None,
    options: Mapping[str, object] | None,
) -> Callable:
    given, others = option_keys.split(options)
    if inner != "inductor" and (others or mode):
        what = ", ".join(others) if others else f"mode={mode!r}"
        expected = f"the inner backend {inner!r} takes no options; leave it out"
        raise BadOption(option=what, value=others or mode, expected=expected)
    settings = replace(settings, **given)
    key = stored.key_of(gm, settings.identity)
    told = Compilation(key, _publisher(), cached=inner == "inductor")
    report = rewrite(gm, **settings.choices, compiled=inner == "inductor")
    after = (settings, lambda key: told) if report.modified else None
    if inner == "inductor":
        patches = {**_mode_options(mode), **others}
        if after:
            patches[_POST_GRAD] = _after_autograd(patches, *after)
        inductor = torch._dynamo.lookup_backend("inductor")
        compiled = inductor(gm, example_inputs, config_patches=patches)
    else:
        compiled = _other(inner, after)(gm, example_inputs)
    told.first(report)
    return compiled


def _other(inner: Inner, after: tuple | None) -> Callable:
    """An inner compiler that is not Inductor."""
    if inner == "aot_eager" and after is not None:
        from fxfuse.hooks import aot_eager

        return aot_eager(*after)
    return inner if callable(inner) else torch._dynamo.lookup_backend(inner)


def _mode_options(mode: str | None) -> dict[str, object]:
    return torch._inductor.list_mode_options(mode) if mode else {}


def _after_autograd(patches: Mapping[str, object], settings: Settings, find: Callable) -> Callable:
    """The hook of both our passes after autograd, behind one that is set already."""
    from fxfuse.hooks import FuseAfterAutograd, Sequenced
    from fxfuse.roundings import KeepRoundings

    before = _set_before(patches, _POST_GRAD)
    return Sequenced([*before, FuseAfterAutograd(settings, find), KeepRoundings()])


def _set_before(patches: Mapping[str, object], hook: str) -> list[Callable]:
    """The passes that are set already, in the options or in Inductor's configuration."""
    from torch._inductor import config

    found = patches[hook] if hook in patches else getattr(config, hook)
    if isinstance(found, (list, tuple)):
        return list(found)
    return [] if found is None else [found]


def inductor_options(
    base: Mapping[str, object] | None = None, policy: str = "auto"
) -> dict[str, object]:
    """Options for people who call Inductor themselves: `torch.compile(model, options=...)`.

    base: options to add to; hooks in it are kept and run first, and keys `fxfuse.*` are taken as by
    `backend`. policy: "auto", "always", "never". Returns a new dict for Inductor.
    Raises UnknownOption, BadOption, UnknownPattern.
    """
    from fxfuse.hooks import FuseBeforeAutograd, Sequenced

    given, found = option_keys.split(base)
    settings = replace(Settings(policies.check(policy)), **given)
    compilations: dict[str, Compilation] = {}
    fuse = FuseBeforeAutograd(settings, _publisher, compilations)
    before = Sequenced([*_set_before(found, _PRE_GRAD), fuse])
    after = _after_autograd(found, settings, compilations.get)
    return {**_every_time(), **found, _PRE_GRAD: before, _POST_GRAD: after}


def _every_time() -> dict[str, object]:
    """Newer Inductors leave hooks out where their cache hits, and with them the report."""
    from torch._inductor import config

    return {_TIMING: "early"} if hasattr(config, _TIMING) else {}
