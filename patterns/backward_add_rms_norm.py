"""dh = dres + the norm's gradient: the residual gradient goes into the norm's backward kernel."""

from __future__ import annotations

from fxfuse.match import Bound, Call, Decline, item, named, same_shape, scalar, var
from fxfuse.patterns.norm_backward import ADDS, norm_backward, read
from fxfuse.registry import pattern

own = named("own", item(named("source", norm_backward), scalar("index")))


@pattern("backward_add_rms_norm", var("dres") + own, size=2, backward=True)
def build(b: Bound) -> Call | Decline | None:
    """The gradient that a norm's input gets elsewhere, added inside the norm's backward kernel."""
    backward = read(b.source)
    if backward is None or backward.op not in ADDS or b.index != 0:
        return None
    if backward.args["dres"] is not None:
        return b.decline("the kernel adds another residual gradient already")
    own, dres = b.shape("own"), b.shape("dres")
    if own is None or dres is None or not same_shape(own, dres):
        return b.decline("the residual gradient has another shape than the norm's input")
    if not b.dtype("own") == b.dtype("dres") == b.facts.dtype(b.root):
        return b.decline(f"the residual gradient is {b.dtype('dres')}, the norm's {b.dtype('own')}")
    outputs = tuple(f"result{i}" for i in range(len(backward.op._schema.returns)))
    if not _take_results(b):
        return None
    return backward.call(outputs, root=0, dres=b.dres)


def _take_results(b: Bound) -> bool:
    """Let the match cover the call's other results; False if one is used in a way that is odd."""
    for user in b.source.users:
        index = user.args[1] if b.view.term(user).word == "item" else None
        if index is None or (index == 0 and user is not b.own):
            return False
        if user is not b.own:
            b.nodes.append(user)
            if not b.bind(f"result{index}", user):
                return False
    return True
