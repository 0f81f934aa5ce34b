"""A `Report` as the command line prints it: sites, near misses, totals.

Sites that differ only in where they are share one heading, so that many equal layers stay readable.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import groupby

from tabulate import tabulate

from fxfuse import places
from fxfuse.report import Match, Miss, Report


def decided_for(target: str, asked: bool) -> str:
    """One line: the device that the policy was decided for."""
    return f"for {target}" if asked else f"for {target} (--target chooses another device)"


def sites(report: Report) -> str:
    """Each site with its module path and line, below what it shares with others of its kind."""
    blocks = []
    for pattern in report.counts:
        matches = [m for m in report.matches if m.pattern == pattern]
        blocks.append(f"{pattern}: {_count(len(matches), 'site')}")
        for heading, same in _alike(matches):
            rows = [(i, m.module or "-", places.short(m.where) or "-") for i, m in same]
            blocks.append(f"{heading}\n\n{_indent(tabulate(rows, ('', 'module', 'where')))}")
    return "\n\n".join(blocks)


def misses(report: Report, why: bool) -> str:
    """The near misses, the most frequent first, or one line that counts the reasons."""
    if not report.misses:
        return "near misses: none"
    if why:
        heads = ("near miss of", "module", "where", "reason")
        rows = [
            (m.pattern, _places(m, n), places.short(m.where), m.reason) for m, n in _ranked(report)
        ]
        return tabulate(rows, heads, maxcolwidths=[None, None, None, 90])
    reasons = Counter(_reason(m) for m in report.misses).most_common()
    shown = "; ".join(f"{n} x {reason}" for reason, n in reasons[:3])
    rest = f"; {len(reasons) - 3} other reasons" if len(reasons) > 3 else ""
    return f"near misses: {len(report.misses)} ({shown}{rest}); --why lists them"


def _ranked(report: Report) -> list[tuple[Miss, int]]:
    """The first miss of each line of code and reason, with how many there are, most first."""
    alike: dict[tuple, list[Miss]] = {}
    for m in report.misses:
        alike.setdefault((m.pattern, m.where, m.reason), []).append(m)
    return sorted(((same[0], len(same)) for same in alike.values()), key=lambda one: -one[1])


def _places(m: Miss, count: int) -> str:
    first = m.module or m.node or "-"
    return first if count == 1 else f"{first} and {count - 1} more"


def totals(report: Report) -> str:
    """One line: the count of each pattern and the memory traffic that is saved."""
    counts = ", ".join(f"{n} {pattern}" for pattern, n in report.counts.items())
    saved = sum(m.bytes_saved or 0 for m in report.matches)
    tail = f"; {_bytes(saved)} less memory traffic, forward, than one op at a time" if saved else ""
    return f"total: {counts or 'no site'}{tail}; {_count(len(report.misses), 'near miss', 'es')}"


def _alike(matches: Iterable[Match]) -> Iterator[tuple[str, list[tuple[int, Match]]]]:
    """Headings, in the order of their first site, with the numbered sites below each."""
    numbered = list(enumerate(matches, 1))
    headings = {i: _heading(m) for i, m in numbered}
    order = {heading: i for i, heading in reversed(headings.items())}
    numbered.sort(key=lambda one: order[headings[one[0]]])
    for heading, same in groupby(numbered, key=lambda one: headings[one[0]]):
        yield heading, list(same)


def _heading(m: Match) -> str:
    operands = ", ".join(
        f"{name} {'x'.join(map(str, shape))} {m.dtypes.get(name, '')}".rstrip()
        for name, shape in m.shapes.items()
    )
    rows = [
        ("op", m.op),
        ("operands", operands or "not known from this graph"),
        ("attributes", ", ".join(f"{k}={v}" for k, v in m.attributes.items() if v != "")),
        ("policy", m.policy.replace("; ", ";\n")),
        ("saved", _saved(m)),
    ]
    return _indent(tabulate([row for row in rows if row[1]], tablefmt="plain"))


def _saved(m: Match) -> str:
    if not m.bytes_saved:
        return "not known"
    return f"{_bytes(m.bytes_saved)} a site, forward, against one op at a time"


def _reason(m: Miss) -> str:
    return f"{m.pattern}: {m.reason}"


def _count(n: int, noun: str, plural: str = "s") -> str:
    return f"{n} {noun}{'' if n == 1 else plural}"


def _bytes(n: int) -> str:
    power = min(max(len(str(n)) - 1, 0) // 3, 4)
    return f"{n / 1000**power:.4g} {('bytes', 'kB', 'MB', 'GB', 'TB')[power]}"


def _indent(text: str) -> str:
    return "\n".join(f"  {line}".rstrip() for line in text.splitlines())
