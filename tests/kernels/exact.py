"""What the tests in Triton's interpreter share: random rows, and comparison with fp64."""

import torch

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16


def normal(*shape, dtype=FP32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


def step(values, dtype):
    """The distance to the next number of a dtype."""
    info = torch.finfo(dtype)
    _, exponent = torch.frexp(values.double())
    return (torch.exp2(exponent.double() - 1) * info.eps).clamp_min(info.smallest_normal * info.eps)


def assert_close(actual, exact, *, terms=0.0, steps=None):
    """Within one step of a half, several of fp32, or less than fp32 makes of terms that cancel.

    Over a whole tensor the error is half a step of its dtype and a few of fp32, apart from a single
    column, whose norm has no gradient to speak of.
    """
    assert actual.is_contiguous()
    assert actual.shape == exact.shape
    steps = steps or (8 if actual.dtype == FP32 else 1)
    error = (actual.double() - exact).abs()
    allowed = steps * step(exact, actual.dtype) + 16 * torch.finfo(FP32).eps * terms
    worst = (error / allowed).max().item()
    assert worst <= 1.0, f"{worst:.2f} times the allowed error"
    if exact.shape[-1:] > (1,):
        half_a_step = (1.0 if actual.dtype == BF16 else 0.5) * torch.finfo(actual.dtype).eps
        whole = (error.norm() / exact.norm()).item()
        assert whole <= half_a_step + 4 * torch.finfo(FP32).eps
