"""The one place that talks to torch.library, and what all ops of namespace `fxfuse` share.

An outer op owns its gradient: it calls an `autograd.Function` over inner ops `*_fwd` and `*_bwd`,
which are opaque to compilers and run a Triton kernel on a GPU. The attributes `forward` and
`backward` of an outer op choose for each side between that inner op ("kernel") and the plain ATen
formula ("inline"), which a compiler fuses with the code around it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_LIBRARY = torch.library.Library("fxfuse", "DEF")
# Inductor may choose the inputs' strides, but not their order: the last dim stays contiguous.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)

SIDES = 'str forward="kernel", str backward="kernel"'


def define_outer(schema: str, function: Callable) -> None:
    """Define an op as a function of ops, autograd included.

    Implicit: tracers see through to the inner op or the formula, with autograd off as well.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=torch.Tag.pt2_compliant_tag)
    _LIBRARY.impl(name, function, "CompositeImplicitAutograd")
    _LIBRARY.impl(name, function, "FuncTorchBatched")
    if "(a)" in schema:  # or torch.func.functionalize would refuse an op that returns an alias
        _LIBRARY.impl(name, function, "Functionalize")


def define_inner(
    schema: str,
    *,
    cuda: Callable,
    cpu: Callable,
    plain: Callable,
    batched: Callable,
    fake: Callable,
) -> None:
    """Define an opaque op without autograd.

    plain: for all other devices; batched: the formula alone, for vmap; fake: for fake tensors.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=_TAGS)
    _LIBRARY.impl(name, _all_fresh(cuda), "CUDA")
    _LIBRARY.impl(name, _all_fresh(cpu), "CPU")
    _LIBRARY.impl(name, _all_fresh(plain), "CompositeExplicitAutograd")
    # torch.autograd.grad(is_grads_batched=True) runs under the older vmap, of key Batched.
    _LIBRARY.impl(name, batched, "Batched")
    _LIBRARY.impl(name, batched, "FuncTorchBatched")
    torch.library.register_fake(f"fxfuse::{name}", fake, lib=_LIBRARY)


def _all_fresh(run: Callable) -> Callable:
    """`run` with results that are no views to autograd: in a graph they may be what it returns."""

    def fresh_results(*operands: object, **attributes: object) -> Tensor | tuple[Tensor, ...]:
        found = run(*operands, **attributes)
        return _owned(found) if isinstance(found, Tensor) else tuple(map(_owned, found))

    return fresh_results


def _owned(t: Tensor) -> Tensor:
    """As `fresh`, with the strides of dimensions of one value as they are; not to be traced."""
    return t.new_empty(0).set_(t.detach()) if t._is_view() else t


def check_sides(op: str, forward: str, backward: str) -> tuple[str, str]:
    """Both sides as they are. Raises ValueError for an unknown one."""
    for name, value in (("forward", forward), ("backward", backward)):
        if value not in ("kernel", "inline"):
            raise ValueError(f'fxfuse::{op}: {name} is {value!r}: give "kernel" or "inline"')
    return forward, backward


def needs_grad(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def must_be_plain(*tensors: Tensor | None) -> bool:
    """Whether something is at work that our Functions have no rule for, and ATen's ops have.

    That is vmap, jvp and torch.func.grad, dual tensors, tensor subclasses, and dtypes without a
    real gradient.
    """
    if torch._C._are_functorch_transforms_active():
        return True
    return any(t is not None and _is_special(t) for t in tensors)


def _is_special(t: Tensor) -> bool:
    return (
        not t.is_floating_point()
        or is_traceable_wrapper_subclass(t)
        or unpack_dual(t).tangent is not None
    )


def differentiable_backward(
    formula: Callable[..., Sequence[Tensor]],
    operands: Sequence[Tensor | None],
    gradients: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """The gradients of `formula(*operands)` as autograd finds them, to be differentiated again."""
    with torch.enable_grad():
        # Aliases: an operand may depend on another one, which is not for us to differentiate.
        inputs = [t.view_as(t) if t is not None and t.requires_grad else t for t in operands]
        outputs = formula(*inputs)
    wanted = [t for t in inputs if t is not None and t.requires_grad]
    pairs = [(y, dy) for y, dy in zip(outputs, gradients) if dy is not None]
    outputs, gradients = zip(*pairs)
    found = iter(
        torch.autograd.grad(outputs, wanted, gradients, create_graph=True, allow_unused=True)
    )
    return [next(found) if t is not None and t.requires_grad else None for t in inputs]


def fresh(t: Tensor) -> Tensor:
    """`t` as a tensor that is no view to autograd, which would forbid to write to it."""
    return torch.ops.aten._unsafe_view.default(t, t.shape) if t._is_view() else t


def one_value_per_column(weight: Tensor | None, shape: Sequence[int]) -> bool:
    return weight is None or (weight.dim() == 1 and weight.shape[0] == shape[-1])


def or_empty(dweight: Tensor | None, h: Tensor, weight: Tensor | None) -> Tensor:
    """`dweight`, or the empty tensor that stands for none: an op cannot return None."""
    if dweight is not None:
        return dweight
    return h.new_empty((0,), dtype=h.dtype if weight is None else weight.dtype)


def interpreted() -> bool:
    """Whether Triton's interpreter is to run the kernels on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"
