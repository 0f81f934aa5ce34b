"""`verify`: a model compiled with fxfuse against itself eager, as a whole and at each site."""

from __future__ import annotations

import contextlib
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from fxfuse import backends, copies, errors, fuel, judge, onsite, trace
from fxfuse.backends import Inner, Patterns
from fxfuse.judge import Comparison
from fxfuse.onsite import Watcher
from fxfuse.report import Match, Report
from fxfuse.runs import Run, Runs
from fxfuse.verification import CheckedSite, Verification

_ALL = 1 << 40  # more rewrites than there are


def verify(
    model: Callable,
    *args: object,
    train: bool = True,
    patterns: Patterns = None,
    policy: str = "auto",
    inner: Inner = "aot_eager",
    **kwargs: object,
) -> Verification:
    """Run `model(*args, **kwargs)` eager and fused, from the same state, and compare the numbers.

    model: an `nn.Module` or a function of tensors, with values (not on the meta device). train:
    compare gradients too, of parameters and of inputs that require them; `model.training` stays.
    patterns, policy: as for `make_backend`. inner: who compiles the fused graph. "aot_eager" has
    all rewrites, those of the backward graph as well, and nothing of Inductor's own; "inductor" is
    what `fxfuse.backend` does and takes a minute; "eager" has no rewrites of the backward graph.
    With another inner than Inductor policy "auto" takes the kernel at every site.

    Each run is of a copy with the weights, buffers and random numbers that are there: dropout
    agrees, and the model, its gradients and buffers are as before, after an error too. Gradients
    begin from fixed random ones at all outputs. Returns of tensors, numbers, containers and
    dataclasses are compared; objects of which PyTorch does not know the parts are not.

    What counts as equal is not what is equal bit for bit, but what is as near to the truth. The
    truth is the model in fp64 (parameters, inputs, and casts to narrower dtypes inside it), where
    that runs and gives eager's values roughly. `Comparison.by` says of each tensor what judged it:

    * "fp64": the fused relative rms error is at most 2 x eager's + 4 steps of fp32 (of fp16 and
      bf16: 1 step), and the largest error at most 4 x eager's + four times as many steps;
    * "tolerance", without fp64: the two differ by at most 1e-5 (fp32), 4e-3 (fp16), 2e-2 (bf16),
      1e-12 (fp64) in relative rms, and by ten times that at most;
    * "moved": it was more than that, and was compared with three runs of eager whose parameters
      and inputs were moved by one step each: at most twice (largest: four times) what they did;
    * "equal": integers and booleans are the same.

    NaN, inf and -inf must be in the same places. If something differs, eager is run again: a model
    that differs from itself is said to be not deterministic, and no site is blamed. Otherwise
    the first site with which the numbers differ is found by letting fewer rewrites through. Each
    site is looked at alone besides: op against what it replaced, on the same values. `ok` needs all
    of that. A model in which nothing was fused is ok, with the reason.

    Raises UnknownPattern, BadOption, BadPattern; NoValues for a model on the meta device;
    CannotCopy; InnerFailed where the inner compiler fails without fxfuse; the model's own errors.
    A model with an input of the name of one of these options is verified through a function.
    """
    backend = backends.make_backend(inner, patterns, policy)
    model = trace.uncompiled(model)
    if any(t.is_meta for t in copies.tensors(model, args, kwargs)):
        raise errors.NoValues(what="the model or an input")
    job = _Job(Runs(model, args, kwargs, train), backend, inner, policy)
    watcher = Watcher(patterns=patterns, policy=policy, compiled=inner == "inductor")
    return job.verification(watcher)


@dataclass
class _Fused:
    """A run and its rewrites. through: the sites that were rewritten, in order; a fork is two."""

    run: Run
    reports: tuple[Report, ...] = ()
    through: tuple[Sequence[Match], ...] = ()
    outputs: tuple[Comparison, ...] = ()
    gradients: tuple[Comparison, ...] = ()

    @property
    def bad(self) -> list[Comparison]:
        return [one for one in (*self.outputs, *self.gradients) if not one.ok]

    @property
    def ok(self) -> bool:
        return self.run.error is None and not self.bad


