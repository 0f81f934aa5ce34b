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

# model type, configuration, norms alone, residual adds with their norm: from hooks on the models
MODELS = (
    ("llama", SMALL, 1, 4),
    ("mistral", HEADS, 1, 4),
    ("qwen3", HEADS, 5, 4),
    ("gemma", HEADS, 1, 4),
    ("gemma3_text", HEADS, 9, 4),
    ("olmo2", SMALL, 8, 1),
    ("granite", SMALL, 1, 4),
    ("phi3", dict(SMALL, original_max_position_embeddings=64), 1, 4),
)


def build(kind: str, config: dict) -> torch.nn.Module:
    torch.manual_seed(0)
    made = transformers.AutoConfig.for_model(kind, **config)
    return transformers.AutoModelForCausalLM.from_config(made).eval()


def tokens() -> torch.Tensor:
    return torch.randint(3, 100, (2, 12), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("kind", "config", "norms", "adds"), MODELS, ids=lambda v: v if isinstance(v, str) else ""
)
def test_counts(kind, config, norms, adds):
    report = fxfuse.explain(build(kind, config), input_ids=tokens(), use_cache=False)
    assert report.counts == {"add_rms_norm": adds, "rms_norm": norms}
    assert report.misses == []
    assert all(m.module and ".py:" in m.where for m in report.matches)


def test_t5_has_its_norms():
    config = transformers.T5Config(
        vocab_size=128, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4,
        decoder_start_token_id=0,
    )  # fmt: skip
    model = transformers.T5ForConditionalGeneration(config).eval()
    report = fxfuse.explain(model, input_ids=tokens(), labels=tokens())
    assert report.counts == {"add_rms_norm": 10, "rms_norm": 2}


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_training_step_equals_eager(kind):
    config = next(c for k, c, *_ in MODELS if k == kind)
    results = []
    for compile_it in (False, True):
        model = build(kind, config).train()
        torch._dynamo.reset()
        call = (
            torch.compile(model, backend=fxfuse.make_backend("aot_eager")) if compile_it else model
        )
        loss = call(input_ids=tokens(), labels=tokens(), use_cache=False).loss
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
    for got, want in zip(*results):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
