"""RMSNorms as repositories have them, ports and homework, and what is almost one."""

import math
from functools import reduce

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxfuse

D = 48
fp32, bf16 = torch.float32, torch.bfloat16


def weight(dtype=fp32, shape=(D,), seed=1):
    generator = torch.Generator().manual_seed(seed)
    return nn.Parameter((1 + 0.3 * torch.randn(shape, generator=generator)).to(dtype))


class FlaxPort(nn.Module):
    """flax.linen.RMSNorm, ported line by line (_compute_stats with use_mean=False, _normalize)."""

    x_dtype = bf16

    def __init__(self, epsilon=1e-6):
        super().__init__()
        self.epsilon = epsilon
        self.scale = weight(fp32)

    @staticmethod
    def _compute_stats(x, axes):
        x = x.to(torch.promote_types(torch.float32, x.dtype))
        var = torch.mean(torch.square(x), dim=axes)
        mean = torch.zeros_like(var)
        return mean, var

    def forward(self, x):
        mean, var = self._compute_stats(x, (-1,))
        mean = mean.unsqueeze(-1)
        var = var.unsqueeze(-1)
        y = x - mean
        mul = torch.rsqrt(var + self.epsilon)
        feature_shape = [1] * (x.ndim - 1) + [x.shape[-1]]
        mul = mul * self.scale.reshape(feature_shape)
        y = y * mul
        return y.to(x.dtype)


