"""Norms, residual adds, gates, views and writes in the ways that people write them, and in others.

A piece adds lines to a program and returns the name of its result. What comes second in `b.pick`
is a near miss: it looks like a fused form and computes something else.
"""

from __future__ import annotations

import torch

from scripts.fuzzing.builder import Builder

EPS = ("1e-06", "1e-05", "1e-12", "0.0", "0.01")
HALVES = (torch.float16, torch.bfloat16)
FLOATS = (*HALVES, torch.float32, torch.float64)


def named(dtype: torch.dtype) -> str:
    return str(dtype)


# ---- norms --------------------------------------------------------------------------------------


def norm(b: Builder, x: str) -> str:
    """RMSNorm of x in any spelling, with a weight or without."""
    kind = b.random.random()
    if kind < 0.2:
        return whole_norm(b, x)
    if kind < 0.27:
        return vector_norm(b, x)
    return spelt_norm(b, x)


def weight_for(b: Builder, x: str, width: int | None = None) -> str:
    """A weight of the width of x: a new one, or one that another norm has, too."""
    width = width or b.width(x)
    known = [i.name for i in b.inputs if i.parameter and i.shape == (width,)]
    if known and b.chance(0.3):
        return b.random.choice(known)
    dtype = b.dtype(x) if b.chance(0.7) else b.random.choice(FLOATS[:3])
    shape = b.pick([(width,)], [(1,), (1, width), b.shape(x)[-2:], b.shape(x), ()])
    if shape == () or b.chance(0.05):
        w = b.input("w", shape or (1,), dtype, parameter=True, grad=True)
        return b.let(f"{w} * 1.5") if shape else b.let(f"{w}.sum()")
    layout = b.pick(["contiguous"] * 12 + ["padded", "sliced"]) if len(shape) == 1 else "contiguous"
    return b.input("w", shape, dtype, parameter=True, grad=b.chance(0.85), layout=layout)


def wide(b: Builder, x: str) -> str:
    """x as the statistic reads it."""
    if b.dtype(x) in HALVES and b.chance(0.1):
        return x
    if b.dtype(x) in HALVES or b.chance(0.15):
        return b.let(b.pick(
            [f"{x}.float()", f"{x}.to(torch.float32)", f"{x}.type(torch.float32)"],
            [f"{x}.double()", f"{x}.bfloat16()", f"{x}.detach().float()", f"{x}.float() + 0.0",
             f"{x}.float().clone()", f"{x}.float() * 1.5"],
        ))  # fmt: skip
    return x


def mean_of_squares(b: Builder, v: str, other: str) -> str:
    """The statistic of v. other: what looks like v and may be taken for it."""
    n = b.width(v)
    square = b.pick(
        [f"{v}.pow(2)", f"{v} * {v}", f"{v} ** 2", f"{v}.square()", f"torch.square({v})",
         f"torch.pow({v}, 2)", f"torch.mul({v}, {v})", f"{v}.pow(2.0)"],
        [f"{v}.pow(3)", f"{v} * {other}", f"{v}.abs()", f"{v}.detach().pow(2)", f"{v} * 2",
         f"{v}[..., : {max(n // 2, 1)}].pow(2)", f"{v}.flip(-1) * {v}", f"{v}.roll(1, 0).pow(2)"],
    )  # fmt: skip
    s = b.let(square) if b.chance(0.7) else f"({square})"
    last = len(b.shape(v)) - 1
    m = b.let(b.pick(
        [f"{s}.mean(-1, keepdim=True)", f"torch.mean({s}, -1, keepdim=True)",
         f"{s}.mean(dim=({last},), keepdim=True)", f"{s}.sum(-1, keepdim=True) / {n}",
         f"{s}.sum(-1, True) * {1 / n!r}", f"{s}.mean(-1).unsqueeze(-1)", f"{s}.mean([-1], True)",
         f"torch.mean({s}, dim={last}).unsqueeze(-1)", f"{s}.mean(-1)[..., None]",
         f"{s}.mean(-1, keepdim=True).expand_as({v})", f"{s}.mean(-1, True, dtype=torch.float32)"],
        [f"{s}.mean(0, keepdim=True)", f"{s}.mean(-2, keepdim=True)", f"{s}.mean()",
         f"{s}.mean((-2, -1), keepdim=True)", f"{s}.sum(-1, keepdim=True) / {n + 1}",
         f"{s}.sum(-1, keepdim=True)", f"{v}.var(-1, keepdim=True)",
         f"{v}.var(-1, keepdim=True, correction=0)", f"{s}.mean(-1, keepdim=True).detach()",
         f"{s}.amax(-1, keepdim=True)", f"{s}[..., 1:].sum(-1, keepdim=True) / {n}",
         f"{s}.median(-1, keepdim=True)[0]", f"{s}.mean(-1, keepdim=True).roll(1, 0)",
         f"{s}.mean(-1, True, dtype=torch.float64)", f"{s}.mean(-1)"],
    ))  # fmt: skip
    if b.chance(0.03):
        return b.let(f"{m}.to({named(b.random.choice(FLOATS))})")
    return m


