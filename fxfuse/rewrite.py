"""The only module that changes a graph: candidates, guards, plan, edits, report."""

from __future__ import annotations

import operator
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import fx

from fxfuse import origin, policy as policies, registry
from fxfuse.errors import BadOption
from fxfuse.guard import Guards, Site, place_for, site
from fxfuse.match import Bound, Call, Decline, Fusion
from fxfuse.report import Match, Miss, Report
from fxfuse.view import Attr, View

_VALUE_KEYS = ("example_value", "val")


def rewrite(
    gm: fx.GraphModule,
    *,
    patterns: Iterable[str | Fusion] | str | None = None,
    policy: str = "auto",
    target: str | None = None,
    compiled: bool = False,
) -> Report:
    """Fuse what matches in `gm` and in every graph module nested in it, in place.

    patterns: names or patterns to use, None for all. policy: "auto", "always" or "never".
    target: "cpu", "sm_80", ... where the graph will run, if not where its metadata says.
    compiled: whether a compiler that fuses plain PyTorch ops follows.

    Raises UnknownPattern and BadOption before anything is changed.
    """
    begin = time.perf_counter()
    fusions = registry.select(patterns)
    policies.check(policy)
    policies.check_target(target)
    report = Report()
    report.graph_module = gm
    for module in [m for m in gm.modules() if isinstance(m, fx.GraphModule)]:
        job = _Rewrite(module, fusions, policy, target, compiled)
        job.run()
        report.matches += job.matches
        report.misses += job.misses
    report.modified = bool(report.matches)
    report.seconds = time.perf_counter() - begin
    return report


@dataclass
class _Plan:
    """One site to rewrite, decided before the graph is touched."""

    fusion: Fusion
    site: Site
    call: Call
    match: Match


@dataclass
class _Rewrite:
    """The rewriting of one graph."""

    graph_module: fx.GraphModule
    fusions: tuple[Fusion, ...]
    policy: str
    target: str | None
    compiled: bool
    matches: list[Match] = field(default_factory=list)
    misses: list[Miss] = field(default_factory=list)
    _reasons: dict[tuple[fx.Node, str], str] = field(default_factory=dict)

    def run(self) -> None:
        self.view = View(self.graph_module)
        anchors = [n for n in self.graph_module.graph.nodes if _is_anchor(self.view, n)]
        if not anchors:
            return
        self.guards = Guards(self.view)
        plans = self._plan()
        self._explain_misses(anchors, plans)
        editor = _Editor(self.graph_module)
        for plan in plans:
            editor.commit(plan)
        self.matches = [plan.match for plan in reversed(plans)]
        if plans:
            self.graph_module.graph.lint()
            self.graph_module.recompile()

    # ---- planning ----

    def _plan(self) -> list[_Plan]:
        taken: set[fx.Node] = set()
        plans = []
        for node in reversed(self.graph_module.graph.nodes):
            if node in taken or node.op in ("placeholder", "output", "get_attr"):
                continue
            plan = self._best(node, taken)
            if plan is not None and _spend_fuel():
                plans.append(plan)
                taken.update(plan.site.nodes)
        return plans

    def _best(self, node: fx.Node, taken: set[fx.Node]) -> _Plan | None:
        word = self.view.term(node).word
        for fusion in self.fusions:
            if word not in fusion.expression.words:
                continue
            for bound in fusion.ways(self.view, node):
                plan = self._judge(fusion, bound, taken)
                if plan is not None:
                    return plan
        return None

    def _judge(self, fusion: Fusion, bound: Bound, taken: set[fx.Node]) -> _Plan | None:
        call = fusion.build(bound)
        if call is None:
            return None
        if isinstance(call, Decline):
            return self._refuse(fusion, bound, call.reason)
        outputs = tuple(_output_node(bound, name, k) for k, name in enumerate(call.outputs))
        inputs = tuple(a for a in call.args if isinstance(a, fx.Node))
        where = site(self.view, bound.nodes, inputs, outputs)
        if not taken.isdisjoint(where.nodes):
            return None
        reason = self.guards.refuse(where)
        if reason:
            return self._refuse(fusion, bound, reason)
        facts = self.view.facts
        main = outputs[-1] if len(outputs) > 1 else inputs[0]
        place = policies.place(facts.value(main), self.compiled, self.target)
        choice = policies.choose(self.policy, place)
        if choice is None:
            return self._refuse(fusion, bound, "the policy is to leave every site alone (never)")
        call.kwargs.update(forward=choice.forward, backward=choice.backward)
        return _Plan(fusion, where, call, _describe(self.view, fusion, where, call, choice))

    def _refuse(self, fusion: Fusion, bound: Bound, reason: str) -> None:
        for node in bound.nodes:
            self._reasons.setdefault((node, fusion.name), reason)

    # ---- what was left alone ----

    def _explain_misses(self, anchors: list[fx.Node], plans: list[_Plan]) -> None:
        fused = {n: plan for plan in plans for n in plan.site.nodes}
        told = set()
        for anchor in anchors:
            size = fused[anchor].fusion.size if anchor in fused else -1
            for fusion in self.fusions:
                reason = self._reasons.get((anchor, fusion.name))
                if reason and fusion.size > size:
                    self._miss(fusion.name, anchor, reason)
                    told.add(anchor)
                    break
            if anchor not in fused and anchor not in told:
                self._miss(self.fusions[-1].name, anchor, _near_miss(self.view, anchor))

    def _miss(self, name: str, anchor: fx.Node, reason: str) -> None:
        where = origin.code_line(anchor)
        self.misses.append(Miss(name, anchor.name, origin.module_path(anchor), where, reason))


