"""RMSNorms as other people write them, and what is almost one."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxfuse

D, EPS = 32, 1e-6


class Base(nn.Module):
    trains, dtype = True, torch.float32

    def __init__(self, dim=D, eps=EPS):
        super().__init__()
        self.dim, self.eps = dim, eps
        self.weight = nn.Parameter(torch.randn(dim) * 0.3 + 1)


class Einsum(Base):
    def forward(self, x):
        ms = torch.einsum("...d,...d->...", x, x) / x.shape[-1]
        return x * torch.rsqrt(ms + self.eps)[..., None] * self.weight


class L2Scaled(Base):
    def forward(self, x):
        return self.dim**0.5 * x / x.norm(dim=-1, keepdim=True) * self.weight


class Flax(Base):
    def forward(self, x):
        dtype = x.dtype
        x = x.to(torch.float32)
        mean2 = torch.mean(torch.square(x), -1, keepdim=True)
        mul = torch.rsqrt(mean2 + self.eps)
        mul = mul * (1.0 + self.weight)
        return (x * mul).to(dtype)


class InPlace(Base):
    def forward(self, x):
        rms = (x * x).mean(-1, keepdim=True).add_(self.eps).sqrt_()
        out = x.clone()
        out.div_(rms)
        out.mul_(self.weight)
        return out


class Notebook(Base):
    def forward(self, x):
        d = x.size(-1)
        mean_square = torch.sum(x**2, dim=-1) / d
        rms = torch.sqrt(mean_square + self.eps).unsqueeze(-1)
        return self.weight * (x / rms)


class Chain(Base):
    def forward(self, x):
        return x.pow(2).mean(-1, True).add(self.eps).rsqrt().mul(x).mul(self.weight)


class NumPy(Base):
    def forward(self, x):
        scale = (torch.mean(x**2, axis=-1, keepdims=True) + self.eps) ** -0.5
        return self.weight * scale * x


class VectorNorm(Base):
    def forward(self, x):
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        inv = torch.reciprocal(torch.sqrt(norm**2 / self.dim + self.eps))
        return (x.float() * inv).to(x.dtype) * self.weight


class NoAutocast(Base):
    def _norm(self, x):
        return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + self.eps)

    def forward(self, x):
        with torch.autocast(device_type=x.device.type, enabled=False):
            out = self._norm(x.float()) * self.weight.float()
        return out.type_as(x)


class HeadsZeroCentred(Base):
    def __init__(self, heads=4):
        super().__init__(D // heads)
        self.heads = heads

    def forward(self, x):
        b, n, _ = x.shape
        q = x.view(b, n, self.heads, -1).transpose(1, 2)
        q32 = q.to(torch.float32)
        q32 = q32 / torch.sqrt(q32.pow(2).sum(-1, keepdim=True) * (1 / self.dim) + self.eps)
        q32 = q32 + q32 * self.weight
        return q32.to(q.dtype)


class EpsOutside(Base):
    def forward(self, x):
        rms = x.norm(2, dim=-1, keepdim=True) * self.dim**-0.5
        return self.weight * (x / (rms + self.eps))


class Normalize(Base):
    def forward(self, x):
        return F.normalize(x, dim=-1) * self.dim**0.5 * self.weight


class Variance(Base):
    def forward(self, x):
        x32 = x.float()
        var = x32.var(-1, keepdim=True, unbiased=False)
        return (x32 * torch.rsqrt(var + self.eps)).to(x.dtype) * self.weight


class Partial(Base):
    def forward(self, x):
        x32 = x.float()
        part = x32[..., : self.dim // 4]
        return (x32 * torch.rsqrt(part.pow(2).mean(-1, keepdim=True) + self.eps)).to(
            x.dtype
        ) * self.weight


class OverTokens(Base):
    def forward(self, x):
        x32 = x.float()
        return (x32 * torch.rsqrt(x32.pow(2).mean(1, keepdim=True) + self.eps)).to(
            x.dtype
        ) * self.weight


class ForgottenKeepdim(Base):
    """For a square x: each column is divided by the root of the row of that number."""

    def forward(self, x):
        x32 = x.float()
        return (x32 / torch.sqrt((x32**2).mean(-1) + self.eps)).to(x.dtype) * self.weight


class Stale(Base):
    trains = False  # what it writes over is what the gradient needs

    def forward(self, x):
        h = x.float().clone()
        inv = torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
        h.add_(self.weight)
        return (h * inv).to(x.dtype)


class Detached(Base):
    def forward(self, x):
        x32 = x.float()
        ms = x32.detach().pow(2).mean(-1, keepdim=True)
        return (x32 * torch.rsqrt(ms + self.eps)).to(x.dtype) * self.weight


class Clamped(Base):
    def forward(self, x):
        x32 = x.float()
        ms = x32.pow(2).mean(-1, keepdim=True).clamp(min=self.eps)
        return (x32 * torch.rsqrt(ms)).to(x.dtype) * self.weight


class CentredNumerator(Base):
    def forward(self, x):
        x32 = x.float()
        inv = torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.eps)
        return ((x32 - x32.mean(-1, keepdim=True)) * inv).to(x.dtype) * self.weight


class RootOfSumTimesRoot(Base):
    def forward(self, x):
        x32 = x.float()
        root = torch.rsqrt((x32 * x32).sum(-1, keepdim=True) + self.dim * self.eps)
        return (x32 * root * self.dim**0.5).to(x.dtype) * self.weight


class BroadcastEverything(Base):  # as Haiku does
    def forward(self, x):
        mean_square = x.float().square().mean(-1, keepdim=True).broadcast_to(x.shape)
        scale = torch.broadcast_to(self.weight, x.shape)
        return (x.float() * (scale * torch.rsqrt(mean_square + self.eps))).to(x.dtype)


class SquaresOfSizes(Base):
    def forward(self, x):
        f = x.float()
        root = f.abs().pow(2).sum(-1, True).div(self.dim).add(self.eps).sqrt().reciprocal()
        return self.weight.mul(f.mul(root).to(x.dtype))


class EpsOfABuffer(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("small", torch.tensor(EPS))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.small) * self.weight


class FlaxOrder(Base):
    def forward(self, x):
        mean_square = torch.unsqueeze(torch.mean(torch.square(x), dim=-1), -1)
        root = torch.rsqrt(mean_square + self.eps)
        return x * (root * self.weight.reshape((1,) * (x.ndim - 1) + (-1,)))


class Student(Base):
    def forward(self, x):
        root = (torch.sum(x * x, dim=2) / self.dim + self.eps).sqrt()
        return self.weight * (x / root.unsqueeze(2).repeat(1, 1, self.dim))


class CancellingFactors(Base):
    def forward(self, x):
        energy = 0.5 * (x * x).sum(-1, keepdim=True)
        return x * torch.rsqrt(energy * (2 / self.dim) + self.eps) * self.weight


class CancellingFactorsDropped(Base):
    def forward(self, x):
        energy = 0.5 * (x * x).sum(-1)
        return x * torch.rsqrt(energy * 2 / self.dim + self.eps).unsqueeze(-1) * self.weight


class Logarithms(Base):
    def forward(self, x):
        log = torch.log(x.pow(2).mean(-1) + self.eps)
        return x * torch.exp(-0.5 * log)[..., None] * self.weight


class EpsInTheMean(Base):
    def forward(self, x):
        return x * torch.rsqrt((x * x + self.eps).mean(-1, True)) * self.weight


class SquaresOfScaled(Base):
    def forward(self, x):
        share = (x / math.sqrt(self.dim)) ** 2
        return x / torch.sqrt(share.sum(-1, keepdim=True) + self.eps) * self.weight


class ScaledWeight(Base):
    def forward(self, x):
        return x / x.norm(dim=-1, keepdim=True) * (self.weight * self.dim**0.5)


class Pool(Base):
    def forward(self, x):
        return F.adaptive_avg_pool1d(x * x, 1).add(self.eps).pow(-0.5) * x * self.weight


class EinsumOfTheWeight(Base):
    def forward(self, x):
        mean_square = torch.einsum("bsd->bs", x**2) / self.dim
        unit = x * torch.rsqrt(mean_square + self.eps).unsqueeze(-1)
        return torch.einsum("bsd,d->bsd", unit, self.weight)


class RootOfReciprocal(Base):
    def forward(self, x):
        return self.weight * x * (1 / (x.square().mean(-1, True) + self.eps)) ** 0.5


class SquaredNorm(Base):
    def forward(self, x):
        rms = torch.linalg.norm(x, dim=-1, keepdim=True) / self.dim**0.5
        return x / (rms * rms + self.eps).sqrt() * self.weight


class TwiceBoth(Base):
    def forward(self, x):
        square = 4 * x.pow(2).mean(-1, True) + 4 * self.eps
        return (2 * x) * torch.rsqrt(square) * self.weight


class ScaledBefore(Base):  # its input is the scaled tensor, whose mean of squares it takes
    def forward(self, x):
        h = x * self.dim**0.5
        return h / torch.sqrt(h.pow(2).sum(-1, True) + self.eps) * self.dim**0.5 * self.weight


class VarianceAndMean(Base):
    def forward(self, x):
        moment = x.var(-1, unbiased=False, keepdim=True) + x.mean(-1, keepdim=True) ** 2
        return x * torch.rsqrt(moment + self.eps) * self.weight


class UnbiasedVarianceAndMean(Base):
    def forward(self, x):
        moment = x.var(-1, keepdim=True) + x.mean(-1, keepdim=True) ** 2
        return x * torch.rsqrt(moment + self.eps) * self.weight


class WrongWidthDropped(Base):
    def forward(self, x):
        root = torch.rsqrt(x.pow(2).sum(-1) / 5 + self.eps)
        return x * root.unsqueeze(-1) * self.weight


class ScaledMean(Base):
    def forward(self, x):
        return x * torch.rsqrt(0.7 * x.pow(2).mean(-1, True) + self.eps) * self.weight


class RoundedScale(Base):  # k-diffusion, image_transformer_v2
    dtype = torch.bfloat16

    def forward(self, x):
        mean_square = torch.mean(x.to(torch.float32) ** 2, dim=-1, keepdim=True)
        scale = self.weight.to(torch.float32) * torch.rsqrt(mean_square + self.eps)
        return x * scale.to(x.dtype)


class FlaxStatistics(Base):  # of Flax's LayerNorm without its mean
    def statistics(self, x):
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        mean_square = torch.square(x).mean(-1)
        return torch.zeros_like(mean_square), mean_square

    def forward(self, x):
        mean, variance = (t.unsqueeze(-1) for t in self.statistics(x))
        root = torch.rsqrt(variance + self.eps) * self.weight.reshape(1, 1, -1)
        return (x - mean) * root


class WrittenStatistics(Base):  # the mean is not zero any more when it is taken away
    def forward(self, x):
        mean_square = torch.square(x).mean(-1, keepdim=True)
        mean = torch.zeros_like(mean_square)
        mean[:, 0] = 1.0
        return (x - mean) * torch.rsqrt(mean_square + self.eps) * self.weight


class Hypotenuse(Base):
    def forward(self, x):
        rms = torch.linalg.norm(x, dim=-1, keepdim=True) / math.sqrt(x.shape[-1])
        return x / torch.hypot(rms, torch.full_like(rms, math.sqrt(self.eps))) * self.weight


class Moments(Base):
    def forward(self, x):
        var, mean = torch.var_mean(x, dim=-1, correction=0, keepdim=True)
        return self.weight * (x * torch.rsqrt(var + mean.square() + self.eps))


class CentredOverMoments(Base):
    def forward(self, x):
        var, mean = torch.var_mean(x, dim=-1, correction=0, keepdim=True)
        return self.weight * ((x - mean) * torch.rsqrt(var + mean.square() + self.eps))


class DistanceFromZero(Base):
    def forward(self, x):
        mse = F.mse_loss(x, torch.zeros_like(x), reduction="none").mean(dim=2)
        root = torch.sqrt(mse + self.eps)
        return torch.einsum("btd,d->btd", x / root[:, :, None], self.weight)


class LargestFirst(Base):  # an RMSNorm, with an eps that is another number for each row
    def forward(self, x):
        scale = x.abs().amax(dim=-1, keepdim=True).clamp_min(1e-12)
        h = x / scale
        mean_square = h.square().mean(dim=-1, keepdim=True)
        return h * torch.rsqrt(mean_square + self.eps / scale.square()) * self.weight


class ChannelsFirst(Base):
    def forward(self, x):
        x = x.transpose(1, 2)
        power = x.pow(2).mean(dim=1, keepdim=True)
        return (x * power.add(self.eps).rsqrt() * self.weight[:, None]).transpose(1, 2)


class PreviousToken(Base):
    def forward(self, x):
        past = torch.roll(x, shifts=1, dims=1)
        return self.weight * (x * torch.rsqrt(past.pow(2).mean(-1, keepdim=True) + self.eps))


class OverHeadsAndColumns(Base):
    def forward(self, x):
        h = x.unflatten(-1, (4, -1))
        mean_square = h.pow(2).sum(dim=(-2, -1), keepdim=True) / h.shape[-1]
        return (h * torch.rsqrt(mean_square + self.eps)).flatten(-2) * self.weight


class RowOfWeights(Base):
    """As in an audio codec: the weight is stored as one row, and goes onto the root."""

    dtype = torch.bfloat16

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(self.weight.detach().view(1, 1, -1))

    def forward(self, x):
        wide = x.to(torch.float32)
        var = self.eps + torch.mean(wide**2, dim=2, keepdim=True)
        return (wide * (self.weight.to(var) * torch.rsqrt(var))).to(x.dtype)


class Video(Base):
    """Channels first, of a tensor of five dimensions."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(self.weight.detach().view(-1, 1, 1))

    def forward(self, x):
        x = x.unflatten(-1, (4, -1))
        return x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + self.eps) * self.weight


