"""Norms, gates and residual adds as published models write them, and how to check a rewrite.

Ids are those of a catalogue: N a norm, G a gate, R a residual add.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from functorch.compile import aot_module, make_boxed_func, min_cut_rematerialization_partition
from torch import fx, nn
from torch.nn import functional as F

import fxfuse
from tests.dialects import DIALECTS, inductor_aten
from tests.spellings import (
    EPS,
    HALVES,
    WIDTH,
    CastThenWeight,
    CastToWeight,
    DividedByRoot,
    LeafModule,
    LeafWithoutWeight,
    Norm,
    PowerOfMinusHalf,
    StatisticAlone,
    TypeAs,
    WeightFirst,
    Weightless,
    WeightlessSquare,
    WeightThenCast,
    WideWeight,
    ZeroCentred,
    ZeroCentredRounded,
)

FLOAT, HALF, FP16 = torch.float32, torch.bfloat16, torch.float16
GROUP = 16


def unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)


# ---- norms --------------------------------------------------------------------------------------


class WideWeightOnTheRight(Norm):  # Moshi
    def forward(self, x):
        return (unit(x.float()) * self.weight.float()).type_as(x)


class ZeroCentredGroups(Norm):  # the streams of a hyper-connection
    untraceable = True

    def forward(self, x):
        y = x.float()
        y = y.reshape(*y.shape[:-1], -1, GROUP)
        return (unit(y).flatten(-2) * (1.0 + self.weight.float())).type_as(x)


class PowerWithoutWeight(Norm):  # Gemma 4's values
    def forward(self, x):
        y = x.float()
        return (y * torch.pow(y.pow(2).mean(-1, keepdim=True) + EPS, -0.5)).type_as(x)


class RoundedRoot(Norm):  # DeepSeek 4: x is multiplied as it is
    needs_dtypes = True

    def forward(self, x):
        return x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + EPS).to(x.dtype)


class WithBias(Norm):  # xLSTM
    def __init__(self, dtype):
        super().__init__(dtype)
        self.bias = nn.Parameter(torch.linspace(-0.5, 0.5, WIDTH).to(dtype))

    def forward(self, x):
        return unit(x.float()).to(x.dtype) * self.weight + self.bias


class FunctionalAlone(Norm):
    def forward(self, x):
        return F.rms_norm(x, (WIDTH,), eps=EPS)


# ---- what the op of a norm says -----------------------------------------------------------------


def keeps(x: torch.dtype, w: torch.dtype) -> tuple:
    """All in fp32, and one cast at the end."""
    return FLOAT, x


def rounds(x: torch.dtype, w: torch.dtype) -> tuple:
    """Rounded to the dtype of x before the weight."""
    return x, torch.promote_types(x, w)


def rounds_to_weight(x: torch.dtype, w: torch.dtype) -> tuple:
    return (w, w) if w in HALVES else (FLOAT, FLOAT)


def never_rounds(x: torch.dtype, w: torch.dtype) -> tuple:
    return FLOAT, FLOAT


def rounds_all(x: torch.dtype, w: torch.dtype) -> tuple:
    return x, x


@dataclass(frozen=True)
class Form:
    """A norm, and the attributes of its op.

    numerics: the dtypes of what the weight multiplies and of the result, by those of x and w.
    known: whether `tests.spellings` has it.
    """

    module: type[Norm]
    numerics: Callable = keeps
    offset: float = 0.0
    eps: float | None = EPS
    weighted: bool = True
    known: bool = True


NORMS = {
    "N1": Form(CastThenWeight, rounds),
    "N1L": Form(TypeAs, rounds),
    "N1C": Form(StatisticAlone, rounds),
    "N2": Form(CastToWeight, rounds_to_weight),
    "N3": Form(WeightThenCast),
    "N4": Form(WideWeight),
    "N4M": Form(WideWeightOnTheRight, known=False),
    "N5": Form(ZeroCentred, offset=1.0),
    "N5S": Form(ZeroCentredRounded, offset=1.0),
    "N5G": Form(ZeroCentredGroups, never_rounds, weighted=False, known=False),
    "N6": Form(PowerOfMinusHalf),
    "N6 without weight": Form(PowerWithoutWeight, weighted=False, known=False),
    "N7": Form(Weightless, weighted=False),
    "N7Q": Form(WeightlessSquare, weighted=False),
    "N8": Form(RoundedRoot, rounds_all, weighted=False, known=False),
    "N10": Form(WeightFirst, never_rounds),
    "N11": Form(DividedByRoot, never_rounds),
    "N13": Form(WithBias, rounds, known=False),
    "N14": Form(LeafModule),
    "N14 without weight": Form(LeafWithoutWeight, eps=None, weighted=False),
    "N14f": Form(FunctionalAlone, weighted=False, known=False),
}


# ---- gates --------------------------------------------------------------------------------------


class Gate(nn.Module):
    """A norm with a gate; subclasses write it."""

    untraceable = False

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH).to(dtype))
        self.norm = CastThenWeight(dtype)


class Mamba2(Gate):
    untraceable = True

    def forward(self, x, gate):
        dtype = x.dtype
        x = x.to(torch.float32) * F.silu(gate.to(torch.float32))
        *lead, width = x.shape
        x = unit(x.view(*lead, width // GROUP, GROUP))
        return self.weight * x.view(*lead, width).to(dtype)


class FalconH1(Gate):
    untraceable = True

    def forward(self, x, gate):
        dtype, groups = x.dtype, (WIDTH // GROUP, GROUP)
        x = x * F.silu(gate.to(torch.float32))
        batch, length, width = x.shape
        x = unit(x.to(torch.float32).view(batch, length, *groups))
        return (self.weight.view(*groups) * x).view(batch, length, width).to(dtype)


class Qwen3Next(Gate):
    def forward(self, x, gate):
        return (self.norm(x) * F.silu(gate.to(torch.float32))).to(x.dtype)


class LaraMini(Gate):
    def forward(self, x, gate):
        wide = self.weight.to(torch.float32) * unit(x.to(torch.float32))
        return (wide * F.silu(gate.to(torch.float32))).to(x.dtype)


class GateThenNorm(Gate):
    untraceable = True  # without dtypes only its gate is sure

    def forward(self, x, gate):
        return self.norm(F.silu(gate) * x)


class KimiLinear(Gate):
    def forward(self, x, gate):
        wide = self.weight.to(torch.float32) * unit(x.to(torch.float32))
        return (wide * torch.sigmoid(gate.to(torch.float32))).to(x.dtype)


class MiniMax(Gate):
    def forward(self, x, gate):
        return F.sigmoid(gate * 1.5) * self.norm(x)


class GateOfItself(Gate):  # A.X K2
    def forward(self, x, gate):
        y = self.norm(x)
        return (y * torch.sigmoid(F.silu(y.roll(1, -1)).roll(3, -1).float())).to(y.dtype)


# pattern; the dtypes of the silu, of what is between gate and norm, of what the weight multiplies
# and of the result, by those of x, gate and weight
GATES = {
    "G1": (Mamba2, "silu_gate_rms_norm",
           lambda x, g, w: (FLOAT, FLOAT, x, torch.promote_types(x, w))),
    "G2": (FalconH1, "silu_gate_rms_norm", lambda x, g, w: (FLOAT, FLOAT, FLOAT, x)),
    "G3": (Qwen3Next, "rms_norm_silu_gate",
           lambda x, g, w: (FLOAT, torch.promote_types(x, w), x, x)),
    "G4": (LaraMini, "rms_norm_silu_gate", lambda x, g, w: (FLOAT, FLOAT, FLOAT, x)),
    "G7": (GateThenNorm, "silu_gate_rms_norm",
           lambda x, g, w: (g, (h := torch.promote_types(x, g)), h, torch.promote_types(h, w))),
}  # fmt: skip
SIGMOIDS = {"G4 with a sigmoid": KimiLinear, "G5": MiniMax, "G6": GateOfItself}


# ---- residual adds ------------------------------------------------------------------------------


class Block(nn.Module):
    """Two or three norms and the adds between them, as `formula(self, residual, other)` says."""

    def __init__(self, formula: Callable, dtype: torch.dtype, training: bool = False) -> None:
        super().__init__()
        self.n1, self.n2, self.n3 = (CastThenWeight(dtype) for _ in range(3))
        self.formula = formula
        self.gamma = nn.Parameter(torch.linspace(-0.5, 0.5, WIDTH).to(dtype))
        self.gate = nn.Parameter(torch.tensor([0.4]).to(dtype))
        self.register_buffer("scalar", torch.tensor([0.75]).to(dtype))
        self.train(training)

    def forward(self, residual, other):
        return self.formula(self, residual, other)


def mixer(x: torch.Tensor) -> torch.Tensor:
    return x.roll(1, -1) * 1.5


def r1(m, r, _):
    h = r + mixer(m.n1(r))
    return m.n2(h), h


def r1c(m, r, _):
    h = mixer(m.n1(r)) + r
    return m.n2(h), h


def r1_read_by_a_router(m, r, _):
    h = r + mixer(m.n1(r))
    return m.n2(h), h, torch.softmax(h, -1)


def r2(m, r, _):
    h = r + m.n1(mixer(r))
    h = h + m.n2(mixer(h))
    return m.n3(h), h


def r3(m, r, _):
    h = r + m.n2(mixer(m.n1(r)))
    return m.n3(h), h


def r3_on_the_left(m, r, _):  # TimesFM
    h = m.n2(mixer(m.n1(r))) + r
    return m.n3(h), h


def r3_dropout(m, r, _):  # T5Gemma
    h = r + F.dropout(m.n2(mixer(m.n1(r))), 0.1, m.training)
    return m.n3(h), h


def r4(m, r, _):
    h = r + mixer(m.n1(r)) * 0.22
    return m.n2(h), h


def r4_on_the_left(m, r, _):
    h = r + 0.22 * mixer(m.n1(r))
    return m.n2(h), h


def r4_alpha(m, r, _):  # OLMo core
    h = torch.add(r, mixer(m.n1(r)), alpha=0.5)
    return m.n2(h), h


def r5(m, r, _):
    h = r + F.dropout(mixer(m.n1(r)), 0.1, m.training)
    return m.n2(h), h


def r5_clamped(m, r, _):  # T5 in fp16
    h = r + mixer(m.n1(r))
    limit = torch.where(torch.isinf(h).any(), 64504.0, 65504.0)
    h = torch.clamp(h, min=-limit, max=limit).to(h.dtype)
    return m.n2(h), h


def r6(m, r, _):
    h = r + m.gate.tanh() * mixer(m.n1(r))
    return m.n2(h), h


def r6_layer_scale(m, r, _):
    h = r + m.gamma * mixer(m.n1(r))
    return m.n2(h), h


def r7(m, r, _):  # and R15: the normed value is the residual
    x = m.n1(r)
    h = x * 0.9 + mixer(x) * 1.1
    return m.n2(h), h


def r7_beam(m, r, _):
    h = r * 0.75**0.5 + mixer(m.n1(r)) * 0.5
    return m.n2(h), h


def r7_halved(m, r, _):  # Gemma 3n
    h = (r + mixer(m.n1(r))) / 2**0.5
    return m.n2(h), h


def r7_vector(m, r, _):  # Doge
    h = m.gamma * r + mixer(m.n1(r))
    return m.n2(h), h


def r7_affine(m, r, _):  # Zaya
    h = (mixer(m.n1(r)) + m.gamma) * m.gamma + (r + m.gate) * m.gamma
    return m.n2(h), h


def r8(m, r, _):
    n = m.n1(r)
    h = r + mixer(n) + torch.cos(n)
    return m.n2(h), h


def r9(m, r, _):  # Gemma 4
    h = r + mixer(m.n1(r))
    h *= m.scalar
    return m.n2(h), h


def r9_in_place_add(m, r, _):
    h = mixer(m.n1(r))
    h += r
    return m.n2(h), h


def r10(m, r, _):  # Mamba: the stream is fp32, and each norm casts it
    dtype = m.n1.weight.dtype
    h = r.to(torch.float32) + mixer(m.n1(r.to(dtype)))
    return m.n2(h.to(dtype)), h


def r10_wide(m, r, _):  # Zaya
    h = r.to(torch.float32) + mixer(m.n1(r))
    return m.n2(h), h


def r11(m, r, other):  # two streams
    streams = torch.stack((r, other), -2)
    comb = torch.linspace(0.1, 0.9, 4, dtype=r.dtype).view(2, 2)
    post = torch.linspace(0.3, 0.8, 2, dtype=r.dtype)
    h = post[..., None] * mixer(m.n1(streams.sum(-2)))[..., None, :] + comb.mT @ streams
    return m.n2(h.sum(-2)), F.rms_norm(h.flatten(-2), (2 * WIDTH,), eps=EPS)


def r12(m, r, other):
    depth = torch.stack((r, other), -2)
    scores = unit(depth.float()).type_as(depth).sum(-1, keepdim=True)
    h = (scores.softmax(-2) * depth).sum(-2)
    return m.n2(h), h


def r13(m, r, _):  # nGPT
    h = r + m.gamma * (m.n1(mixer(r)) - r)
    return m.n2(h), h


def r14(m, r, other):  # Zamba
    return m.n1(r + other), r, F.rms_norm(torch.cat((r, other), -1), (2 * WIDTH,), eps=EPS)


def found(**counts: int) -> dict[str, int]:
    return dict(sorted(counts.items()))


PRE = found(rms_norm=1, add_rms_norm=1)
SANDWICH = found(rms_norm=1, rms_norm_add_rms_norm=1)
NORMS_ALONE = found(rms_norm=2)
RESIDUALS = {
    "R1": (r1, PRE), "R1c": (r1c, PRE), "R1 and a router": (r1_read_by_a_router, PRE),
    "R2": (r2, SANDWICH), "R3": (r3, SANDWICH), "R3 on the left": (r3_on_the_left, SANDWICH),
    "R4": (r4, PRE), "R4 on the left": (r4_on_the_left, PRE), "R4 alpha": (r4_alpha, NORMS_ALONE),
    "R5": (r5, PRE), "R5 clamped": (r5_clamped, NORMS_ALONE), "R5 of R3": (r3_dropout, SANDWICH),
    "R6": (r6, PRE), "R6 LayerScale": (r6_layer_scale, PRE),
    "R7 and R15": (r7, PRE), "R7 scalars": (r7_beam, PRE), "R7 halved": (r7_halved, NORMS_ALONE),
    "R7 vector": (r7_vector, PRE), "R7 affine": (r7_affine, PRE), "R8": (r8, PRE),
    "R9": (r9, NORMS_ALONE), "R9 in-place add": (r9_in_place_add, PRE),
    "R10": (r10, PRE), "R10 wide": (r10_wide, PRE),
    "R11": (r11, found(rms_norm=3)), "R12": (r12, NORMS_ALONE), "R13": (r13, PRE),
    "R14": (r14, PRE),
}  # fmt: skip


# ---- rewrites and what they found ---------------------------------------------------------------


def run(function: Callable, args: tuple) -> object:
    torch.manual_seed(0)  # for dropout
    return function(*args)


def traced(trace: Callable) -> Callable:
    """A rewrite: what its graph returns after and before it, and the graph."""

    def rewrite(model: nn.Module, args: tuple) -> tuple[object, object, fx.GraphModule]:
        gm = trace(model, args)
        want = run(gm, args)
        fxfuse.apply(gm)
        return run(gm, args), want, gm

    return rewrite


def dynamo(model: nn.Module, args: tuple) -> tuple[object, object, fx.GraphModule]:
    graphs = []

    def keep(gm, example_inputs):
        graphs.append(fxfuse.apply(gm))
        return gm.forward

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=keep, fullgraph=True)
    return run(compiled, args), run(model, args), graphs[0]


def aot_forward(model: nn.Module, args: tuple) -> tuple[object, object, fx.GraphModule]:
    """The forward graph of a training step, which comes after autograd."""
    graphs = []

    def keep(gm, example_inputs):
        graphs.append(fxfuse.apply(gm))
        return make_boxed_func(gm)

    compiled = aot_module(
        model,
        fw_compiler=keep,
        bw_compiler=lambda gm, _: make_boxed_func(gm),
        partition_fn=min_cut_rematerialization_partition,
    )
    leaves = tuple(arg.clone().requires_grad_() for arg in args)
    return run(compiled, leaves), run(model, args), graphs[0]


REWRITES = {name: traced(trace) for name, trace in DIALECTS.items()}
REWRITES |= {"inductor": traced(inductor_aten), "dynamo": dynamo, "aot_forward": aot_forward}


def forward_counts(gm: fx.GraphModule) -> dict[str, int]:
    """The sites of each pattern, without the gradients that a norm takes along."""
    counts = gm.meta["fxfuse"].counts
    return {name: n for name, n in counts.items() if not name.startswith("backward_")}


def ops(gm: fx.GraphModule) -> list[fx.Node]:
    """The fused ops of a graph."""
    return [n for n in gm.graph.nodes if str(n.target).startswith("fxfuse.")]


def attributes(node: fx.Node) -> dict[str, object]:
    """The keyword arguments of an op, the defaults among them."""
    arguments = node.target._schema.arguments
    return {a.name: node.kwargs.get(a.name, a.default_value) for a in arguments if a.kwarg_only}


def resolved(name: str, default: torch.dtype, **given: torch.dtype) -> torch.dtype:
    """A dtype of an attribute: of the operand that it names, or the one it spells."""
    return given.get(name) or (getattr(torch, name) if name else default)


def numerics(node: fx.Node, x: torch.dtype, w: torch.dtype, suffix: str = "", out="out_dtype"):
    """eps, offset and the dtypes of the statistic, of what the weight multiplies, and the result.

    As they are for these dtypes of what is normalised and of the weight (of one without: x).
    """
    found = attributes(node)
    compute = resolved(found["compute_dtype" + suffix], torch.promote_types(x, FLOAT), input=x)
    unit_dtype = resolved(found["unit_dtype" + suffix], compute, input=x)
    offset = found["weight_offset" + suffix]
    natural = torch.promote_types(unit_dtype, compute if offset else w)
    eps = found["eps" + suffix]
    return eps, offset, compute, unit_dtype, resolved(found[out], natural, input=x)


def step(want: torch.Tensor) -> torch.Tensor:
    """One unit in the last place of each element, as fp32."""
    bits = {FP16: 10, HALF: 7, FLOAT: 23}[want.dtype]
    least = torch.finfo(want.dtype).tiny
    return torch.exp2(torch.floor(torch.log2(want.abs().float().clamp_min(least))) - bits)


def assert_exact(got: torch.Tensor, want: torch.Tensor, steps: int = 1) -> None:
    """Bit for bit in 99 % of fp16 and bf16, and the rest within `steps`; within 4 in fp32."""
    assert got.dtype == want.dtype and got.shape == want.shape
    if want.dtype in HALVES:
        assert (got == want).float().mean() >= 0.99
    allowed = steps if want.dtype in HALVES else 4
    assert ((got.float() - want.float()).abs() <= allowed * step(want)).all()
