# ruff: noqa: F722, F821
"""Programs that were got wrong, or that show what the fuzzer looks at; see scripts/fuzzing/program.

They are never called: a test reads their source, with what their annotations say, as programs.
"""

import torch
from torch.nn import functional as F


def part_of_an_input_where_a_number_could_be(x: "4x3x8 float32 grad") -> "train":  # seed 10121
    v0 = x[:1]
    v1 = F.rms_norm(v0, (8,), eps=1e-05)
    v2 = v1 + v0
    v3 = v2.square()
    v4 = v2 * v3
    return v4


def a_result_that_lies_as_its_root(x: "2x5x32 float32 transposed") -> "train":  # seed 1058
    v1 = (torch.square(x)).mean(-1, keepdim=True)
    v2 = v1**-0.5
    v3 = v2 * x
    return v3


def a_write_between(x: "2x5x16 float32 grad", r: "2x5x16 float32 grad", w: "16 float32") -> "train":
    v0 = x * 1.5
    v1 = v0 + r
    v2 = v1.pow(2).mean(-1, keepdim=True)
    v3 = torch.rsqrt(v2 + 1e-06)
    v0.mul_(2.0)
    v4 = v1 * v3 * w
    return v4, v0


def a_later_reader_is_returned(x: "2x5x16 float32 grad") -> "train":
    v0 = x * 1.5
    v1 = v0 * torch.rsqrt(v0.pow(2).mean(-1, keepdim=True) + 1e-06)
    v2 = v0.view(-1)
    return v1, v2


def one_memory_for_two_inputs(
    x: "2x5x16 float32", r: "2x5x16 float32", r1: "2x5x16 float32 alias:x"
) -> "no_grad":
    v0 = x + r
    v1 = v0 * torch.rsqrt(v0.pow(2).mean(-1, keepdim=True) + 1e-06)
    r1.mul_(2.0)
    return v1, v0


def a_gradient_that_ends_inside(x: "3x4x8 bfloat16 grad small", w: "8 float32 grad") -> "train":
    v0 = x.float()
    with torch.no_grad():
        v1 = torch.rsqrt(v0.pow(2).mean(-1, keepdim=True) + 1e-05)
    v2 = (v0 * v1).to(x.dtype) * w
    return v2


def a_statistic_that_is_read(x: "3x4x8 float16 grad", g: "3x4x8 float16 grad") -> "train":
    v0 = x.float().pow(2).mean(-1, keepdim=True)
    v1 = (x.float() * torch.rsqrt(v0 + 1e-06)).to(x.dtype)
    v2 = v1 * F.silu(g)
    return v2, v0


def a_product_behind_a_cast_to_its_dtype(g: "7x6 float32", r: "6x7 float32") -> "train":  # 50584
    v0 = g.transpose(-2, 1)
    v1 = F.silu(r) * v0
    v2 = v1.to(v0)
    return v2


def a_result_of_a_view_inside_the_op(  # seed 90251
    x: "4x3x8 float32", buffer: "4x3x8 float32", w: "8 float32 grad", w1: "8 float32"
) -> "train":
    v0 = x - x.mean(-1, keepdim=True)
    v1 = v0.pow(2.0)
    v2 = v1.mean(-1, keepdim=True)
    v3 = torch.rsqrt(torch.add(v2, 1e-12))
    buffer.mul_(0.5)
    v6 = v0 * v3
    v8 = torch.mul(v6, w)
    v9 = v8 + buffer
    v10 = F.rms_norm(v9, (8,), weight=w, eps=1e-06)
    v11 = F.silu(v6)
    v12 = v10 * v11
    v14 = x.sigmoid() * x
    v15 = torch.mul(v12, v14)
    v16 = w1 * 1.5
    v17 = F.rms_norm(v15, (8,), weight=v16, eps=1e-06)
    return v17


def a_wider_product_whose_gradient_cancels(
    w: "1 float32 grad", r: "12x16 float32"
) -> "train":  # 91306
    v0 = w.double() * r
    v1 = v0 * F.silu(r)
    v2 = torch.mul(v1, (v1 * v1).sum(1, keepdim=True).rsqrt())
    return v2


def a_gradient_of_which_roundings_are_all_that_is_left(  # seed 90961
    w: "8 bfloat16 parameter grad sliced",
    r: "2x2x3x8 float32 grad",
    w1: "8 float32 parameter grad",
    r1: "2x2x3x8 float64 grad sliced",
) -> "train":
    v0 = r * 1.5
    v2 = v0.square()
    v3 = v2.mean(-1, keepdim=True)
    v4 = v3**-0.5
    v7 = (v0 * w.float()).mul(v4)
    v8 = r + v7
    v9 = (v8.roll(1, 0).pow(2)).mean(-1, True, dtype=torch.float32)
    v11 = v8.div(v9)
    v13 = v11 * w1
    v14 = v13.norm(2, -1, keepdim=True)
    v15 = v13 / (v14 * 8**-0.5)
    v16 = torch.mul(v15, (1 + w))
    v18 = v11 + v16
    v32 = v18 * r1
    v38 = torch.square(v32)
    v40 = v38.sqrt()
    v41 = torch.div(v32, v40)
    return v41
