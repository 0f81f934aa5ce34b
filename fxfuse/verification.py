"""What `fxfuse.verify` found, as records, as a text table and as JSON."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from fxfuse.judge import Comparison, together
from fxfuse.report import Report

_SHORT = {"float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
_SHOWN = 8  # tensors of each kind in the table, if no more of them differ


@dataclass(frozen=True)
class CheckedSite:
    """One fused site, and whether its numbers agree.

    op, module, where, policy: as in a `Match`. ok: None where the site was not looked at alone, as
    those in graphs made after autograd: their numbers are part of the gradients. compared: results
    of the op, and gradients of what it reads, for what was replaced on the same values. problem:
    why ok is not True.
    """

    pattern: str
    op: str
    module: str
    where: str
    policy: str
    nodes: tuple[str, ...]
    ok: bool | None
    compared: tuple[Comparison, ...] = ()
    problem: str = ""

    def __str__(self) -> str:
        return ", ".join(part for part in (self.pattern, self.module, self.where) if part)


@dataclass(frozen=True)
class Verification:
    """Whether a fused model computes what it computes eager.

    outputs: each tensor that the model returns, or changes in its buffers and inputs. gradients:
    of each parameter and input. sites: all that was fused. first_bad: the site with which the
    numbers begin to differ, as sites are rewritten: from the end of a graph; None where all is
    well or no site is at fault. fuel: with FXFUSE_FUEL=fuel that site is the last one rewritten.
    reports: of the rewrites. deterministic: False where eager differs from eager. reason: what is
    to be said in a sentence, "" where all agrees.
    """

    ok: bool
    outputs: tuple[Comparison, ...]
    gradients: tuple[Comparison, ...]
    sites: tuple[CheckedSite, ...]
    first_bad: CheckedSite | None
    reports: tuple[Report, ...]
    inner: str
    policy: str
    train: bool
    reason: str = ""
    fuel: int | None = None
    deterministic: bool = True

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        return self.to_table()

    @property
    def report(self) -> Report:
        """One report of all graphs."""
        return Report.merge(self.reports)

    @property
    def overall(self) -> dict[str, dict[str, object]]:
        """Of the outputs and of the gradients: how many, how many differ, and their relative root
        mean square errors as if they were one tensor."""
        return {name: _overall(group) for name, group in self._groups()}

    def to_json(self) -> str:
        """A JSON object with the fields of this class, `counts` and `overall`."""
        found = {
            "ok": self.ok, "reason": self.reason, "deterministic": self.deterministic,
            "inner": self.inner, "policy": self.policy, "train": self.train,
            "counts": self.report.counts, "overall": self.overall,
            "first_bad": self.first_bad and _site_json(self.first_bad), "fuel": self.fuel,
            "sites": [_site_json(site) for site in self.sites],
            "outputs": [_json(one) for one in self.outputs],
            "gradients": [_json(one) for one in self.gradients],
            "misses": [asdict(miss) for miss in self.report.misses],
        }  # fmt: skip
        return json.dumps(_finite(found), indent=2, default=str)

    def to_table(self) -> str:
        """The verdict, the sites, and the tensors that are nearest to their bounds or beyond."""
        parts = [self._verdict(), _sites(self.sites)]
        parts += [_tensors(name, group) for name, group in self._groups()]
        return "\n\n".join(part for part in parts if part)

    def _groups(self) -> tuple[tuple[str, tuple[Comparison, ...]], ...]:
        return ("outputs", self.outputs), ("gradients", self.gradients)

    def _verdict(self) -> str:
        how = f"fxfuse in front of {self.inner}, policy {self.policy}"
        how += ", forward and backward" if self.train else ", forward only"
        lines = [f"{'good' if self.ok else 'not good'}: {how}"]
        if self.reason:
            lines.append(textwrap.fill(self.reason, 79))
        if self.first_bad is not None:
            text = f"first site that differs: {self.first_bad}; {self.first_bad.problem}"
            lines.append(textwrap.fill(text, 79, subsequent_indent="  ", break_on_hyphens=False))
        if self.fuel is not None:
            text = f"FXFUSE_FUEL={self.fuel} is the least with which it is rewritten"
            lines.append(f"{text}, FXFUSE_FUEL={self.fuel - 1} leaves it")
        # A fork is a site of two patterns, with one op.
        calls = {
            (site.op, _sides(site), site.module, site.where, site.nodes) for site in self.sites
        }
        ran = Counter((op, sides) for op, sides, *_ in calls)
        lines += [f"{n:4} x {op} ({sides})" for (op, sides), n in sorted(ran.items())]
        return "\n".join(lines)


def _sides(site: CheckedSite) -> str:
    return site.policy.partition(":")[0]


def _overall(group: Sequence[Comparison]) -> dict[str, object]:
    eager, fused = together(group)
    bad = sum(not one.ok for one in group)
    return {"tensors": len(group), "bad": bad, "eager_error": eager, "fused_error": fused}


def _sites(sites: Sequence[CheckedSite]) -> str:
    """Sites of one line of code with the same outcome are one row."""
    from tabulate import tabulate

    alike: dict[tuple, list[CheckedSite]] = {}
    for site in sites:
        alike.setdefault((site.pattern, site.where, site.ok), []).append(site)
    words = {True: "agrees", False: "DIFFERS", None: "in whole"}
    rows = [
        (len(same), pattern, _cut(same[0].module or "-", 22), _cut(where or "-", 20), words[ok])
        for (pattern, where, ok), same in alike.items()
    ]
    heads = ("", "site", "module (the first)", "where", "alone")
    return tabulate(rows, heads) if rows else ""


def _tensors(name: str, group: Sequence[Comparison]) -> str:
    from tabulate import tabulate

    if not group:
        return ""
    ranked = sorted(group, key=lambda one: (one.ok, -_nearness(one)))
    shown = ranked[: max(_SHOWN, sum(not one.ok for one in group))]
    rows = [
        (
            _cut(one.name, 27), _SHORT.get(one.dtype, one.dtype), f"{one.eager_error:.1e}",
            f"{one.fused_error:.1e}", f"{one.allowed:.1e}", one.by, "" if one.ok else "DIFFERS",
        )
        for one in shown
    ]  # fmt: skip
    whole = _overall(group)
    summary = f"{name}: {whole['tensors']}, of which {whole['bad']} differ"
    summary += "; relative rms error of all as one:"
    summary += f" eager {whole['eager_error']:.1e}, fused {whole['fused_error']:.1e}"
    heads = ("nearest to their bounds", "", "eager", "fused", "allowed", "by", "")
    notes = [f"{_cut(one.name, 27)}: {one.problem}" for one in shown if one.problem]
    table = tabulate(rows, heads, disable_numparse=True)
    return "\n".join([_folded(summary), table, *notes])


def _nearness(one: Comparison) -> float:
    return one.fused_error / one.allowed if one.allowed else one.fused_error


def _folded(text: str) -> str:
    return text.replace("; ", ";\n  ") if len(text) > 79 else text


def _cut(text: str, width: int) -> str:
    """The end of a path says most."""
    return text if len(text) <= width else f"…{text[1 - width :]}"


def _site_json(site: CheckedSite) -> dict[str, object]:
    return {**asdict(site), "compared": [_json(one) for one in site.compared]}


def _json(one: Comparison) -> dict[str, object]:
    return {k: v for k, v in asdict(one).items() if k != "norms"}


def _finite(value: object) -> object:
    """JSON has no inf and no NaN: they are written as words."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    is_number = isinstance(value, float) and abs(value) < float("inf")
    return value if is_number or not isinstance(value, float) else str(value)
