"""The only module that changes a graph: candidates, guards, plan, edits, report."""

from __future__ import annotations

import operator
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from fxfuse import fuel, in_place, placing, policy as policies, registry
from fxfuse.describe import describe
from fxfuse.guard import Guards
from fxfuse.match import Bound, Call, Decline, Derived, Fusion
from fxfuse.misses import Refusals
from fxfuse.neighbours import Neighbours
from fxfuse.policy import Choice
from fxfuse.report import Match, Miss, Report
from fxfuse.site import Site, site
from fxfuse.term import Attr
from fxfuse.view import View

_VALUE_KEYS = ("example_value", "val")


def rewrite(
    gm: fx.GraphModule,
    *,
    patterns: Iterable[str | Fusion] | str | None = None,
    policy: str = "auto",
    target: str | None = None,
    compiled: bool = False,
    backward_only: bool = False,
) -> Report:
    """Fuse what matches in `gm` and in every graph module nested in it, in place.

    patterns: names or patterns to use, None for all. policy: "auto", "always" or "never".
    target: "cpu", "sm_80", ... where the graph will run, if not where its metadata says.
    compiled: whether a compiler that fuses plain PyTorch ops follows. backward_only: leave out the
    patterns that are meant for graphs before autograd.

    Raises UnknownPattern and BadOption before anything is changed.
    """
    begin = time.perf_counter()
    fusions = registry.select(patterns)
    policies.check(policy)
    policies.check_target(target)
    forward = tuple(f for f in fusions if not f.backward and not backward_only)
    backward = tuple(f for f in fusions if f.backward)
    report = Report()
    report.graph_module = gm
    for module in [m for m in gm.modules() if isinstance(m, fx.GraphModule)]:
        job = _Rewrite(module, forward, policy, target, compiled, {f.name for f in backward})
        job.run()
        report.matches += job.matches
        report.misses += _over_other_dims(report, job)
        if job.has_words_of(backward):
            _rewrite_backward(report, _Rewrite(module, backward, policy, target, compiled))
    report.modified = bool(report.matches)
    report.seconds = time.perf_counter() - begin
    return report


def _over_other_dims(report: Report, job: _Rewrite) -> list[Miss]:
    """Norms over other dimensions than the last; returns what is then still left alone, by node."""
    misses = {miss.node: miss for miss in job.misses}
    fusions = tuple(f for f in job.fusions if f.any_dim)
    for dim in sorted(job.view.facts.others) if fusions else ():
        along = replace(job.again(), fusions=fusions, dim=dim)
        along.run()
        report.matches += along.matches
        for node in (n for match in along.matches for n in match.nodes):
            misses.pop(node, None)
        misses.update((miss.node, miss) for miss in along.misses)
    return list(misses.values())


def _rewrite_backward(report: Report, job: _Rewrite) -> None:
    """Again and again, since one op can take in what stands before it and what stands behind it."""
    job.run()
    while job.matches:
        report.matches += job.matches
        job = job.again()
        job.run()
    report.misses += job.misses


@dataclass
class _Plan:
    """One site to rewrite, decided before the graph is touched.

    readers: nodes that may read the alias that `call` returns beside its result, instead of one of
    the twins; see `Fork`.
    """

    fusion: Fusion
    site: Site
    call: Call
    choice: Choice
    matches: list[Match]
    readers: frozenset[fx.Node] = frozenset()
    twins: tuple[fx.Node, ...] = ()


