"""RMSNorm as people write it: one class a spelling, in the numerics of its family."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

WIDTH = 64
EPS = 1e-6
HALVES = (torch.float16, torch.bfloat16)


class Norm(nn.Module):
    """A weight and an eps; subclasses write the formula.

    untraceable: torch.fx.symbolic_trace cannot trace it. fp32_only: in half precision its graph
    rounds the statistic, which the op does not do. needs_dtypes: without metadata it is left alone.
    """

    untraceable = fp32_only = needs_dtypes = False

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH).to(dtype))


class CastThenWeight(Norm):  # Llama, Mistral, Qwen
    def forward(self, x):
        dtype = x.dtype
        x = x.to(torch.float32)
        variance = x.pow(2).mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(variance + EPS)).to(dtype)


class TypeAs(Norm):  # Llama 4
    def forward(self, x):
        x32 = x.float()
        unit = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + EPS)
        return unit.type_as(x) * self.weight


class StatisticAlone(Norm):  # CPM-Ant: only the statistic is cast
    needs_dtypes = True

    def forward(self, x):
        variance = x.to(torch.float32).pow(2).mean(dim=-1, keepdim=True)
        return (x * torch.rsqrt(variance + EPS)).to(x.dtype) * self.weight


class CastToWeight(Norm):  # T5
    untraceable = True

    def forward(self, x):
        variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + EPS)
        if self.weight.dtype in HALVES:
            x = x.to(self.weight.dtype)
        return self.weight * x


class WeightThenCast(Norm):  # GPT-OSS, OLMo 2
    def forward(self, x):
        dtype = x.dtype
        x = x.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
        return (self.weight * x).to(dtype)


class WideWeight(Norm):  # Nemotron-H, Helium
    def forward(self, x):
        x32 = x.float()
        unit = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + EPS)
        return (self.weight.to(torch.float32) * unit).to(x.dtype)


class ZeroCentred(Norm):  # Gemma, Qwen3-Next
    def forward(self, x):
        x32 = x.float()
        unit = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + EPS)
        return (unit * (1.0 + self.weight.float())).type_as(x)


class ZeroCentredRounded(Norm):  # 1 + w is rounded to the weight's dtype first
    def forward(self, x):
        x32 = x.float()
        unit = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + EPS)
        return (unit * (1.0 + self.weight).float()).type_as(x)


class PowerOfMinusHalf(Norm):  # Gemma 3n and 4
    def forward(self, x):
        x32 = x.float()
        mean_square = x32.pow(2).mean(-1, keepdim=True) + EPS
        return (x32 * torch.pow(mean_square, -0.5) * self.weight.float()).type_as(x)


class Weightless(Norm):  # nanochat, Llama 4's q and k
    def forward(self, x):
        x32 = x.float()
        return (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + EPS)).type_as(x)


class WeightlessSquare(Norm):
    def forward(self, x):
        x32 = x.float()
        return (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + EPS)).to(x.dtype)


class NoUpcast(Norm):  # the textbook
    fp32_only = True

    def forward(self, x):
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + EPS) * self.weight


class WeightFirst(Norm):
    fp32_only = needs_dtypes = True

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)


class DividedByRoot(Norm):  # ImageGPT
    fp32_only = needs_dtypes = True

    def forward(self, x):
        return x / torch.sqrt(torch.mean(torch.square(x), dim=-1, keepdim=True) + EPS) * self.weight


class SumOverWidth(Norm):
    fp32_only = needs_dtypes = True

    def forward(self, x):
        return x / ((x**2).sum(-1, keepdim=True) / WIDTH + EPS) ** 0.5 * self.weight


class OneOverRoot(Norm):
    def forward(self, x):
        x32 = x.float()
        root = 1.0 / torch.sqrt(x32.pow(2).mean(-1, keepdim=True) + EPS)
        return (x32 * root).to(x.dtype) * self.weight


class LeafModule(Norm):
    def __init__(self, dtype):
        super().__init__(dtype)
        self.norm = nn.RMSNorm(WIDTH, eps=EPS, dtype=dtype)

    def forward(self, x):
        return self.norm(x)


class LeafWithoutWeight(Norm):
    def __init__(self, dtype):
        super().__init__(dtype)
        self.norm = nn.RMSNorm(WIDTH, elementwise_affine=False)

    def forward(self, x):
        return self.norm(x)


class Functional(Norm):
    def forward(self, x):
        return F.rms_norm(x, (WIDTH,), eps=EPS) * self.weight


class FunctionalInFloat(Norm):  # torchtune
    def forward(self, x):
        return F.rms_norm(x.float(), (WIDTH,), self.weight.float(), eps=EPS).to(x.dtype)


class OutsideTheCast(Norm):  # the product is wider than both of its factors' own dtypes
    def forward(self, x):
        x32 = x.float()
        unit = (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)
        return unit * self.weight.float()


SPELLINGS = (
    CastThenWeight, TypeAs, StatisticAlone, CastToWeight, WeightThenCast, WideWeight, ZeroCentred,
    ZeroCentredRounded, PowerOfMinusHalf, Weightless, WeightlessSquare, NoUpcast, WeightFirst,
    DividedByRoot, SumOverWidth, OneOverRoot, LeafModule, LeafWithoutWeight, Functional,
    FunctionalInFloat, OutsideTheCast,
)  # fmt: skip


class AddThenNorm(nn.Module):
    """h = x + residual; returns norm(h) and h."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x, residual):
        h = x + residual
        return self.norm(h), h