class _Job:
    """One verification."""

    def __init__(self, runs: Runs, backend: Callable, inner: Inner, policy: str) -> None:
        self.runs, self.backend, self.inner = runs, backend, inner
        left = fuel.left()
        self.most = _ALL if left is None else left
        self.known = {
            "policy": policy, "train": runs.train,
            "inner": inner if isinstance(inner, str) else _name(inner),
        }  # fmt: skip
        self._moved: list[Run] | None = None

    def verification(self, watcher: Watcher) -> Verification:
        self.eager, self.truth = self.runs.run(), self.runs.in_double()
        fused = self._fused(self.most)
        told = [match for report in fused.reports for match in report.matches]
        # A compilation that fails has no report.
        self.matches = told or [match for site in fused.through for match in site]
        if not self.matches:
            if fused.run.error is not None:
                raise self._inner_failed(fused.run.error)
            return self._found(
                fused, (), True, reason=_why_nothing(fused), outputs=(), gradients=()
            )
        itself = "" if fused.ok else self._differs_from_itself()
        if itself:
            sites = tuple(_checked(match, None) for match in self.matches)
            return self._found(fused, sites, False, reason=itself, deterministic=False)
        if not fused.ok:
            self._judge(fused, moving=True)
        self._look(watcher)
        sites = tuple(_checked(m, watcher.found.get(onsite.key(m))) for m in self.matches)
        if not fused.ok:
            return self._blamed(fused, sites)
        wrong = next((site for site in sites if site.ok is False), None)
        reason = "the model agrees as a whole, but not a site alone" if wrong else ""
        return self._found(fused, sites, wrong is None, first_bad=wrong, reason=reason)

    def _found(
        self, fused: _Fused, sites: tuple[CheckedSite, ...], ok: bool, **more: object
    ) -> Verification:
        about = {"outputs": fused.outputs, "gradients": fused.gradients, "first_bad": None}
        return Verification(
            ok=ok, sites=sites, reports=fused.reports, **{**about, **self.known, **more}
        )

    def _blamed(self, fused: _Fused, sites: tuple[CheckedSite, ...]) -> Verification:
        """The fewest rewrites with which the numbers differ."""
        none = self._fused(0)
        self._judge(none, moving=True)
        if none.run.error is not None:
            raise self._inner_failed(none.run.error)
        if not none.ok:
            reason = f"{self.known['inner']} differs from eager without a rewrite: {_worst(none)}"
            return self._found(fused, sites, False, reason=reason)
        good, bad, last = 0, len(fused.through), fused
        while bad - good > 1:
            middle = (good + bad) // 2
            tried = self._fused(middle)
            self._judge(tried, moving=True)
            if tried.ok:
                good = middle
            else:
                bad, last = middle, tried
        keys = {onsite.key(match) for match in last.through[bad - 1]}
        problem = f"with it {_worst(last)}"
        sites = tuple(
            replace(site, ok=False, problem=problem) if onsite.key(site) in keys else site
            for site in sites
        )
        first = next(site for site in sites if onsite.key(site) in keys)
        return self._found(fused, sites, False, first_bad=first, fuel=bad, reason=_worst(fused))

    def _fused(self, rewrites: int) -> _Fused:
        """A run with at most so many rewrites."""
        with fuel.limit(rewrites) as limit, backends.record() as reports, _compiling():
            try:
                run = self.runs.run(lambda model: _compiled(model, self.backend))
            except Exception as error:
                run = Run(error=_original(error))
        fused = _Fused(run, tuple(reports), tuple(limit.through))
        self._judge(fused)
        return fused

    def _judge(self, fused: _Fused, moving: bool = False) -> None:
        """moving: take into account how far eager moves, which takes some more runs."""
        if fused.run.error is not None or (moving and fused.ok):
            return
        for part in ("outputs", "gradients"):
            eager, ours = getattr(self.eager, part), getattr(fused.run, part)
            truth = getattr(self.truth, part, None)
            moved = [getattr(run, part) for run in self._moved_runs()] if moving else ()
            setattr(fused, part, tuple(judge.compare(eager, ours, truth, moved)))

    def _differs_from_itself(self) -> str:
        again = _Fused(self.runs.run())
        self._judge(again)
        if again.ok:
            return ""
        return (
            f"the model is not deterministic: two eager runs differ, {_worst(again)}, so nothing "
            "can be said of fxfuse"
        )

    def _moved_runs(self) -> list[Run]:
        if self._moved is None:
            self._moved = self.runs.moved(self._step())
        return self._moved

    def _step(self) -> float:
        """That of the widest steps in which a site computes: autocast may make them wider."""
        dtypes = {getattr(torch, name) for m in self.matches for name in m.dtypes.values()}
        return max((torch.finfo(d).eps for d in dtypes if d.is_floating_point), default=0.0)

    def _look(self, watcher: Watcher) -> None:
        """The sites alone; what a run finds before an error ends it is found."""
        with fuel.limit(self.most), _compiling(), contextlib.suppress(Exception):
            self.runs.run(lambda model: _compiled(model, watcher))

    def _inner_failed(self, error: Exception) -> errors.FxfuseError:
        return errors.InnerFailed(inner=self.inner, problem=_first_line(error))