class OneVector(Base):
    def forward(self, x):
        return self.weight * (torch.rsqrt(torch.mean(x**2) + self.eps) * x)


class MappedVectors(OneVector):
    def forward(self, x):
        return torch.vmap(torch.vmap(super().forward))(x)


class AddAlpha(Base):
    def forward(self, x):
        total = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square()
        return x / torch.sqrt(torch.add(self.eps, total, alpha=1 / self.dim)) * self.weight


class PutBackByShape(Base):
    def forward(self, x):
        b, t, _ = x.shape
        return self.weight * (x / torch.sqrt(x.pow(2).mean(dim=(2,)).reshape(b, t, 1) + self.eps))


class Statements(Base):
    """Each step in place, as a statement of its own."""

    def forward(self, x):
        variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
        variance.add_(self.eps)
        x = x * torch.rsqrt(variance)
        x.mul_(self.weight)
        return x


class StatementsAndReaders(Base):
    """What is read before a write and after the next is not the same."""

    def forward(self, x):
        variance = x.pow(2).mean(-1, keepdim=True)
        before = torch.rsqrt(variance + self.eps)
        variance.add_(1)
        return x * before * self.weight + torch.rsqrt(variance)


class Doubled(Base):
    """For a device that has a LayerNorm and no RMSNorm."""

    def forward(self, x):
        doubled = torch.cat([x, -x], dim=-1)
        normed = F.layer_norm(doubled, (2 * x.size(-1),), None, None, self.eps)
        return normed[..., : x.size(-1)] * self.weight


