"""The transformer blocks whose traffic is counted, with their parameters not initialised."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

EPS = 1e-6


@dataclass(frozen=True)
class Size:
    """Of a block: batch, tokens, and the widths of rows, heads and the MLP."""

    batch: int = 2
    tokens: int = 2048
    width: int = 4096
    head: int = 128
    mlp: int = 11008

    def __str__(self) -> str:
        rows = f"{self.batch} x {self.tokens} rows of {self.width}"
        return f"{rows}, heads of {self.head}, MLP of {self.mlp}, bf16"


class LlamaNorm(nn.Module):
    """RMSNorm as Llama writes it: rounded before the weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        h = x.to(torch.float32)
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)
        return self.weight * h.to(x.dtype)


class ZeroCentredNorm(nn.Module):
    """RMSNorm as Qwen3-Next writes it between its layers: 1 + weight, all in fp32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)
        return (h * (1.0 + self.weight.float())).type_as(x)


class GatedNorm(nn.Module):
    """rms_norm(x) * silu(gate) as Qwen3-Next writes it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        h = x.to(torch.float32)
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)
        h = self.weight * h.to(x.dtype)
        return (h * F.silu(gate.to(torch.float32))).to(x.dtype)


class SwiGLU(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(size.width, size.mlp, bias=False) for _ in range(2))
        self.down = nn.Linear(size.mlp, size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Attention(nn.Module):
    """Causal attention over x [batch, tokens, width]."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.head = size.head
        self.q, self.k, self.v, self.o = (
            nn.Linear(size.width, size.width, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.head)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(mixed.transpose(1, 2).flatten(-2))


class GatedMixer(nn.Module):
    """The projections and the gated norm of Qwen3-Next's gated delta net.

    One product gives, for each key head in turn, a query, a key, and two values and gates: slices
    of one tensor. Attention stands for the convolution and the recurrence, which no compiler fuses
    with the norm either.
    """

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.head, self.key_heads = size.head, size.width // (2 * size.head)
        self.in_proj = nn.Linear(size.width, 3 * size.width, bias=False)
        self.norm = GatedNorm(size.head)
        self.out_proj = nn.Linear(size.width, size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        head = self.head
        mixed = self.in_proj(x).unflatten(-1, (self.key_heads, 6 * head))
        q, k, v, gate = mixed.split([head, head, 2 * head, 2 * head], -1)
        v, gate = (t.reshape(*t.shape[:2], -1, head) for t in (v, gate))
        q, k = (t.repeat_interleave(2, dim=2) for t in (q, k))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        normed = self.norm(mixed.reshape(-1, head), gate.reshape(-1, head))
        return self.out_proj(normed.reshape(x.shape))


class GateFirst(nn.Module):
    """norm(x * silu(gate)), the gate first, as Mamba-2 writes it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        h = x.to(torch.float32) * F.silu(gate.to(torch.float32))
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)
        return self.weight * h.to(x.dtype)


class GateFirstMixer(nn.Module):
    """The projections and the gated norm of Mamba-2, with attention in the recurrence's place."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.head = size.head
        self.in_proj = nn.Linear(size.width, 4 * size.width, bias=False)
        self.norm = GateFirst(size.width)
        self.out_proj = nn.Linear(size.width, size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        *qkv, gate = self.in_proj(x).chunk(4, -1)
        q, k, v = (t.unflatten(-1, (-1, self.head)).transpose(1, 2) for t in qkv)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out_proj(self.norm(mixed.transpose(1, 2).flatten(-2), gate))


class Block(nn.Module):
    """norm, mixer, add, norm, MLP, add."""

    def __init__(self, size: Size, norm: Callable, mixer: Callable) -> None:
        super().__init__()
        self.first, self.second = norm(size.width), norm(size.width)
        self.mixer, self.mlp = mixer(size), SwiGLU(size)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.first(x))
        return x + self.mlp(self.second(x))


class Sandwich(nn.Module):
    """Gemma's block, with a norm on either side of the mixer and of the MLP."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.before, self.after, self.before_mlp, self.after_mlp = (
            ZeroCentredNorm(size.width) for _ in range(4)
        )
        self.mixer, self.mlp = Attention(size), SwiGLU(size)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.after(self.mixer(self.before(x)))
        return x + self.after_mlp(self.mlp(self.before_mlp(x)))


BLOCKS: dict[str, Callable[[Size], nn.Module]] = {
    "llama": lambda size: Block(size, LlamaNorm, Attention),
    "sandwich": Sandwich,
    "gated": lambda size: Block(size, ZeroCentredNorm, GatedMixer),
    "gate_first": lambda size: Block(size, LlamaNorm, GateFirstMixer),
}


def make(name: str, size: Size, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """A block on the CPU whose parameters hold whatever was in memory."""
    with torch.device("meta"):
        block = BLOCKS[name](size)
    return block.to(dtype).to_empty(device="cpu")