@dataclass
class _Rewrite:
    """The rewriting of one graph."""

    graph_module: fx.GraphModule
    fusions: tuple[Fusion, ...]
    policy: str
    target: str | None
    compiled: bool
    forks: set[str] = field(default_factory=set)
    dim: int = -1
    matches: list[Match] = field(default_factory=list)
    misses: list[Miss] = field(default_factory=list)
    _plans: list[_Plan] = field(default_factory=list)
    _taken: dict[fx.Node, int] = field(default_factory=dict)
    _needed: set[fx.Node] = field(default_factory=set)

    def run(self) -> None:
        changes = in_place.follow(self.graph_module.graph)
        self.view = View(self.graph_module, self.dim)
        self._nodes = list(self.graph_module.graph.nodes)
        self.guards = Guards(self.view)
        self.neighbours = Neighbours(self.view)
        self.refusals = Refusals(self.view, self.fusions)
        self._plan()
        self.misses = self.refusals.misses(self._taken)
        self.matches = [match for plan in reversed(self._plans) for match in plan.matches]
        editor = _Editor(self.graph_module)
        for plan in self._plans:
            editor.commit(plan)
        if self._plans:
            self.graph_module.graph.lint()
            self.graph_module.recompile()
        else:
            in_place.undo(changes)

    def again(self) -> _Rewrite:
        """The same for the graph as it is now."""
        return replace(self, matches=[], misses=[], _plans=[], _taken={}, _needed=set())

    def has_words_of(self, fusions: tuple[Fusion, ...]) -> bool:
        """Whether one of `fusions` is possible in the graph as it was before the run."""
        words = {self.view.term(node).word for node in self._nodes}
        return any(need <= words for fusion in fusions for need in fusion.needs)

    def _plan(self) -> None:
        """Decide all sites, from the outputs of the graph to its inputs."""
        for node in self.graph_module.graph.nodes:
            self.view.words(node)  # in this order no call goes deep
        for node in reversed(self.graph_module.graph.nodes):
            if node in self._taken or node.op in ("placeholder", "output", "get_attr"):
                continue
            plan = self._best(node)
            if plan is not None and not fuel.spend(plan.matches):
                self.refusals.add(
                    plan.fusion, node, plan.site.nodes, "FXFUSE_FUEL has run out", True
                )
            elif plan is not None:
                self._plans.append(plan)
                self._taken.update(dict.fromkeys(plan.site.nodes, plan.fusion.size))
                self._needed.update(plan.site.inputs)
                if plan.choice.forward == "kernel":
                    self.neighbours.add_kernel(plan.site)

    def _best(self, node: fx.Node) -> _Plan | None:
        word = self.view.term(node).word
        for fusion in self.fusions:
            if word not in fusion.expression.words:
                continue
            for bound in fusion.ways(self.view, node):
                plan = self._judge(fusion, bound)
                if plan is not None:
                    return plan
        return None

    def _judge(self, fusion: Fusion, bound: Bound) -> _Plan | None:
        call = fusion.built(bound)
        if call is None:
            return None
        if isinstance(call, Decline):
            return self._refuse(fusion, bound, call.reason, by_guard=False)
        where = site(bound, call)
        if self._overlaps(where):
            return None
        reason = self.guards.refuse(where)
        if reason:
            return self._refuse(fusion, bound, reason)
        here = placing.place(self.neighbours, fusion, call, where, self.compiled, self.target)
        choice = policies.choose(self.policy, here)
        if choice is None:
            return self._refuse(fusion, bound, "the policy is to leave every site alone (never)")
        if fusion.backward and choice.backward == "inline":
            return None
        if any(argument.name == "forward" for argument in call.op._schema.arguments):
            call.kwargs.update(forward=choice.forward, backward=choice.backward)
        readers = self._later_readers(call, bound, where)
        if readers:
            call = replace(call, op=call.fork.op)
        match = describe(self.view.facts, fusion.name, where, call, choice)
        matches = [match]
        if readers:
            matches.append(replace(match, pattern=call.fork.pattern, bytes_saved=None))
        twins = self.guards.twins(bound.get(call.fork.of)) if readers else ()
        return _Plan(fusion, where, call, choice, matches, readers, tuple(twins))

    def _later_readers(self, call: Call, bound: Bound, where: Site) -> frozenset[fx.Node]:
        """Who can be given the alias of a fork; nobody where no gradient will flow."""
        if call.fork is None or call.fork.pattern not in self.forks:
            return frozenset()
        source = bound.get(call.fork.of)
        if not isinstance(source, fx.Node):
            return frozenset()
        example = source.meta.get("example_value")
        trains = torch.is_grad_enabled() and getattr(example, "requires_grad", True)
        return self.guards.alias_readers(where, source) if trains else frozenset()

    def _overlaps(self, where: Site) -> bool:
        """True if a site that is planned already covers a node of this one, or reads inside it."""
        inside = self._needed.difference(where.outputs)
        return any(n in self._taken or n in inside for n in where.nodes)

    def _refuse(self, fusion: Fusion, bound: Bound, reason: str, by_guard: bool = True) -> None:
        self.refusals.add(fusion, bound.root, bound.nodes, reason, by_guard)