def _output_node(bound: Bound, name: str, index: int) -> fx.Node:
    return bound.root if index == 0 else bound.names[name]


def _is_anchor(view: View, node: fx.Node) -> bool:
    """A whole norm, or 1 / sqrt of a mean of squares: what looks like a norm to a reader."""
    term = view.term(node)
    if term.word == "rms_norm":
        return True
    return term.word in ("rsqrt", "sqrt") and _mean_square(view, term) is not None


def _mean_square(view: View, root: object) -> object:
    below = view.see(root.args[0])
    if below is not None and below.word == "add":
        terms = (t for t in map(view.see, below.args) if t is not None)
        below = next((t for t in terms if t.word in ("mean", "sum")), None)
    if below is None or below.word not in ("mean", "sum"):
        return None
    inner = view.see(below.args[0])
    return below if inner is not None and inner.word == "square" else None


def _near_miss(view: View, anchor: fx.Node) -> str:
    """What keeps an anchor from being a norm, from the inside out."""
    term = view.term(anchor)
    if term.flaw:
        return term.flaw
    below = _mean_square(view, term) if term.word != "rms_norm" else None
    if below is not None and below.flaw:
        return below.flaw
    if below is not None and below.word == "sum":
        return "it divides by the root of a sum of squares, not of their mean"
    source = _stripped(view, view.see(below.args[0]).args[0]) if below else None
    users = [view.term(u) for u in anchor.users]
    products = [t for t in users if t.word == "mul"]
    if not products:
        return "the root of the mean of squares does not scale the tensor that it is made of"
    factors = [_stripped(view, a) for t in products for a in t.args]
    if source not in factors:
        return "what it scales is not the tensor whose squares are averaged"
    return "its parts do not combine to a form of RMSNorm that fxfuse knows"


def _stripped(view: View, operand: object) -> object:
    term = view.see(operand)
    while term is not None and term.word in ("cast", "same"):
        operand = term.args[0]
        term = view.see(operand)
    return operand


# ---- describing a match --------------------------------------------------------------------------