def root_of(b: Builder, m: str) -> tuple[str, bool]:
    """The root of a statistic, and whether one divides by it."""
    eps = b.random.choice(EPS)
    if b.chance(0.08):
        b.do(f"{m} {b.pick(['+='], ['*=', '-='])} {eps}") if b.chance(0.5) else b.do(
            f"{m}.add_({eps})"
        )
        inner = m
    else:
        inner = b.pick(
            [f"({m} + {eps})", f"({eps} + {m})", f"torch.add({m}, {eps})", f"{m}.add({eps})", m],
            [f"({m} - {eps})", f"({m} * {eps})", f"torch.clamp({m}, min={eps})", f"({m} + {m})",
             f"torch.add({m}, 0.5, alpha=2)", f"({m} + {m}.mean())"],
        )  # fmt: skip
    divides = b.chance(0.2)
    if divides:
        return b.let(b.pick(
            [f"torch.sqrt({inner})", f"{inner}.sqrt()", f"{inner} ** 0.5", f"{inner}.pow(0.5)"],
            [f"torch.sqrt({inner}) + {eps}", f"{inner}", f"{inner} ** 0.25"],
        )), True  # fmt: skip
    r = b.let(b.pick(
        [f"torch.rsqrt({inner})", f"{inner}.rsqrt()", f"{inner} ** -0.5",
         f"torch.pow({inner}, -0.5)", f"1.0 / torch.sqrt({inner})", f"1 / {inner}.sqrt()",
         f"torch.sqrt({inner}).reciprocal()", f"torch.reciprocal(torch.sqrt({inner}))"],
        [f"torch.rsqrt({inner}) + {eps}", f"torch.rsqrt({inner}).detach()", f"{inner} ** -1",
         f"2 / torch.sqrt({inner})", f"torch.rsqrt({inner}).clamp(max=10)", f"torch.sqrt({inner})"],
    ))  # fmt: skip
    if b.chance(0.03):
        b.do(f"{r}.{b.pick(['mul_(1.5)', 'neg_()', 'clamp_(max=0.5)'])}")
    return r, False


def scaled(b: Builder, v: str, r: str, divides: bool) -> str:
    if divides:
        return b.pick([f"{v} / {r}", f"{v}.div({r})", f"torch.div({v}, {r})"], [f"{r} / {v}"])
    return b.pick(
        [f"{v} * {r}", f"{r} * {v}", f"torch.mul({v}, {r})", f"{v}.mul({r})"],
        [f"{v} + {r}", f"{v} - {r}", f"{v} * {r} * {r}", f"-{v} * {r}", f"{v} / {r}"],
    )


def cast_to(b: Builder, value: str, x: str) -> str:
    """A value in the dtype of x."""
    return b.pick(
        [f"({value}).to({x}.dtype)", f"({value}).type_as({x})", f"({value}).to({x})",
         f"({value}).to({named(b.dtype(x))})"],
        [f"({value}).to(torch.bfloat16)", f"({value}).to(torch.float16)",
         f"({value}).to({x}.dtype).float()", f"({value}).detach().to({x}.dtype)"],
    )  # fmt: skip