class _Editor:
    """Puts planned ops into a graph, one after the other."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self.graph = gm.graph
        self._successors: dict[fx.Node, fx.Node] = {}
        self._replaced: dict[fx.Node, tuple[fx.Node, ...]] = {}

    def commit(self, plan: _Plan) -> None:
        where, call = plan.site, plan.call
        place = where.place()
        for source in where.inputs:
            _hoist(self._now(source), place)
        with self.graph.inserting_before(place):
            node = self.graph.call_function(call.op, tuple(map(self._now, call.args)), call.kwargs)
            _carry_metadata(node, where, call.like)
            self._replaced[node] = where.nodes
            if plan.readers:
                node = self._fork(node, plan)
            results = self._results(node, where)
        self._replace(where, results)

    def _now(self, operand: object) -> object:
        """An operand of the plan as the graph has it now: another op may have taken its place."""
        if isinstance(operand, Attr):
            return self.graph.get_attr(operand.target)
        if isinstance(operand, (list, tuple)):
            return type(operand)(map(self._now, operand))
        if isinstance(operand, Derived):
            node = self.graph.call_function(operand.op, tuple(map(self._now, operand.args)))
            if operand.value is not None:
                node.meta["val"] = operand.value
            return node
        return self._successors.get(operand, operand) if isinstance(operand, fx.Node) else operand

    def _results(self, node: fx.Node, where: Site) -> list[fx.Node]:
        if where.results is None:
            return [node]
        return [self._result(node, i, old, where) for i, old in zip(where.results, where.outputs)]

    def _result(self, node: fx.Node, index: int, old: fx.Node, where: Site) -> fx.Node:
        item, view = self._item(node, index, old), where.views.get(index)
        if view is None:
            return item
        viewed = self.graph.call_function(view.op, (item, *view.args))
        viewed.meta = dict(old.meta)
        item.meta["val"] = view.value
        return viewed

    def _item(self, node: fx.Node, index: int, like: fx.Node) -> fx.Node:
        item = self.graph.call_function(operator.getitem, (node, index))
        item.meta = dict(like.meta)
        return item

    def _fork(self, node: fx.Node, plan: _Plan) -> fx.Node:
        """Give the later readers of x the alias; returns the node of the op's own result."""
        source = self._now(plan.site.inputs[0])
        result = self._item(node, 0, node)
        alias = self._item(node, 1, source)
        _pair_metadata(node, source)
        for twin in map(self._now, plan.twins):
            for user in list(twin.users):
                if node < user and not plan.readers.isdisjoint(self._was(user)):
                    user.replace_input_with(twin, alias)
        return result

    def _was(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """The nodes of the plan that a node of the graph stands for."""
        return self._replaced.get(node, (node,))

    def _replace(self, where: Site, results: list[fx.Node]) -> None:
        names = [n.name for n in where.outputs]
        for old, new in zip(where.outputs, results):
            old.replace_all_uses_with(new)
            self._successors[old] = new
        for old in reversed(where.nodes):
            self.graph.erase_node(old)
        for name, new in zip(names, results):
            if new.users:
                new.name = name  # an exported program knows its outputs by name
            else:
                self.graph.erase_node(new)


def _hoist(node: fx.Node, place: fx.Node) -> None:
    """Move a node, and what it needs, before `place`: a guard has shown that this can be done."""
    if node < place:
        return
    for source in node.all_input_nodes:
        _hoist(source, place)
    place.prepend(node)


def _carry_metadata(node: fx.Node, where: Site, like: fx.Node | None) -> None:
    meta = {k: v for k, v in where.root.meta.items() if k not in (*_VALUE_KEYS, "tensor_meta")}
    for key in _VALUE_KEYS:
        value = (like or where.root).meta.get(key)
        if like is None and where.results is not None:
            value = _values(node, where, key)
        if value is not None:
            meta[key] = value
    meta["custom"] = {**meta.get("custom", {}), "fxfuse": f"{node.target._schema.name} {node.name}"}
    node.meta = meta


def _values(node: fx.Node, where: Site, key: str) -> tuple | None:
    """The values of all results of an op; None for one that nobody uses."""
    found = {i: n.meta.get(key) for i, n in zip(where.results, where.outputs)}
    if None in found.values():
        return None
    found |= {i: view.value for i, view in where.views.items()}
    return tuple(map(found.get, range(len(node.target._schema.returns))))


def _pair_metadata(node: fx.Node, source: fx.Node) -> None:
    """The metadata of an op that returns `source` beside its own result."""
    for key in _VALUE_KEYS:
        own, other = node.meta.pop(key, None), source.meta.get(key)
        if own is not None and other is not None:
            node.meta[key] = (own, other)
