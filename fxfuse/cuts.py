"""Small sizes for a config of transformers: two layers, narrow, with all that there is one of."""

from __future__ import annotations

from collections.abc import Callable, Iterator

LAYERS = 2
TOKENS = (1, 64)
_HIDDEN, _HEAD = 256, 64

_DEPTHS = {
    "num_hidden_layers", "num_layers", "num_decoder_layers", "num_encoder_layers", "n_layer",
    "n_layers", "encoder_layers", "decoder_layers",
}  # fmt: skip
_HEADS = {"num_attention_heads", "num_heads", "n_head", "n_heads", "encoder_attention_heads",
          "decoder_attention_heads"}  # fmt: skip
_WIDTHS = {
    "vocab_size": 1024, "hidden_size": _HIDDEN, "d_model": _HIDDEN, "n_embd": _HIDDEN,
    "intermediate_size": 512, "d_ff": 512, "ffn_dim": 512, "n_inner": 512,
    "encoder_ffn_dim": 512, "decoder_ffn_dim": 512, "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128, "head_dim": _HEAD, "d_kv": _HEAD,
    "attention_head_dim": _HEAD, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": _HEAD, "linear_value_head_dim": _HEAD, "chunk_size": 32,
    "mamba_chunk_size": 32, "state_size": 32, "mamba_d_state": 32, "mamba_d_head": _HEAD,
    "n_groups": 2, "mamba_n_groups": 2,
}  # fmt: skip


def smaller(config: object) -> Iterator[tuple[dict, str]]:
    """Values for the config, the smallest first, and what they do in words.

    Not every architecture can be cut in its widths, which may depend on one another.
    """
    yield _nested(config, lambda c: _depth(c) | _width(c)), f"{LAYERS} layers and small widths"
    yield _nested(config, lambda c: _depth(c) | _vocabulary(c)), f"{LAYERS} layers"


def _nested(config: object, values: Callable[[object], dict]) -> dict:
    """The values of a config and of those in it."""
    found = values(config)
    for name in getattr(config, "sub_configs", {}):
        inner = getattr(config, name, None)
        if inner is not None:
            found[name] = _nested(inner, values)
    return found


def _depth(config: object) -> dict:
    """Fewer layers; of the kinds that a list names by layer, the first of each."""
    given = config.to_dict()
    found = {k: LAYERS for k in _DEPTHS if isinstance(given.get(k), int) and given[k] > LAYERS}
    depths = {given[k] for k in found}
    lists = {k: v for k, v in given.items() if isinstance(v, list) and len(v) in depths}
    kept = _kept(lists.get("layer_types") or next(iter(lists.values()), []))
    return found | {k: [v[i] for i in kept] for k, v in lists.items()}


def _kept(kinds: list) -> list[int]:
    firsts = sorted(kinds.index(kind) for kind in {str(kind): kind for kind in kinds}.values())
    others = [i for i in range(len(kinds)) if i not in firsts]
    return sorted((firsts + others)[:LAYERS])


def _vocabulary(config: object) -> dict:
    size = getattr(config, "vocab_size", None)
    if not isinstance(size, int):
        return {}
    size = min(size, _WIDTHS["vocab_size"])
    given = {k: v for k, v in config.to_dict().items() if isinstance(v, int)}
    ids = {k: 0 for k, v in given.items() if k.endswith("token_id") and v >= size}
    return {"vocab_size": size, **ids}


def _width(config: object) -> dict:
    given = {k: v for k, v in config.to_dict().items() if isinstance(v, int) and v > 1}
    found = {k: min(v, given[k]) for k, v in _WIDTHS.items() if k in given}
    found |= {k: min(4, given[k]) for k in _HEADS if k in given}
    pairs = given.get("num_key_value_heads"), given.get("num_attention_heads")
    if pairs[0]:
        found["num_key_value_heads"] = 4 if pairs[0] == pairs[1] else 2
    expand = given.get("expand") or given.get("mamba_expand")
    if expand:
        inner = expand * found.get("hidden_size", _HIDDEN)
        head = found.get("mamba_d_head") or found.get("head_dim") or _HEAD
        for heads in ("mamba_n_heads", "n_mamba_heads", "num_heads"):
            found |= {heads: inner // head} if heads in given else {}
        found |= {"mamba_d_ssm": inner} if "mamba_d_ssm" in given else {}
    return found | _vocabulary(config)