def weighted(b: Builder, y: str, x: str) -> str:
    w = weight_for(b, x)
    wide_w = b.pick(
        [w, w, f"{w}.float()", f"{w}.to({x}.dtype)"], [f"{w}.double()", f"{w}.detach()"]
    )
    if b.chance(0.3):
        wide_w = b.pick(
            [f"(1 + {wide_w})", f"(1.0 + {wide_w})", f"({wide_w} + 1.0)", f"torch.add({w}, 1.0)"],
            [f"(2 * {wide_w})", f"(1 - {wide_w})", f"({wide_w} + {w})", f"({wide_w} + 0.5)"],
        )
    return b.pick(
        [f"{y} * {wide_w}", f"{wide_w} * {y}", f"torch.mul({y}, {wide_w})", f"({y}).mul({wide_w})"],
        [f"{y} + {wide_w}", f"{y} / {wide_w}", f"{y} * {wide_w} * {wide_w}",
         f"{y} * {wide_w}.view(1, 1, -1)", f"{y} * {wide_w}.unsqueeze(0)",
         f"{y} * {wide_w}.expand({b.width(x)})"],
    )  # fmt: skip


def spelt_norm(b: Builder, x: str) -> str:
    v = wide(b, x)
    other = b.random.choice(b.like(x))
    r, divides = root_of(b, mean_of_squares(b, v, other))
    if b.chance(0.1):
        between(b, x)
    source = b.pick([v, v, v, x], [other, f"{v}.abs()", f"{v}.roll(1, 0)"])
    if b.chance(0.08) and not divides:
        r = b.let(cast_to(b, r, x))
    if b.chance(0.07):  # the weight first
        return b.let(scaled(b, f"({weighted(b, source, x)})", r, divides))
    unit = b.let(scaled(b, source, r, divides))
    cast_first = b.chance(0.5)
    if cast_first and b.chance(0.8):
        unit = b.let(cast_to(b, unit, x))
    if b.chance(0.8):
        unit = b.let(weighted(b, unit, x))
    if not cast_first and b.chance(0.8):
        unit = b.let(cast_to(b, unit, x))
    return unit


def whole_norm(b: Builder, x: str) -> str:
    """A norm in one piece."""
    n = b.width(x)
    v = b.let(f"{x}.float()") if b.chance(0.2) else x
    w = weight_for(b, v, n)
    eps = b.random.choice(
        [*EPS, *["None"] * 2 * (torch.float64 not in {i.dtype for i in b.inputs})]
    )
    s = b.pick([f"({n},)", f"[{n}]", f"{v}.shape[-1:]"], [f"{v}.shape[-2:]"])
    y = b.let(b.pick(
        [f"F.rms_norm({v}, {s}, {w}, {eps})", f"F.rms_norm({v}, {s}, weight={w}, eps={eps})",
         f"torch.rms_norm({v}, {s}, {w}, {eps})", f"F.rms_norm({v}, {s}, None, {eps}) * {w}",
         f"{w} * F.rms_norm({v}, {s}, eps={eps})", f"F.rms_norm({v}, {s}, eps={eps})"],
        [f"F.layer_norm({v}, {s}, {w}, eps=1e-5)", f"F.normalize({v}, dim=-1) * {w}"],
    ))  # fmt: skip
    return b.let(cast_to(b, y, x)) if v != x and b.chance(0.8) else y


