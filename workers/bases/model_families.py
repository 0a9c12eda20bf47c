"""Lists the differences between architectures, and transformers' defaults for what a config.json leaves out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from lorafleet.protocol.config_json import integer, num_layers
from lorafleet.protocol.errors import ConfigError, UnsupportedModel
from lorafleet.workers.bases.rope_config import RopeConfig
from lorafleet.workers.bases.rope_parameters import phi3_rope, rope_by_layer_type


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """A mixture of experts that replaces a layer's MLP."""

    count: int  # experts of each layer
    per_token: int  # experts chosen for a token
    intermediate_size: int
    sums_to_one: bool  # the chosen weights are scaled to sum to 1; else they are probabilities among all experts
    layers: frozenset[int]  # layers that have the mixture


@dataclass(frozen=True, slots=True)
class Family:
    """The settings in which architectures differ, with transformers' defaults for what config.json leaves out."""

    sliding_windows: tuple[int | None, ...]
    default_positions: int
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    default_kv_heads: int | None = None  # None: as many as query heads
    default_head_dim: int | None = None  # None: hidden_size / num_attention_heads
    default_eps: float = 1e-6
    default_theta: float = 10000.0
    experts: ExpertsConfig | None = None
    rope: RopeConfig | None = None  # None: as most families have it, see read_rope
    sliding_rope: RopeConfig | None = None
    attention_scale: float | None = None  # None: head_dim**-0.5
    attention_softcap: float | None = None
    final_softcap: float | None = None
    embed_scale: float = 1.0
    is_gemma: bool = False
    fused_linears: bool = False


def _llama(raw: dict[str, Any]) -> Family:
    bias = bool(raw.get("attention_bias", False))
    windows = (None,) * num_layers(raw)
    return Family(windows, 2048, qkv_bias=bias, o_bias=bias, mlp_bias=bool(raw.get("mlp_bias", False)))


def _mistral(raw: dict[str, Any]) -> Family:
    if raw.get("layer_types"):
        raise UnsupportedModel("Mistral with layer_types is not supported; transformers has other classes for it.")
    windows = (raw.get("sliding_window", 4096),) * num_layers(raw)
    return Family(windows, 4096 * 32, default_kv_heads=8)


def _qwen2(raw: dict[str, Any]) -> Family:
    return Family(_qwen_windows(raw), 32768, qkv_bias=True, default_kv_heads=32)


def _qwen3(raw: dict[str, Any]) -> Family:
    bias = bool(raw.get("attention_bias", False))
    return Family(
        _qwen_windows(raw),
        32768,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        default_kv_heads=32,
        default_head_dim=128,
    )


def _mixtral(raw: dict[str, Any]) -> Family:
    experts = ExpertsConfig(
        count=integer(raw, "num_local_experts", 8),
        per_token=integer(raw, "num_experts_per_tok", 2),
        intermediate_size=integer(raw, "intermediate_size", 14336),
        sums_to_one=True,
        layers=frozenset(range(num_layers(raw))),
    )
    windows = (raw.get("sliding_window"),) * num_layers(raw)
    return Family(
        windows,
        4096 * 32,
        default_kv_heads=8,
        default_eps=1e-5,
        default_theta=1e6,
        experts=_checked(experts),
    )


def _qwen3_moe(raw: dict[str, Any]) -> Family:
    bias = bool(raw.get("attention_bias", False))
    window = raw.get("sliding_window", 4096) if raw.get("use_sliding_window", False) else None
    every, dense = integer(raw, "decoder_sparse_step", 1), raw.get("mlp_only_layers") or []
    layers = frozenset(i for i in range(num_layers(raw)) if i not in dense and (i + 1) % every == 0)
    count = "num_experts" if "num_experts" in raw else "num_local_experts"  # in transformers 4 and in 5
    experts = ExpertsConfig(
        count=integer(raw, count, 128),
        per_token=integer(raw, "num_experts_per_tok", 8),
        intermediate_size=integer(raw, "moe_intermediate_size", 768),
        sums_to_one=bool(raw.get("norm_topk_prob", False)),
        layers=layers,
    )
    return Family(
        (window,) * num_layers(raw),
        32768,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        default_kv_heads=4,
        experts=_checked(experts) if layers else None,
    )