# ---- gates --------------------------------------------------------------------------------------


class Silu(nn.Module):
    """silu of a gate; subclasses write it.

    needs_dtypes, fp32_only: as of `Norm`.
    """

    needs_dtypes = fp32_only = False

    def __init__(self) -> None:
        super().__init__()
        self.silu, self.sigmoid = nn.SiLU(), nn.Sigmoid()


class SiluFunction(Silu):
    def forward(self, g):
        return F.silu(g)


class SiluKeywords(Silu):
    def forward(self, g):
        return F.silu(input=g, inplace=False)


class SiluLeaf(Silu):
    def forward(self, g):
        return self.silu(g)


class SiluInPlace(Silu):  # of a tensor that nobody else sees
    def forward(self, g):
        return F.silu(g * 1.5, inplace=True)


class TimesSigmoid(Silu):
    def forward(self, g):
        return g * torch.sigmoid(g)


class SigmoidTimes(Silu):
    def forward(self, g):
        return g.sigmoid() * g


class TimesFunctionalSigmoid(Silu):
    def forward(self, g):
        return torch.mul(g, F.sigmoid(g))


class TimesSigmoidLeaf(Silu):
    def forward(self, g):
        return self.sigmoid(g) * g


class SiluInFloat(Silu):  # the gated norms of Mamba 2, Falcon-H1, Qwen3-Next
    def forward(self, g):
        return F.silu(g.to(torch.float32))


class SiluInFloatAndBack(Silu):
    def forward(self, g):
        return F.silu(g.float()).type_as(g)


class Decomposed(Silu):  # as ATen decomposes it
    def forward(self, g):
        wide = g.float()
        return (wide * torch.sigmoid(wide)).to(g.dtype)


class SigmoidInFloat(Silu):
    needs_dtypes = True

    def forward(self, g):
        return g * torch.sigmoid(g.float())


class SigmoidInFloatAndBack(Silu):
    needs_dtypes = True

    def forward(self, g):
        return g * torch.sigmoid(g.float()).to(g.dtype)


class Quotient(Silu):
    needs_dtypes = fp32_only = True

    def forward(self, g):
        return g / (1 + torch.exp(-g))


class QuotientInFloat(Silu):  # as Inductor decomposes it
    needs_dtypes = True

    def forward(self, g):
        wide = g.float()
        return (wide / (torch.exp(-wide) + 1.0)).to(g.dtype)


SILUS = (
    SiluFunction, SiluKeywords, SiluLeaf, SiluInPlace, TimesSigmoid, SigmoidTimes,
    TimesFunctionalSigmoid, TimesSigmoidLeaf, SiluInFloat, SiluInFloatAndBack, Decomposed,
    SigmoidInFloat, SigmoidInFloatAndBack, Quotient, QuotientInFloat,
)  # fmt: skip


class NormThenGate(nn.Module):
    """rms_norm(x) * silu(gate), in the numerics of Qwen3-Next."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x, gate):
        return (self.norm(x) * F.silu(gate.to(torch.float32))).to(x.dtype)


class GateThenNorm(nn.Module):
    """rms_norm(silu(gate) * x), as in a SwiGLU with a norm inside."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x, gate):
        return self.norm(F.silu(gate) * x)


class NormAddNorm(nn.Module):
    """h = residual + norm(x); returns norm(h) and h, as Gemma does around its branches."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x, residual):
        h = residual + self.norm(x)
        return self.norm(h), h