class MeanOfMeans(Base):
    def forward(self, x):
        power = torch.pow(x, 2).mean(dim=1, keepdim=True).mean(dim=2, keepdim=True)
        return self.weight * x / torch.pow(power + self.eps, 0.5)


class DetachedRoot(Base):
    def forward(self, x):
        root = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return x * root.detach() * self.weight


NORMS = [
    (RowOfWeights, "rms_norm", EPS),
    (Video, "rms_norm", EPS),
    (OneVector, "rms_norm", EPS),
    (AddAlpha, "rms_norm", EPS),
    (PutBackByShape, "rms_norm", EPS),
    (Statements, "rms_norm", EPS),
    (RoundedScale, "rms_norm", EPS),
    (ChannelsFirst, "rms_norm", EPS),
    (FlaxStatistics, "rms_norm", EPS),
    (Hypotenuse, "rms_norm", EPS),
    (Moments, "rms_norm", EPS),
    (DistanceFromZero, "rms_norm", EPS),
    (CancellingFactors, "rms_norm", EPS),
    (CancellingFactorsDropped, "rms_norm", EPS),
    (Logarithms, "rms_norm", EPS),
    (EpsInTheMean, "rms_norm", EPS),
    (SquaresOfScaled, "rms_norm", EPS),
    (ScaledWeight, "rms_norm", 0.0),
    (Pool, "rms_norm", EPS),
    (EinsumOfTheWeight, "rms_norm", EPS),
    (RootOfReciprocal, "rms_norm", EPS),
    (SquaredNorm, "rms_norm", EPS),
    (TwiceBoth, "rms_norm", EPS),
    (ScaledBefore, "rms_norm", EPS / D),
    (VarianceAndMean, "rms_norm", EPS),
    (FlaxOrder, "rms_norm", EPS),
    (Student, "rms_norm", EPS),
    (RootOfSumTimesRoot, "rms_norm", EPS),
    (BroadcastEverything, "rms_norm", EPS),
    (SquaresOfSizes, "rms_norm", EPS),
    (Einsum, "rms_norm", EPS),
    (L2Scaled, "rms_norm", 0.0),
    (Flax, "rms_norm", EPS),
    (Notebook, "rms_norm", EPS),
    (Chain, "rms_norm", EPS),
    (NumPy, "rms_norm", EPS),
    (VectorNorm, "rms_norm", EPS),
    (NoAutocast, "rms_norm", EPS),
    (HeadsZeroCentred, "rms_norm", EPS),
]