def _describe(view: View, fusion: Fusion, where: Site, call: Call, choice) -> Match:
    facts = view.facts
    schema = call.op._schema
    operands = {p.name: a for p, a in zip(schema.arguments, call.args) if a is not None}
    shapes = {k: facts.shape(a) for k, a in operands.items()}
    dtypes = {k: facts.dtype(a) for k, a in operands.items()}
    inner = where.root
    module = origin.module_path(inner) or origin.module_path(where.nodes[0])
    return Match(
        pattern=fusion.name,
        op=schema.name,
        nodes=tuple(n.name for n in where.nodes),
        module=module,
        where=origin.code_line(where.nodes[0]),
        shapes={k: tuple(_plain_size(d) for d in s) for k, s in shapes.items() if s is not None},
        dtypes={k: str(d).removeprefix("torch.") for k, d in dtypes.items() if d is not None},
        attributes=dict(call.kwargs),
        policy=_sides(choice),
        bytes_saved=_bytes_saved(facts, where),
    )


def _plain_size(size: object) -> object:
    return size if isinstance(size, int) else str(size)


def _sides(choice) -> str:
    if choice.forward == choice.backward:
        return f"{choice.forward}: {choice.why}"
    return f"forward {choice.forward}, backward {choice.backward}: {choice.why}"


def _bytes_saved(facts, where: Site) -> int | None:
    """Forward traffic of the replaced nodes one by one, less that of the op."""

    def size(node: fx.Node) -> int | None:
        value = facts.value(node)
        if value is None or not all(isinstance(d, int) for d in value.shape):
            return None
        return value.numel() * value.element_size()

    sizes = [size(n) for node in where.nodes for n in (node, *node.all_input_nodes)]
    fused = [size(n) for n in (*where.inputs, *where.outputs)]
    if None in sizes or None in fused or len(where.nodes) == 1:
        return None
    return max(0, sum(sizes) - sum(fused))


# ---- editing -------------------------------------------------------------------------------------


class _Editor:
    """Puts planned ops into a graph, one after the other."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self.graph = gm.graph
        self._successors: dict[fx.Node, fx.Node] = {}

    def commit(self, plan: _Plan) -> None:
        where, call = plan.site, plan.call
        place = place_for(where)
        for source in where.inputs:
            _hoist(self._now(source), place)
        with self.graph.inserting_before(place):
            node = self.graph.call_function(call.op, tuple(map(self._now, call.args)), call.kwargs)
            _carry_metadata(node, where)
            results = self._results(node, where)
        self._replace(where, results)

    def _now(self, operand: object) -> object:
        """An operand of the plan as the graph has it now: another op may have taken its place."""
        if isinstance(operand, Attr):
            return self.graph.get_attr(operand.target)
        return self._successors.get(operand, operand) if isinstance(operand, fx.Node) else operand

    def _results(self, node: fx.Node, where: Site) -> list[fx.Node]:
        if len(where.outputs) == 1:
            return [node]
        results = []
        for index, old in enumerate(where.outputs):
            item = self.graph.call_function(operator.getitem, (node, index))
            item.meta = dict(old.meta)
            results.append(item)
        return results

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


def _carry_metadata(node: fx.Node, where: Site) -> None:
    meta = {k: v for k, v in where.root.meta.items() if k not in (*_VALUE_KEYS, "tensor_meta")}
    for key in _VALUE_KEYS:
        values = [n.meta.get(key) for n in where.outputs]
        if all(v is not None for v in values):
            meta[key] = values[0] if len(values) == 1 else tuple(values)
    meta["custom"] = {**meta.get("custom", {}), "fxfuse": node.target._schema.name}
    node.meta = meta


# ---- fuel ----------------------------------------------------------------------------------------

_fuel: int | None = None
_fuel_text: str | None = None


def _spend_fuel() -> bool:
    """FXFUSE_FUEL=n lets only the first n rewrites of the process through, to bisect errors."""
    global _fuel, _fuel_text
    text = os.environ.get("FXFUSE_FUEL")
    if text != _fuel_text:
        if text and not text.isdecimal():
            raise BadOption(option="FXFUSE_FUEL", value=text, expected="give a whole number")
        _fuel_text, _fuel = text, int(text) if text else None
    if _fuel is None:
        return True
    _fuel -= 1
    return _fuel >= 0
