"""A run in which each step errs as far as its dtype may round: what roundings do to a result.

One order of the steps may be lucky. The gradient of v / sqrt(v * v) is 0, the difference of two
terms of the size of 1 / v, of which as much is left as their roundings happen to differ by. Another
order leaves ten times that, or nothing, and neither is wrong; an error that is not small next to
the terms is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_SUMS = {"linalg_vector_norm", "mean", "sum", "var"}
# Pointwise steps whose results are elements of their operands.
_EXACT = {"abs", "clamp", "clone", "neg", "relu", "where"}


class Noisy(TorchDispatchMode):
    """Errs at random, by up to half the machine epsilon, in what each step returns.

    Backward steps err too. Writes, copies and views do not.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(
        self,
        step: torch._ops.OpOverload,
        types: Sequence[type],
        args: Sequence = (),
        kwargs: Mapping | None = None,
    ) -> object:
        result = step(*args, **(kwargs or {}))
        return self._wrong(result) if _rounds(step, result) else result

    def _wrong(self, result: Tensor) -> Tensor:
        sides = 2 * torch.rand(result.shape, generator=self.generator, dtype=torch.float64) - 1
        errors = torch.finfo(result.dtype).eps / 2 * sides
        # In place, so that it lies as it did.
        return result.copy_(result.double() * (1 + errors))


def _rounds(step: torch._ops.OpOverload, result: object) -> bool:
    if not isinstance(result, Tensor) or not result.is_floating_point():
        return False
    if any(r.alias_info is not None for r in step._schema.returns):
        return False
    name = step.overloadpacket.__name__
    return name in _SUMS or (torch.Tag.pointwise in step.tags and name not in _EXACT)