class CentredStatistic(Base):
    def forward(self, x):
        centred = x - x.mean(-1, keepdim=True)
        return x * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


NEAR = [
    (MappedVectors, "it lies inside a functorch transform (vmap, grad or jvp)"),
    (Doubled, "a LayerNorm of [x, -x] gives the RMSNorm of x"),
    (MeanOfMeans, "it takes the mean of means"),
    (DetachedRoot, "its statistic is detached"),
    (WrittenStatistics, "not the tensor whose squares are averaged"),
    (CentredOverMoments, "not the tensor whose squares are averaged"),
    (LargestFirst, "its eps is a tensor"),
    (PreviousToken, "not the tensor whose squares are averaged"),
    (OverHeadsAndColumns, "the sum is over 2 dimensions, not the last alone"),
    (UnbiasedVarianceAndMean, "divides by a standard deviation"),
    (WrongWidthDropped, "the sum of squares is divided by 5, not by the width 32"),
    (ScaledMean, "its mean of squares is multiplied by 0.7"),
    (CentredStatistic, "what it scales is not the tensor whose squares are averaged"),
    (EpsOfABuffer, "its eps is a tensor"),  # an RMSNorm whose eps may change
    (InPlace, "it scales a tensor in place that is used elsewhere"),  # an RMSNorm in the end
    (EpsOutside, "its eps is added outside of the root"),
    (Normalize, "divides by a vector norm"),
    (Variance, "divides by a standard deviation"),
    (Partial, "not the tensor whose squares are averaged"),
    (OverTokens, "it is over dim 1, not the last, and its weight of shape (32,) is not along"),
    (ForgottenKeepdim, "drops the dimension that it reduces"),
    (Stale, "not the tensor whose squares are averaged"),
    (StatementsAndReaders, "the value variance inside it is also used by add_"),
    (Detached, "its statistic is detached"),
    (Clamped, "its root is clamped"),
    (CentredNumerator, "not the tensor whose squares are averaged"),
]