def vector_norm(b: Builder, x: str) -> str:
    """x over its length, times the root of the width."""
    n, v = b.width(x), wide(b, x)
    length = b.let(b.pick(
        [f"torch.linalg.vector_norm({v}, dim=-1, keepdim=True)", f"{v}.norm(2, -1, keepdim=True)",
         f"{v}.norm(p=2, dim=-1, keepdim=True)", f"torch.norm({v}, dim=-1, keepdim=True)"],
        [f"{v}.norm(1, -1, keepdim=True)", f"{v}.norm(2, 0, keepdim=True)", f"{v}.norm()"],
    ))  # fmt: skip
    eps = b.pick([""], [" + 1e-06"])
    root = b.pick([f"{n} ** -0.5", repr(n**-0.5)], [repr(n**0.5), repr(1 / n)])
    y = b.let(f"{v} / ({length} * {root}{eps})")
    if b.chance(0.6):
        y = b.let(weighted(b, y, x))
    return b.let(cast_to(b, y, x)) if b.chance(0.6) else y


def centred_norm(b: Builder, x: str) -> str:
    """A LayerNorm in pieces."""
    v = b.let(f"{x} - {x}.mean(-1, keepdim=True)")
    return spelt_norm(b, v)


def head_norm(b: Builder, x: str) -> str:
    """A norm over heads or groups of columns, back in the shape of x."""
    n = b.width(x)
    group = b.random.choice([g for g in (1, 2, 4, 8, 16) if n % g == 0])
    heads = b.pick(
        [f"{x}.unflatten(-1, (-1, {group}))", f"{x}.view(*{x}.shape[:-1], -1, {group})",
         f"{x}.reshape(*{x}.shape[:-1], {n // group}, {group})"],
        [f"{x}.reshape(-1, {group})", f"{x}.unflatten(-1, ({group}, -1))"],
    )  # fmt: skip
    h = b.let(heads)
    y = norm(b, h)
    y = b.let(b.pick([f"{y}.flatten(-2)", f"{y}.reshape({x}.shape)", f"{y}.view({x}.shape)"], [y]))
    return b.let(weighted(b, y, x)) if b.chance(0.3) else y


# ---- residual adds ------------------------------------------------------------------------------


def partner(b: Builder, x: str) -> str:
    """Another tensor of the shape of x: a new input, or a value that is there."""
    like = [n for n in b.like(x) if n != x]
    if like and b.chance(0.75):
        return b.random.choice(like)
    dtype = b.dtype(x) if b.chance(0.85) else b.random.choice(FLOATS)
    shape = b.pick([b.shape(x)], [b.shape(x)[-1:], (*b.shape(x)[:-1], 1)])
    return tensor(b, "r", shape, dtype)


def tensor(b: Builder, stem: str, shape: tuple[int, ...], dtype: torch.dtype) -> str:
    """A new input of rows."""
    others = [i for i in b.inputs if i.shape == shape and i.dtype == dtype and not i.parameter]
    layout = "contiguous"
    if len(shape) > 1 and b.chance(0.25):
        layout = b.random.choice(["transposed", "sliced", "padded", "expanded"])
    elif others and b.chance(0.05):
        chosen = b.random.choice(others)
        if chosen.layout == "contiguous":
            layout = f"{b.random.choice(['same', 'alias'])}:{chosen.name}"
    grad = b.chance(0.75) and ":" not in layout
    return b.input(stem, shape, dtype, grad=grad, layout=layout, small=b.chance(0.2))


def add(b: Builder, x: str) -> str:
    r = partner(b, x)
    if b.chance(0.12):
        b.do(b.pick([f"{x} += {r}", f"{x}.add_({r})", f"{x} += {r} * 0.5"], [f"{x} -= {r}"]))
        return x
    return b.let(b.pick(
        [f"{x} + {r}", f"{x} + {r}", f"{r} + {x}", f"torch.add({x}, {r})", f"{x}.add({r})",
         f"({x}.float() + {r}.float()).to({x}.dtype)", f"{x} + {r} * 0.5", f"{x}.float() + {r}"],
        [f"torch.add({x}, {r}, alpha=2)", f"{x} - {r}", f"({x} + {r}) * 0.5", f"{x} + {x}",
         f"{x} + {r} + {r}", f"({x}.float() + {r}.float())", f"{x}.detach() + {r}", f"{x} + 1.0",
         f"({x} + {r}).detach()", f"({x} + {r}).to(torch.bfloat16)", f"torch.maximum({x}, {r})"],
    ))  # fmt: skip


