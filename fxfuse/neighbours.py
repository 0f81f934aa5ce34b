"""What goes in and out of a site, and which ops beside it Inductor would fuse with it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import fx

from fxfuse.costs import Barrier, Flow
from fxfuse.facts import known_equal
from fxfuse.fusable import CALLED, GENERATED, VIEW, kind, name_of
from fxfuse.match import Call
from fxfuse.site import Site
from fxfuse.view import View

_REDUCTIONS = {"mean", "rms_norm", "sum"}


@dataclass
class Neighbours:
    """The neighbours of sites in one graph.

    kernels: of sites planned so far whose forward is a kernel, the root for each of their nodes.
    """

    view: View
    kernels: dict[fx.Node, fx.Node] = field(default_factory=dict)
    _depth: dict[fx.Node, int] = field(default_factory=dict)

    def add_kernel(self, site: Site) -> None:
        self.kernels.update(dict.fromkeys(site.nodes, site.root))

    def flow(self, site: Site, call: Call, trains: bool, in_backward: bool) -> Flow | None:
        """The flow of a site; None where shapes are not known."""
        root = self.view.facts.value(site.root)
        if root is None:
            return None
        inputs = list(dict.fromkeys((*site.inputs, *site.parameters)))
        wide = {n: self._itemsize(n, root) for n in (*inputs, *site.outputs)}
        readers = {n: list(self._readers(n, site)) for n in site.outputs}
        kept = set(site.saved) if trains else set()
        idle = [n for n in site.outputs[1:] if not readers[n] and n not in kept]
        dres = [n for n in site.outputs[1:] if readers[n]]
        if call.fork is not None:
            dres += [n for n in inputs if any(self._readers(n, site))]
        fused = [n for n in site.outputs if any(self._joins(u, site) for u in readers[n])]
        barriers = [self._before(n, site, wide[n], n in kept) for n in site.inputs if wide[n]]
        barriers += [self._behind(n, site, wide[n], readers[n], n in kept) for n in fused]
        count = len({u for u in readers[site.root] if not self._joins(u, site)})
        return Flow(
            reads=sum(wide[n] for n in inputs),
            writes=sum(wide[n] for n in site.outputs if n not in idle),
            unused=sum(wide[n] for n in idle),
            saved=sum(wide.get(n, 0) for n in kept),
            dy=wide[site.root],
            dys=count + (site.root in fused) or 1,
            dres=sum(wide[n] for n in dres),
            norms=self._norms(site),
            weighted=self._weighted(site, inputs, wide, in_backward),
            barriers=tuple(b for b in barriers if b is not None),
            in_backward=in_backward,
        )

    def added_apart(self, call: Call) -> int:
        """How many of the gradients that a backward op is to take, beside those that it takes
        already, Inductor would add up in one kernel, without writing them.
        """
        known = set(call.like.all_input_nodes)
        taken = [n for n in call.operands if isinstance(n, fx.Node) and n not in known]
        return sum(len(n.users) == 1 and kind(_source(n)) == GENERATED for n in taken)

    # ---- sizes ----

    def _itemsize(self, operand: object, root: torch.Tensor) -> int:
        """Bytes of an operand for each element of the site; 0 for one value a column or row."""
        value = self.view.facts.value(operand)
        if value is None or not known_equal(value.numel(), root.numel()):
            return 0
        return value.element_size()

    def _norms(self, site: Site) -> int:
        found, inside = 0, set()
        for node in reversed(site.nodes):
            if node not in inside:
                term = self.view.term(node)
                found += term.word in _REDUCTIONS
                inside.update(term.nodes)
        return found

    def _weighted(self, site: Site, inputs: list, wide: dict, in_backward: bool) -> bool:
        if in_backward:
            return any(not wide[n] for n in site.outputs)
        small = [self.view.facts.value(n) for n in inputs if not wide[n]]
        return any(value is None or value.requires_grad for value in small)

    # ---- neighbours ----

    def _before(self, node: fx.Node, site: Site, size: int, saved: bool) -> Barrier | None:
        """What makes an input, if Inductor would make it within the site."""
        source = _source(node)
        if not self._joins(source, site):
            return None
        elsewhere = any(self._readers(node, site))
        name = name_of(source)
        return Barrier(
            f"the {name} before it",
            forward=(1 if elsewhere else 2) * size,
            backward=_gradients_apart(name, saved, elsewhere) * size,
        )

    def _behind(
        self, node: fx.Node, site: Site, size: int, readers: list[fx.Node], saved: bool
    ) -> Barrier:
        """What reads a result within the same kernel."""
        joined = [self._joins(u, site) for u in readers]
        first = readers[joined.index(True)]
        name = name_of(first)
        # the gradient of a sum is that of its other operand too, so that it is written in any case
        forward, backward = 1 if saved or not all(joined) else 2, 1 if name == "add" else 2
        return Barrier(f"the {name} behind it", forward * size, backward * size)

    def _readers(self, node: object, site: Site) -> Iterator[fx.Node]:
        """Who reads a value outside of the site, through views; a kernel's nodes count as one."""
        for user in getattr(node, "users", ()):
            used = user.users or user.op == "output"
            if user in site.nodes or not used or not self.view.facts.is_tensor(user):
                continue
            if user in self.kernels:
                yield self.kernels[user]
            elif kind(user) == VIEW:
                yield from self._readers(user, site)
            else:
                yield user

    def _joins(self, node: fx.Node, site: Site) -> bool:
        """Whether Inductor would put a node into one kernel with the site: it writes code for it,
        and no call that it does not write lies in between.
        """
        if node in self.kernels or kind(node) != GENERATED:
            return False
        depth = self._depths()
        return depth[node] == depth[site.root]

    def _depths(self) -> dict[fx.Node, int]:
        """For each node the most calls that Inductor does not write on a way to it."""
        if not self._depth:
            for node in self.view.graph_module.graph.nodes:
                own = self._is_called(node)
                before = [self._depth[n] for n in node.all_input_nodes]
                self._depth[node] = max(before, default=0) + own
        return self._depth

    def _is_called(self, node: fx.Node) -> bool:
        """Whether a node computes tensors, and not in a kernel that Inductor writes."""
        value = node.meta.get("example_value", node.meta.get("val"))
        holds = isinstance(value, (torch.Tensor, list, tuple)) and not isinstance(value, torch.Size)
        if not holds or node.op in ("placeholder", "get_attr"):
            return False
        return kind(node) == CALLED


def _source(node: fx.Node) -> fx.Node:
    """What makes a value, behind any views of it."""
    while kind(node) == VIEW:
        node = node.all_input_nodes[0]
    return node


def _gradients_apart(name: str, saved: bool, elsewhere: bool) -> int:
    """How often a gradient goes through memory between a backward and that of what made an input.

    The operands of a sum in the site share their gradient, so that it is written in any case, and a
    sum before the site has nothing to compute for its gradients. Inductor saves the operands of
    what made an input instead of the input, and computes that again within the backward.
    """
    if name == "add":
        return 0
    if not saved:
        return 1
    return 2 if elsewhere else 4