def example(cls):
    torch.manual_seed(0)
    shape = {ForgottenKeepdim: (D, D), OneVector: (D,)}.get(cls, (2, D, D))
    x = torch.randn(shape)
    return cls().to(cls.dtype), x.to(cls.dtype)


def results(f, model, x):
    if not model.trains:
        with torch.no_grad():
            return [f(x)]
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = f(x)
    y.backward(torch.linspace(-1, 1, y.numel()).view_as(y))
    return [y.detach(), x.grad, model.weight.grad]


def same_as_eager(model, x):
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=fxfuse.make_backend("eager"))
    expected = results(model, model, x)
    got = results(compiled, model, x)
    if x.dtype is torch.float32:
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    else:
        exact = results(model.double(), model, x.double())
        for ours, eager, right in zip(got, expected, exact):
            assert error(ours, right) <= 1.1 * error(eager, right)
        model.to(x.dtype)
    with torch.no_grad():
        assert torch.equal(compiled(x), got[0])


def error(value, exact):
    return ((value.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize(("cls", "pattern", "eps"), NORMS)
def test_norm_is_found(cls, pattern, eps):
    report = fxfuse.explain(*example(cls))
    assert dict(report.counts) == {pattern: 1}, [miss.reason for miss in report.misses]
    assert report.matches[0].attributes["eps"] == pytest.approx(eps)


@pytest.mark.parametrize(("cls", "words"), NEAR)
def test_near_norm_is_left_alone(cls, words):
    report = fxfuse.explain(*example(cls))
    assert not report.counts
    assert any(words in miss.reason for miss in report.misses), report.misses


@pytest.mark.parametrize("cls", [row[0] for row in NORMS + NEAR])
def test_numbers_are_those_of_eager(cls):
    same_as_eager(*example(cls))