def add_norm(b: Builder, x: str) -> str:
    h = add(b, x)
    if b.chance(0.1):
        h = b.let(b.pick([f"{h}.view(-1, {b.width(h)})", f"{h}.to(torch.float32)", f"{h} * 0.5"]))
    return norm(b, h)


def sandwich(b: Builder, x: str) -> str:
    """A norm, a residual add, a norm."""
    y = norm(b, x)
    if b.chance(0.1):
        between(b, x)
    r = partner(b, y)
    h = b.let(
        b.pick([f"{r} + {y}", f"{y} + {r}"], [f"{r} - {y}", f"{r} + {y} * 0.5", f"{y} + {x}"])
    )
    return norm(b, h)


# ---- gates --------------------------------------------------------------------------------------


def silu(b: Builder, g: str) -> str:
    if b.chance(0.03):
        g = b.let(f"{g} * 1.0")
        return b.let(f"F.silu({g}, inplace=True)")
    found = b.pick(
        [f"F.silu({g})", f"F.silu({g})", f"F.silu({g}.float())", f"{g} * torch.sigmoid({g})",
         f"torch.sigmoid({g}) * {g}", f"F.silu({g}.float()).to({g}.dtype)", f"{g}.sigmoid() * {g}",
         f"{g} / (1 + torch.exp(-{g}))", f"F.silu({g}.float()).type_as({g})",
         f"{g} * torch.sigmoid({g}.float()).to({g}.dtype)"],
        [f"torch.sigmoid({g})", f"F.gelu({g})", f"{g} * torch.sigmoid(1.702 * {g})",
         f"torch.tanh({g})", f"F.silu(-{g})", f"F.silu({g}).detach()", f"F.silu({g}) + {g}",
         f"{g}.detach() * torch.sigmoid({g})", f"F.silu({g}[..., :1])", f"{g} * torch.relu({g})",
         f"F.hardswish({g})", f"F.silu(F.silu({g}))"],
    )  # fmt: skip
    return b.let(found) if b.chance(0.6) else f"({found})"


def gate(b: Builder, x: str) -> str:
    s = silu(b, partner(b, x))
    if b.chance(0.1):
        between(b, x)
    y = b.let(b.pick(
        [f"{x} * {s}", f"{s} * {x}", f"torch.mul({x}, {s})", f"{x}.float() * {s}"],
        [f"{x} + {s}", f"{x} * {s} * {s}", f"{x} / {s}", f"{x}.detach() * {s}"],
    ))  # fmt: skip
    return b.let(cast_to(b, y, x)) if b.chance(0.35) else y


def norm_gate(b: Builder, x: str) -> str:
    return gate(b, norm(b, x))


def gate_norm(b: Builder, x: str) -> str:
    return norm(b, gate(b, x))


def gate_head_norm(b: Builder, x: str) -> str:
    return head_norm(b, gate(b, x))


# ---- what lies between --------------------------------------------------------------------------


def mixer(b: Builder, x: str) -> str:
    """Something in the place of attention or an MLP: it reads x and has its shape."""
    n = b.width(x)
    if b.chance(0.35) and n > 1:
        m = b.input("m", (n, n), b.dtype(x), parameter=True, grad=b.chance(0.8))
        return b.let(b.pick([f"{x} @ {m}", f"torch.matmul({x}, {m})", f"F.linear({x}, {m})"]))
    return b.let(b.pick(
        [f"{x}.roll(1, -1) * 1.5", f"torch.sin({x})", f"{x} * 0.5", f"torch.tanh({x})",
         f"{x}.neg()", f"{x}.clone()", f"{x} + 0.25", f"{x}.contiguous()",
         f"F.dropout({x}, 0.5, False)"],
        [f"{x}.detach()", f"{x}.relu()"],
    ))  # fmt: skip


