"""Each fused site on its own: the op and the nodes that it replaced, on the same values.

Dynamo's graph runs unfused. Behind the last node of a site, the site runs as it is and as it would
be fused, on what it reads there, with gradients of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from fxfuse import copies, in_double, judge, moving
from fxfuse.judge import Comparison
from fxfuse.report import Match
from fxfuse.rewrite import rewrite
from fxfuse.verification import CheckedSite


def key(match: Match | CheckedSite) -> tuple:
    """What tells a site from others, in two rewrites of a model."""
    return match.pattern, match.module, match.where, match.nodes


@dataclass
class Found:
    """What came out at a site: the tensors that were compared, or why it could not be looked at."""

    compared: list[Comparison] = field(default_factory=list)
    problem: str = ""


class Watcher:
    """A Dynamo backend that runs the graph unfused and looks at each site of the fused one.

    choices: as of `rewrite`. found: by `key` of the site.
    """

    def __init__(self, **choices: object) -> None:
        self.choices = choices
        self.found: dict[tuple, Found] = {}

    def __call__(self, gm: fx.GraphModule, example_inputs: object) -> Callable:
        before = copies.of_graph(gm)
        report = rewrite(gm, **self.choices)
        pairs = list(zip(_graphs(before), _graphs(gm)))
        matches = list(report.matches)
        for plain, fused in pairs:
            for site in [_Site(match, plain, fused) for match in _take(matches, plain)]:
                _probe(site, self.found)
            plain.recompile()
        return before


def _graphs(gm: fx.GraphModule) -> Iterator[fx.GraphModule]:
    return (m for m in gm.modules() if isinstance(m, fx.GraphModule))


def _take(matches: list[Match], gm: fx.GraphModule) -> Iterator[Match]:
    """Remove the matches of a graph from the front: they come graph by graph."""
    names, taken = {n.name for n in gm.graph.nodes}, {}
    while matches and names.issuperset(matches[0].nodes):
        nodes = matches[0].nodes
        if any(taken.get(name, nodes) != nodes for name in nodes):
            return  # the next graph has nodes of the same names
        taken.update(dict.fromkeys(nodes, nodes))
        yield matches.pop(0)


def _probe(site: _Site, found: dict[tuple, Found]) -> None:
    """Put a call behind the site's last node that looks at it, as often as the graph runs."""

    def look(*values: object) -> None:
        here = found.setdefault(key(site.match), Found())
        try:
            with _apart():
                here.compared += site.compare(dict(zip(site.begin, values)))
        except Exception as error:
            here.problem = f"{type(error).__name__}: {error}".partition("\n")[0]

    nodes = {n.name: n for n in site.plain.gm.graph.nodes}
    last = [n for n in nodes.values() if n.name in site.match.nodes][-1]
    with site.plain.gm.graph.inserting_after(last):
        site.plain.gm.graph.call_function(look, tuple(nodes[name] for name in site.begin))


@contextlib.contextmanager
def _apart() -> Iterator[None]:
    """Outside of a checkpoint, which would count what is computed and saved here as its own."""
    with (
        _disable_current_modes(),
        torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
    ):
        yield