class KDiffusion(nn.Module):
    """k-diffusion, image_transformer_v2: the root goes into the scale, rounded, then onto x."""

    x_dtype = bf16

    def __init__(self, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.scale = weight(bf16)

    def forward(self, x):
        dtype = reduce(torch.promote_types, (x.dtype, self.scale.dtype, torch.float32))
        mean_sq = torch.mean(x.to(dtype) ** 2, dim=-1, keepdim=True)
        scale = self.scale.to(dtype) * torch.rsqrt(mean_sq + self.eps)
        return x * scale.to(x.dtype)


class Llama2C(nn.Module):
    """run.c's rmsnorm(o, x, weight, size), with tensors in place of the loops."""

    x_dtype = fp32

    def __init__(self):
        super().__init__()
        self.weight = weight()

    def forward(self, x):
        size = x.shape[-1]
        # calculate sum of squares
        ss = (x * x).sum(-1)
        ss /= size
        ss += 1e-5
        ss = 1.0 / torch.sqrt(ss)
        # normalize and scale
        return self.weight * (ss[..., None] * x)


class NGPT(nn.Module):
    """nGPT: justnorm, and the learned scale carries sqrt(n_embd) (as its suv does)."""

    x_dtype = fp32

    def __init__(self, n_embd=D):
        super().__init__()
        self.n_embd = n_embd
        self.init_value, self.init_scaling = 1.0, 1.0
        self.suv = weight()

    def justnorm(self, x):
        return x / x.norm(p=2, dim=-1, keepdim=True)

    def forward(self, x):
        suv = self.suv * ((self.init_value / self.init_scaling) * (self.n_embd**0.5))
        return suv * self.justnorm(x)


class Mamba2Ref(nn.Module):
    """mamba_ssm's rms_norm_ref with upcast and a group_size; models have one group."""

    x_dtype = bf16

    def __init__(self, d=D, ngroups=1, eps=1e-5):
        super().__init__()
        self.eps, self.group_size = eps, d // ngroups
        self.weight = weight(bf16)

    def forward(self, x):
        dtype = x.dtype
        w = self.weight.float()
        x = x.float()
        x_group = x.view(*x.shape[:-1], x.shape[-1] // self.group_size, self.group_size)
        rstd = 1 / torch.sqrt((x_group.square()).mean(dim=-1, keepdim=True) + self.eps)
        out = (x_group * rstd).flatten(-2) * w
        return out.to(dtype)


class KerasPort(nn.Module):
    """keras_hub's norm: float32, power, reciprocal(sqrt), gamma broadcast, cast back."""

    x_dtype = bf16

    def __init__(self, epsilon=1e-6, axis=-1):
        super().__init__()
        self.epsilon, self.axis = epsilon, axis
        self.gamma = weight(bf16)

    def _broadcast(self, v, ndim):
        shape = [1] * ndim
        shape[self.axis] = v.shape[0]
        return torch.reshape(v, shape)

    def forward(self, inputs):
        compute_dtype = inputs.dtype
        inputs = inputs.to(torch.float32)
        gamma = self._broadcast(self.gamma, inputs.ndim).to(torch.float32)
        var = torch.mean(torch.pow(inputs, 2), dim=self.axis, keepdim=True)
        normed = inputs * torch.reciprocal(torch.sqrt(var + self.epsilon))
        return torch.multiply(normed, gamma).to(compute_dtype)


class AudioFrameEnergy(nn.Module):
    """A codec's encoder: the frame's energy from its norm, a gain per frame."""

    x_dtype = fp32

    def __init__(self, channels=D, eps=1e-8):
        super().__init__()
        self.channels, self.eps = channels, eps
        self.gain = weight()

    def forward(self, x):  # (batch, frames, channels)
        energy = torch.linalg.norm(x, dim=-1, keepdim=True).square() / self.channels
        level = (energy + self.eps).sqrt()
        return self.gain * x.div(level)


class HomeworkEinsum(nn.Module):
    """CS336, assignment 1, by somebody who has just learnt einsum."""

    x_dtype = bf16

    def __init__(self, d_model=D, eps=1e-5):
        super().__init__()
        self.d_model, self.eps = d_model, eps
        self.g = weight(fp32)

    def forward(self, x):
        in_dtype = x.dtype
        x = x.to(torch.float32)
        rms = torch.sqrt(torch.einsum("...d,...d->...", x, x) / self.d_model + self.eps)
        result = torch.einsum("...d,d->...d", x / rms.unsqueeze(-1), self.g)
        return result.to(in_dtype)


class _RMSNormFunc(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        rstd = torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, rstd)
        return x * rstd * weight

    @staticmethod
    def backward(ctx, dy):
        x, weight, rstd = ctx.saved_tensors
        xhat = x * rstd
        dweight = (dy * xhat).flatten(0, -2).sum(0)
        wdy = dy * weight
        dx = (wdy - xhat * (wdy * xhat).mean(-1, keepdim=True)) * rstd
        return dx, dweight, None


class HomeworkAutograd(nn.Module):
    """CS336, assignment 2: RMSNorm as an autograd.Function in PyTorch, before the Triton one."""

    x_dtype = fp32

    def __init__(self, eps=1e-5):
        super().__init__()
        self.eps = eps
        self.weight = weight()

    def forward(self, x):
        return _RMSNormFunc.apply(x, self.weight, self.eps)


class Fp32RMSNorm(nn.Module):
    """fairseq's Fp32LayerNorm carried over: F.rms_norm in fp32 with autocast off."""

    x_dtype = bf16

    def __init__(self, d=D, eps=1e-6):
        super().__init__()
        self.normalized_shape, self.eps = (d,), eps
        self.weight = weight(bf16)

    def forward(self, input):
        with torch.autocast(device_type=input.device.type, enabled=False):
            output = F.rms_norm(
                input.float(),
                self.normalized_shape,
                self.weight.float() if self.weight is not None else None,
                self.eps,
            )
        return output.type_as(input)


# ---- what is almost one --------------------------------------------------------------------------


class KerasRmsScaling(nn.Module):
    """keras LayerNormalization(rms_scaling=True): the variance is centred, x is not."""

    x_dtype = fp32

    def __init__(self, epsilon=1e-3):
        super().__init__()
        self.epsilon = epsilon
        self.gamma = weight()

    def forward(self, x):
        variance = torch.var(x, dim=-1, keepdim=True, unbiased=False)
        inv = torch.rsqrt(variance + self.epsilon)
        return x * inv * self.gamma


class EDM2Normalize(nn.Module):
    """EDM2's normalize(): eps is added to the root."""

    x_dtype = bf16

    def __init__(self, eps=1e-4):
        super().__init__()
        self.eps = eps
        self.w = weight(bf16)

    def forward(self, x):
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        norm = torch.add(self.eps, norm, alpha=math.sqrt(norm.numel() / x.numel()))
        return x / norm.to(x.dtype) * self.w


class RoundedRoot(nn.Module):
    """EDM2's normalize() without its eps: an RMSNorm whose root is rounded before it divides."""

    x_dtype = bf16

    def __init__(self):
        super().__init__()
        self.w = weight(bf16)

    def forward(self, x):
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        norm = norm * math.sqrt(norm.numel() / x.numel())
        return x / norm.to(x.dtype) * self.w


class OnnxPort(nn.Module):
    """onnx2torch: the constants are buffers, and so may change."""

    x_dtype = fp32

    def __init__(self):
        super().__init__()
        self.register_buffer("two", torch.tensor(2.0))
        self.register_buffer("eps", torch.tensor(1e-5))
        self.weight = weight()

    def forward(self, x):
        mean = torch.mean(torch.pow(x, self.two), dim=[-1], keepdim=True)
        return self.weight * torch.mul(x, 1.0 / torch.sqrt(torch.add(mean, self.eps)))


class PartialRMSNorm(nn.Module):
    """pRMSNorm: the statistic of the first quarter of the columns."""

    x_dtype = bf16

    def __init__(self, d=D, p=0.25, eps=1e-6):
        super().__init__()
        self.partial, self.eps = int(d * p), eps
        self.scale = weight(bf16)

    def forward(self, x):
        xf = x.float()
        part = xf[..., : self.partial]
        xf = xf * torch.rsqrt(part.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.scale * xf.to(x.dtype)


class PixelNormAxis(nn.Module):
    """StyleGAN's normalize_2nd_moment with its default dim=1, put on (batch, tokens, channels)."""

    x_dtype = fp32

    def __init__(self):
        super().__init__()
        self.weight = weight()

    @staticmethod
    def normalize_2nd_moment(x, dim=1, eps=1e-8):
        return x * (x.square().mean(dim=dim, keepdim=True) + eps).rsqrt()

    def forward(self, x):
        return self.normalize_2nd_moment(x) * self.weight


class WrongDivisor(nn.Module):
    """size(1) for size(-1): the sum of squares is divided by the number of tokens."""

    x_dtype = fp32

    def __init__(self, eps=1e-5):
        super().__init__()
        self.eps = eps
        self.weight = weight()

    def forward(self, x):
        ms = x.pow(2).sum(dim=-1, keepdim=True) / x.size(1)
        return x / torch.sqrt(ms + self.eps) * self.weight


class LucidrainsClamped(nn.Module):
    """lucidrains: F.normalize * sqrt(dim) * gamma, clamped at 1e-12 and without an eps."""

    x_dtype = fp32

    def __init__(self, dim=D):
        super().__init__()
        self.scale = dim**0.5
        self.gamma = weight()

    def forward(self, x):
        return F.normalize(x, dim=-1) * self.scale * self.gamma


class FrozenStatistic(nn.Module):
    """Attribution code: the denominator is a constant for autograd."""

    x_dtype = bf16

    def __init__(self, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.weight = weight(bf16)

    def forward(self, hidden_states):
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True).detach()
        hidden_states = hidden_states * torch.rsqrt(variance + self.eps)
        return self.weight * hidden_states.to(input_dtype)


class OtherTensor(nn.Module):
    """The activation is normed by the statistic of what went into it."""

    x_dtype = bf16

    def __init__(self, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.weight = weight(bf16)

    def forward(self, x):
        h = F.silu(x).float()
        variance = x.float().pow(2).mean(-1, keepdim=True)
        h = h * torch.rsqrt(variance + self.eps)
        return self.weight * h.to(x.dtype)


class PerTokenGain(nn.Module):
    """The learned gain belongs to the position, not to the column."""

    x_dtype = fp32

    def __init__(self, seq=7, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.gain = weight(shape=(seq,))

    def forward(self, x):
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return x * self.gain[: x.shape[1], None]


class SquareOfMean(nn.Module):
    """mean and pow swapped by mistake."""

    x_dtype = fp32

    def __init__(self, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.weight = weight()

    def forward(self, x):
        norm = torch.rsqrt(x.mean(-1, keepdim=True).pow(2) + self.eps)
        return x * norm * self.weight


# ---- what is found, and what is said ---------------------------------------------------------

NORMS = [
    FlaxPort, KDiffusion, Llama2C, NGPT, Mamba2Ref, KerasPort, AudioFrameEnergy, HomeworkEinsum,
    Fp32RMSNorm, PerTokenGain,
]  # fmt: skip
REASONS = {
    HomeworkAutograd: "the value rstd inside it is also used by output_1: returned, or saved",
    KerasRmsScaling: "it divides by a standard deviation",
    EDM2Normalize: "it divides by a vector norm",
    RoundedRoot: "its root is rounded to bfloat16 before it divides",
    OnnxPort: "its eps is a tensor",
    PartialRMSNorm: "what it scales is not the tensor whose squares are averaged",
    PixelNormAxis: "it is over dim 1, not the last, and its weight of shape (48,) is not along",
    WrongDivisor: "the sum of squares is divided by 7, not by the width 48",
    LucidrainsClamped: "F.normalize clamps that norm instead of adding an eps",
    FrozenStatistic: "its statistic is detached",
    OtherTensor: "what it scales is not the tensor whose squares are averaged",
}


def operands(cls):
    torch.manual_seed(0)
    return cls(), torch.randn(2, 7, D).to(cls.x_dtype)


@pytest.mark.parametrize("cls", NORMS)
def test_norm_is_found(cls):
    report = fxfuse.explain(*operands(cls))
    assert dict(report.counts) == {"rms_norm": 1} and not report.misses
    # a gain of rows is none of the norm's; the weight behind a view of groups stays outside
    weightless = cls in (PerTokenGain, Mamba2Ref)
    assert ("weight" in report.matches[0].shapes) != weightless


@pytest.mark.parametrize("cls", REASONS)
def test_reason(cls):
    report = fxfuse.explain(*operands(cls))
    assert not report.counts and any(REASONS[cls] in miss.reason for miss in report.misses)


def test_no_norm_and_no_word():
    report = fxfuse.explain(*operands(SquareOfMean))
    assert not report.counts and not report.misses


@pytest.mark.parametrize("cls", [*NORMS, *REASONS, SquareOfMean])
def test_numbers(cls):
    """Those of eager where nothing is fused, and in fp32; in bf16 as near to fp64 as eager's."""
    torch._dynamo.reset()
    model, x = operands(cls)
    got = results(torch.compile(model, backend=fxfuse.make_backend("eager")), model, x)
    eager = results(model, model, x)
    if cls not in NORMS:
        assert all(map(torch.equal, got, eager))
    elif cls.x_dtype is fp32:
        torch.testing.assert_close(got, eager, rtol=1e-5, atol=1e-5)
    else:
        exact = results(model.double(), model, x.double())
        for ours, theirs, right in zip(got, eager, exact):
            assert error(ours, right) <= 1.1 * error(theirs, right)


def results(call, model, x):
    x = x.clone().requires_grad_()
    y = call(x)
    (w,) = model.parameters()
    return [
        y.detach(),
        *torch.autograd.grad(y, (x, w), torch.linspace(-1, 1, y.numel()).view_as(y).to(y)),
    ]


def error(value, exact):
    return ((value.double() - exact).norm() / exact.norm()).item()