def reshape(b: Builder, x: str) -> str:
    n = b.width(x)
    return b.let(b.pick(
        [f"{x}.view(-1, {n})", f"{x}.transpose(0, 1)", f"{x}.reshape({x}.shape)",
         f"{x}.unsqueeze(0)", f"{x}[..., : {max(n // 2, 1)}]", f"{x}[:1]", f"{x}.flatten(0, 1)",
         f"{x}.transpose(-2, -1)", f"{x}.expand({x}.shape)", f"{x}.chunk(2, -1)[0]",
         f"{x}.view({x}.shape)", f"{x}[0]",
         f"{x}.permute(*range({len(b.shape(x))})[::-1])", f"{x}.view_as({x})", f"{x}.flip(-1)"],
    ))  # fmt: skip


def cast(b: Builder, x: str) -> str:
    return b.let(f"{x}.to({named(b.random.choice(FLOATS[:3]))})")


def write(b: Builder, x: str) -> str:
    """Write to the memory of x, or to another value's; returns x."""
    target = x if b.chance(0.4) else b.random.choice(b.floats())
    value = b.random.choice(b.like(target))
    b.do(b.pick([
        f"{target}.add_(1.0)", f"{target}.mul_(0.5)", f"{target}.copy_({value})", f"{target} *= 2",
        f"{target}.copy_({value}.detach())", f"{target} += {value}", f"{target}[..., 0] = 0.25",
        f"{target}[:1] = 1.0", f"{target}[0].zero_()", f"{target}.select(-1, 0).fill_(2.0)",
        f"{target}.data.mul_(2.0)", f"torch.add({target}, 1.0, out={target})", f"{target}.neg_()",
        f"{target}.detach().mul_(1.5)", f"torch._foreach_add_([{target}], 1.0)",
        f"{target}.view(-1).add_(1.0)", f"F.relu({target}, inplace=True)", f"{target}.zero_()",
        f"{target}.transpose(0, -1).mul_(2.0)", f"{target}[..., 1:] += {value}[..., :-1]",
        f"torch.mul({value}, 2.0, out={target})", f"{target}.clamp_(-0.5, 0.5)", f"{target}.t_()",
        f"{target}.lerp_({value}, 0.5)", f"{target}.addcmul_({value}, {value})",
    ]))  # fmt: skip
    return x


def buffer(b: Builder, x: str) -> str:
    """Keep a statistic, or a copy, in a tensor of the caller's."""
    buffers = [i.name for i in b.inputs if i.name.startswith("buffer") and i.shape == b.shape(x)]
    if not buffers or b.chance(0.3):
        buffers = [b.input("buffer", b.shape(x), b.dtype(x))]
    kept = b.random.choice(buffers)
    b.do(b.pick([
        f"{kept}.copy_({x}.detach())", f"{kept} += {x}.detach()", f"{kept}.mul_(0.5)",
        f"{kept}[:1] = {x}[:1].detach()", f"torch.mul({x}.detach(), 2.0, out={kept})",
    ]))  # fmt: skip
    return kept if b.chance(0.3) else x


def reader(b: Builder, x: str) -> str:
    """Read a value of any place once more; what is read becomes a result."""
    value = b.random.choice(list(b.values))
    b.let(b.pick([
        f"{value}.sum()", f"{value}.square().sum()", f"{value}.float().mean(0)", f"{value} * 2",
        f"{value}.detach().abs().amax()", f"torch.sin({value})", f"{value}.norm()",
        f"{value}.clone()", f"{value}.pow(2).mean(-1, keepdim=True)", f"{value}.view(-1)",
        f"{value}.detach()",
    ]))  # fmt: skip
    return x


def between(b: Builder, x: str) -> None:
    """Something in the middle of another piece."""
    b.attempt(b.pick([write, write, reader, buffer]), x)


PIECES = {
    norm: 6, add_norm: 8, add: 5, sandwich: 4, head_norm: 2, gate: 4, norm_gate: 4, gate_norm: 3,
    gate_head_norm: 2, mixer: 6, reshape: 2, cast: 1, write: 2, buffer: 1, reader: 2,
    centred_norm: 0.3,
}  # fmt: skip