def _checked(experts: ExpertsConfig) -> ExpertsConfig:
    if experts.per_token > experts.count:
        raise ConfigError(
            f"config.json has num_experts_per_tok={experts.per_token}, more than its {experts.count} experts.", "model"
        )
    return experts


def _qwen_windows(raw: dict[str, Any]) -> tuple[int | None, ...]:
    window = raw.get("sliding_window", 4096) if raw.get("use_sliding_window", False) else None
    kinds = raw.get("layer_types")
    if not kinds:
        first = raw.get("max_window_layers", 28)
        return tuple(window if i >= first else None for i in range(num_layers(raw)))
    return _windows(raw, kinds, window)


def _windows(raw: dict[str, Any], kinds: list[str], window: int | None) -> tuple[int | None, ...]:
    unknown = set(kinds) - {"full_attention", "sliding_attention"}
    if unknown or len(kinds) != num_layers(raw):
        raise UnsupportedModel(f"layer_types {sorted(set(kinds))} over {len(kinds)} layers is not supported.")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _gemma(raw: dict[str, Any], pattern: int) -> Family:
    """Returns what Gemma 2 and 3 share. Without layer_types, every pattern-th layer sees all tokens."""
    kinds = raw.get("layer_types") or [
        "sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(num_layers(raw))
    ]
    window = integer(raw, "sliding_window", 4096)
    bias = bool(raw.get("attention_bias", False))
    return Family(
        _windows(raw, kinds, window),
        8192,
        qkv_bias=bias,
        o_bias=bias,
        attention_scale=float(raw["query_pre_attn_scalar"]) ** -0.5,
        attention_softcap=raw.get("attn_logit_softcapping"),
        final_softcap=raw.get("final_logit_softcapping"),
        embed_scale=integer(raw, "hidden_size", 0) ** 0.5,
        is_gemma=True,
    )


def _gemma2(raw: dict[str, Any]) -> Family:
    return _gemma(raw, 2)


def _gemma3(raw: dict[str, Any]) -> Family:
    """Returns the settings of Gemma 3, where each kind of layer has its own rope."""
    if raw.get("attn_logit_softcapping") is not None:
        raise UnsupportedModel("attn_logit_softcapping of Gemma 3 is not supported; transformers does not apply it.")
    rope, sliding_rope = rope_by_layer_type(raw)
    shared = _gemma(raw, integer(raw, "sliding_window_pattern", 6))
    return replace(shared, qk_norm=True, rope=rope, sliding_rope=sliding_rope)


def _phi3(raw: dict[str, Any]) -> Family:
    return Family((raw.get("sliding_window"),) * num_layers(raw), 4096, rope=phi3_rope(raw), fused_linears=True)


FAMILIES: dict[str, Callable[[dict[str, Any]], Family]] = {
    "Gemma2ForCausalLM": _gemma2,
    "Gemma3ForCausalLM": _gemma3,
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "MixtralForCausalLM": _mixtral,
    "Phi3ForCausalLM": _phi3,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "Qwen3MoeForCausalLM": _qwen3_moe,
}
# Values that transformers leaves out of config.json, since they are the family's defaults.
_GEMMA_DEFAULTS: dict[str, Any] = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "Gemma2ForCausalLM": _GEMMA_DEFAULTS
    | {
        "vocab_size": 256000,
        "max_position_embeddings": 8192,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "Gemma3ForCausalLM": _GEMMA_DEFAULTS | {"vocab_size": 262208, "max_position_embeddings": 131072},
    "Phi3ForCausalLM": {
        "vocab_size": 32064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_attention_heads": 32,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "eos_token_id": 32000,
    },
}