class _Site:
    """One site as it is in both graphs. Both begin at what the op reads, and end at its results."""

    def __init__(self, match: Match, plain: fx.GraphModule, fused: fx.GraphModule) -> None:
        self.match, inside = match, set(match.nodes)
        ours = {n.name for n in fused.graph.nodes}
        outputs = [n for n in plain.graph.nodes if n.name in inside and n.name in ours]
        self.outputs = [n.name for n in outputs if any(u.name not in inside for u in n.users)]
        outside = {n.name for n in plain.graph.nodes} - inside
        self.reads = _Slice(fused, self.outputs, outside).begin
        # A plain step of what the op reads may stay in the graph for others, and is repeated here.
        apart = outside - _made_of(plain, self.reads) | set(self.reads)
        self.plain = _Slice(plain, self.outputs, apart)
        self.fused = _Slice(fused, self.outputs, outside)
        self.begin = tuple(dict.fromkeys((*self.plain.begin, *self.fused.begin)))

    def compare(self, begin: Mapping[str, object]) -> list[Comparison]:
        """begin: the values of the nodes `self.begin`."""
        self.cotangents: dict[str, torch.Tensor] = {}
        eager, fused = self._run(self.plain, begin), self._run(self.fused, begin)
        truth = self._truth(begin)
        found = judge.compare(eager, fused, truth)
        if all(one.ok for one in found):
            return found
        return judge.compare(eager, fused, truth, self._moved(begin))

    def _run(self, side: _Slice, begin: Mapping[str, object]) -> dict[str, object]:
        """The outputs and the gradients of what the op reads; the first run is eager's."""
        leaves = {n: _leaf(v) for n, v in begin.items()}
        # Copies, since a step may write in place
        got = side.run({n: v.clone() if torch.is_tensor(v) else v for n, v in leaves.items()})
        found = {n: v.detach() if torch.is_tensor(v) else v for n, v in got.items()}
        ends = {n: v for n, v in got.items() if torch.is_tensor(v) and v.requires_grad}
        for name, end in ends.items():
            begins = self.cotangents.setdefault(name, moving.cotangent(end))
            ends[name] = (end, begins.to(end.dtype))
        if ends:
            torch.autograd.backward(*map(list, zip(*ends.values())))
        for name in self.reads:
            if getattr(leaves[name], "requires_grad", False):
                found[f"gradient of {name}"] = leaves[name].grad
        return found

    def _truth(self, begin: Mapping[str, object]) -> dict[str, object] | None:
        try:
            leaves = {n: _leaf(v) for n, v in begin.items()}
            in_double.widen(v for v in leaves.values() if torch.is_tensor(v))
            with in_double.running():
                return self._run(self.plain, leaves)
        except Exception:
            return None  # an op that has no fp64

    def _moved(self, begin: Mapping[str, object]) -> list[dict[str, object]]:
        runs = []
        for seed in range(moving.TIMES):
            leaves = {n: _leaf(v) for n, v in begin.items()}
            moving.move((v for v in leaves.values() if torch.is_tensor(v)), seed)
            runs.append(self._run(self.plain, leaves))
        return runs


class _Slice:
    """The part of a graph between `begin`, names among `outside`, and the nodes `ends`."""

    def __init__(self, gm: fx.GraphModule, ends: Iterable[str], outside: set[str]) -> None:
        self.gm, self.ends, self.begin = gm, list(ends), []
        self.nodes = {n.name: n for n in gm.graph.nodes}
        needed, waiting = set(), [self.nodes[name] for name in self.ends]
        while waiting:
            node = waiting.pop()
            if node.name in outside:
                self.begin.append(node.name)
            elif node not in needed:
                needed.add(node)
                waiting += node.all_input_nodes
        self.begin = list(dict.fromkeys(self.begin))
        self.steps = [n for n in gm.graph.nodes if n in needed]

    def run(self, values: Mapping[str, object]) -> dict[str, object]:
        interpreter = fx.Interpreter(self.gm, garbage_collect_values=False)
        interpreter.env = {self.nodes[n]: values[n] for n in self.begin}
        for node in self.steps:
            interpreter.env[node] = interpreter.run_node(node)
        return {name: interpreter.env[self.nodes[name]] for name in self.ends}


def _made_of(gm: fx.GraphModule, names: Iterable[str]) -> set[str]:
    """The nodes that are computed from `names`."""
    found = set(names)
    for node in gm.graph.nodes:
        if any(n.name in found for n in node.all_input_nodes):
            found.add(node.name)
    return found


def _leaf(value: object) -> object:
    if not torch.is_tensor(value):
        return value
    return value.detach().requires_grad_(value.requires_grad and torch.is_grad_enabled())
