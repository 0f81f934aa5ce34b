"""Real transformers architectures with two small layers: every norm and residual add, no other."""

from __future__ import annotations

import os

import pytest
import torch

import fxfuse

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
transformers = pytest.importorskip("transformers")

SMALL = dict(
    vocab_size=128, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, intermediate_size=128, max_position_embeddings=64,
    pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
HEADS = dict(SMALL, head_dim=16)

MAMBA = dict(
    vocab_size=128, hidden_size=64, num_hidden_layers=2, pad_token_id=0, bos_token_id=1,
    eos_token_id=2, num_heads=8, head_dim=16, state_size=16, n_groups=2, chunk_size=16,
)  # fmt: skip
FALCON = dict(
    SMALL, mamba_n_heads=8, mamba_d_head=16, mamba_d_state=16, mamba_n_groups=2,
    mamba_chunk_size=16, mamba_d_ssm=128, mamba_rms_norm=True, mamba_norm_before_gate=False,
)  # fmt: skip
QWEN_NEXT = dict(
    HEADS, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, mlp_only_layers=[0],
    shared_expert_intermediate_size=64, linear_key_head_dim=16, linear_value_head_dim=16,
    linear_num_key_heads=2, linear_num_value_heads=4,
    layer_types=["linear_attention", "full_attention"],
)  # fmt: skip


def counts(**found: int) -> dict[str, int]:
    return found


# model type, configuration, and what is in it, as hooks on the running models count it: norms,
# residual adds with their norm, gates with and without a norm
MODELS = (
    ("llama", SMALL, counts(rms_norm=1, add_rms_norm=4, silu_gate=2)),
    ("mistral", HEADS, counts(rms_norm=1, add_rms_norm=4, silu_gate=2)),
    ("qwen3", HEADS, counts(rms_norm=5, add_rms_norm=4, silu_gate=2)),
    ("gemma", HEADS, counts(rms_norm=1, add_rms_norm=4)),
    ("gemma3_text", HEADS, counts(rms_norm=5, rms_norm_add_rms_norm=4)),
    ("olmo2", SMALL, counts(rms_norm=7, rms_norm_add_rms_norm=1, silu_gate=2)),
    ("granite", SMALL, counts(rms_norm=1, add_rms_norm=4, silu_gate=2)),
    ("mamba2", MAMBA, counts(rms_norm=1, add_rms_norm=2, silu_gate_rms_norm=2)),
    ("falcon_h1", FALCON, counts(
        rms_norm=1, add_rms_norm=4, silu_gate_rms_norm=2, silu_gate=2)),
    ("qwen3_next", QWEN_NEXT, counts(
        rms_norm=3, add_rms_norm=4, rms_norm_silu_gate=1, silu_gate=3)),
)  # fmt: skip
REASONS = {
    "olmo2": {
        "its norm comes before the add, and no norm of the sum follows: only the norm itself can "
        "be fused"
    },
    "qwen3_next": {"it divides by the root of a sum of squares, not of their mean"},
}


def build(kind: str, config: dict) -> torch.nn.Module:
    torch.manual_seed(0)
    made = transformers.AutoConfig.for_model(kind, **config)
    return transformers.AutoModelForCausalLM.from_config(made).eval()


def tokens() -> torch.Tensor:
    return torch.randint(3, 100, (2, 12), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("kind", "config", "expected"), MODELS, ids=lambda v: v if isinstance(v, str) else ""
)
def test_counts(kind, config, expected):
    model = build(kind, config)
    report = fxfuse.explain(model, input_ids=tokens(), use_cache=False, train=False)
    assert report.counts == expected
    assert {m.reason for m in report.misses} == REASONS.get(kind, set())
    assert all(m.module and ".py:" in m.where for m in report.matches)


def test_t5_has_its_norms():
    config = transformers.T5Config(
        vocab_size=128, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4,
        decoder_start_token_id=0,
    )  # fmt: skip
    model = transformers.T5ForConditionalGeneration(config).eval()
    report = fxfuse.explain(model, input_ids=tokens(), labels=tokens())
    # x + norm-free branches: each of the two stacks begins with a norm whose input is read again
    assert report.counts == {"add_rms_norm": 10, "rms_norm": 2, "backward_add_rms_norm": 2}


@pytest.mark.parametrize(
    ("kind", "inner"),
    [
        ("llama", "aot_eager"), ("gemma3_text", "aot_eager"), ("mamba2", "aot_eager"),
        ("qwen3_next", "eager"),  # PyTorch's own aot_eager fails on this model
    ],
)  # fmt: skip
def test_training_step_equals_eager(kind, inner):
    config = next(c for k, c, *_ in MODELS if k == kind)
    results = []
    for compile_it in (False, True):
        model = build(kind, config).train()
        torch._dynamo.reset()
        call = torch.compile(model, backend=fxfuse.make_backend(inner)) if compile_it else model
        loss = call(input_ids=tokens(), labels=tokens(), use_cache=False).loss
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
    for got, want in zip(*results):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
