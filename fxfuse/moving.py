"""What runs are compared with: gradients to begin from, and tensors moved by one step."""

from __future__ import annotations

from collections.abc import Iterable

import torch

TIMES = 3  # runs with moved tensors: one of them may by chance come out as the first


def cotangent(value: torch.Tensor) -> torch.Tensor:
    """A gradient for an output: normal values, the same ones for the same sizes."""
    generator = torch.Generator().manual_seed(value.numel())
    parts = torch.view_as_real(value) if value.is_complex() else value
    made = torch.randn(parts.shape, generator=generator, dtype=torch.float32)
    made = made.to(value.device, parts.dtype)
    return torch.view_as_complex(made) if value.is_complex() else made


def move(tensors: Iterable[torch.Tensor], seed: int, step: float = 0.0) -> None:
    """Move each element up or down by about one step of its dtype, or by `step` of its size."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in tensors:
        if tensor.is_floating_point():
            sign = torch.randint(2, tensor.shape, generator=generator) * 2 - 1
            by = 1 + sign * max(step, torch.finfo(tensor.dtype).eps)
            tensor.data = (tensor.data * by.to(tensor.device)).to(tensor.dtype)
