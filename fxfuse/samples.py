"""Values for inputs of which the sizes and dtypes are known: tensors on the meta device."""

from __future__ import annotations

import torch


def fill(name: str, like: torch.Tensor, model: torch.nn.Module, device: str) -> torch.Tensor:
    """Normal values, which require gradients; of integers, what an embedding of the model takes."""
    shape, dtype = like.shape, like.dtype
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, dtype=dtype).to(device).requires_grad_()
    if name.endswith("_mask") or dtype == torch.bool:
        return torch.ones(shape, dtype=dtype, device=device)
    if name == "position_ids":
        return torch.arange(shape[-1]).to(device, dtype).expand(shape).contiguous()
    if name == "token_type_ids":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.randint(_vocabulary(model), shape).to(device, dtype)


def _vocabulary(model: torch.nn.Module) -> int:
    """The smallest, since which of several an input is for is not known; 2 without any."""
    config = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        size = getattr(config.get_text_config(), "vocab_size", None)
        if isinstance(size, int):
            return size
    sizes = [m.num_embeddings for m in model.modules() if isinstance(m, torch.nn.Embedding)]
    return min(sizes, default=2)
