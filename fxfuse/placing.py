"""Where a site will run: what the policy has to know of it, read from its graph."""

from __future__ import annotations

import torch

from fxfuse.costs import GPUS
from fxfuse.facts import known_equal, known_less
from fxfuse.match import Call, Fusion
from fxfuse.neighbours import Neighbours
from fxfuse.policy import Place
from fxfuse.site import Site

DEFAULT = "sm_90"


def place(
    neighbours: Neighbours,
    fusion: Fusion,
    call: Call,
    site: Site,
    compiled: bool,
    target: str | None,
) -> Place:
    """The place of a site. A target overrides the device of its values."""
    facts = neighbours.view.facts
    values = [facts.value(n) for n in (*site.outputs, *site.inputs, *site.parameters)]
    known = [value for value in values if value is not None]
    trains = not fusion.backward and _trains(known)
    dim = call.kwargs.get("dim", -1)
    rows, columns = _size(values[0], dim, call.kwargs.get("group", 0))
    joins = fusion.backward and call.like is not None
    on_cpu = not known or known[0].device.type == "cpu"
    target = target or ("cpu" if on_cpu else present(known[0].device))
    flow = None
    if compiled and target != "cpu" and not joins:
        flow = neighbours.flow(site, call, trains, fusion.backward)
    return Place(
        pattern=fusion.name,
        target=target,
        compiled=compiled,
        rows=rows,
        columns=columns,
        fp16=any(value.dtype == torch.float16 for value in known),
        trains=trains,
        strided=any(_is_strided(value, dim) for value in values[:1]),
        strided_vector=any(map(_is_strided_vector, known)),
        flow=flow,
        added_apart=neighbours.added_apart(call) if joins else None,
    )


def _trains(known: list[torch.Tensor]) -> bool:
    """Whether a gradient will be asked for; where nothing is known, it may be."""
    return torch.is_grad_enabled() and (not known or any(v.requires_grad for v in known))


def _is_strided(value: torch.Tensor | None, dim: int) -> bool:
    """Whether the values of a row are known to lie apart in memory."""
    return value is not None and value.dim() > 0 and known_less(1, value.stride(dim))


def _is_strided_vector(value: torch.Tensor) -> bool:
    """Whether a tensor is one row, and its values are known to lie apart in memory."""
    steps = [step for step, size in zip(value.stride(), value.shape) if not known_equal(size, 1)]
    return len(steps) == 1 and known_less(1, steps[0])


def _size(value: torch.Tensor | None, dim: int, group: int) -> tuple[int | None, int | None]:
    """Rows and columns, each None if not known. group: columns that are a row of their own."""
    if value is None:
        return None, None
    sizes = list(value.shape) or [None]
    columns = sizes.pop(dim)
    rows: int | None = 1
    for size in sizes:
        rows = rows * size if isinstance(size, int) and rows is not None else None
    columns = columns if isinstance(columns, int) else None
    if group and columns is not None:
        return (None if rows is None else rows * (columns // group)), group
    return rows, columns


def present(device: torch.device | None = None) -> str:
    """A GPU that is there as one of the known targets, rounded down; `DEFAULT` if there is none."""
    if not torch.cuda.is_available():
        return DEFAULT
    if torch.version.hip:
        return "gfx942"
    major, minor = torch.cuda.get_device_capability(device)
    known = [t for t in GPUS if t.startswith("sm_") and int(t[3:]) <= 10 * major + minor]
    return known[-1] if known else next(iter(GPUS))