def _compiled(model: Callable, backend: Callable) -> Callable:
    options = {"dynamic": False, "backend": backend}
    if "isolate_recompiles" in inspect.signature(torch.compile).parameters:  # torch 2.13
        options["isolate_recompiles"] = True
    return torch.compile(trace.wrapped(model), **options)


@contextlib.contextmanager
def _compiling() -> Iterator[None]:
    """Each layer may be a graph of its own, random numbers are eager's, errors are told, and no
    cache hides a rewrite."""
    from torch._functorch import config as autograd
    from torch._inductor import config as inductor

    limits = {"recompile_limit": 1 << 16, "accumulated_recompile_limit": 1 << 16}
    with (
        torch._dynamo.config.patch(**limits, suppress_errors=False),
        inductor.patch(fallback_random=True, fx_graph_cache=False),
        autograd.patch(enable_autograd_cache=False),
    ):
        yield


def _original(error: Exception) -> Exception:
    """The error inside Dynamo's; ours are raised as they are, since an option is at fault."""
    inner = trace.original(error)
    if isinstance(inner, errors.FxfuseError):
        raise inner
    return inner


def _checked(match: Match, found: onsite.Found | None) -> CheckedSite:
    ok, problem, compared = None, "", ()
    if found is not None:
        compared, problem = tuple(found.compared), found.problem
        bad = [one for one in compared if not one.ok]
        if bad:
            ok, problem = False, f"alone: {_say(bad[0])}"
        elif compared and not problem:
            ok = True
    return CheckedSite(
        match.pattern, match.op, match.module, match.where, match.policy, match.nodes, ok,
        compared, problem,
    )  # fmt: skip


def _worst(fused: _Fused) -> str:
    """One phrase on the first tensor that differs."""
    if fused.run.error is not None:
        return f"the model raises {_first_line(fused.run.error)}"
    more = f", and {len(fused.bad) - 1} more" if len(fused.bad) > 1 else ""
    return f"{_say(fused.bad[0])}{more}"


def _say(one: Comparison) -> str:
    if one.problem:
        return f"{one.name}: {one.problem}"
    return (
        f"{one.name}: {one.measure} error {one.fused_error:.1e}, where eager has "
        f"{one.eager_error:.1e} and {one.allowed:.1e} is allowed"
    )


def _why_nothing(fused: _Fused) -> str:
    reasons = Counter(miss.reason for report in fused.reports for miss in report.misses)
    if reasons:
        return f"nothing was fused: {reasons.most_common(1)[0][0]}"
    if not fused.reports:
        return "nothing was fused: Dynamo found no graph in the model"
    return "nothing was fused: there is no norm, residual add or silu gate that a pattern knows"


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".strip().partition("\n")[0]


def _name(inner: Callable) -> str:
    return getattr(inner, "__name__", type(inner).__name__)
