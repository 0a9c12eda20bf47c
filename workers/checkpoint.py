"""Reads a Hugging Face config.json into what the engine needs, and refuses by name what it does not do.

Both spellings are read: transformers 4 (rope_theta, rope_scaling, torch_dtype) and 5 (rope_parameters, dtype).
Weights are read in workers/weights.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lorafleet.kernels.gated_mul import Activation
from lorafleet.workers.errors import ConfigError, UnsupportedModel
from lorafleet.workers.models.rope import RopeConfig, RopeType

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
KV_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
ROPE_TYPES: tuple[RopeType, ...] = ("default", "linear", "dynamic", "llama3", "yarn")
ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """A mixture of experts in the place of a layer's MLP. layers: that have it. per_token: experts chosen for a token.
    sums_to_one: their weights are made to; else they are the probabilities among all experts."""

    count: int
    per_token: int
    intermediate_size: int
    sums_to_one: bool
    layers: frozenset[int]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder of the Llama kind. sliding_windows: tokens a query of that layer sees, its own included; None is all.

    dtype: the checkpoint's own, None where config.json does not say. eos_token_ids: of generation_config.json where
    there is one, else of config.json. experts: None where every layer's MLP is dense. sliding_rope: of the layers with
    a window, where it is another than rope. attention_scale: multiplies q.k. attention_softcap, final_softcap: of the
    scores and the logits, see AttentionSpec. embed_scale: multiplies the embedding, as rounded to the model's dtype.
    norm_adds_one: the checkpoint keeps norm weights less one. branch_norms: attention and MLP are normed before the
    residual is added, too. fused_linears: q, k and v are one linear in the checkpoint and to adapters, and so are gate
    and up.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_windows: tuple[int | None, ...]
    dtype: torch.dtype | None
    eos_token_ids: tuple[int, ...]
    attention_scale: float
    experts: ExpertsConfig | None = None
    activation: Activation = "silu"
    sliding_rope: RopeConfig | None = None
    attention_softcap: float | None = None
    final_softcap: float | None = None
    embed_scale: float = 1.0
    norm_adds_one: bool = False
    branch_norms: bool = False
    fused_linears: bool = False

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    def norm_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Of the norms' weights in a model of `dtype`, which might not hold what is added to one."""
        return torch.float32 if self.norm_adds_one else dtype

    @property
    def context_limit(self) -> int:
        """Tokens that the rope scaling was made for."""
        if self.rope.rope_type == "yarn":
            return max(self.max_position_embeddings, int(self.rope.original_max_position_embeddings * self.rope.factor))
        counts_scaling = self.sliding_rope is not None  # Gemma 3's max_position_embeddings
        if self.rope.rope_type in ("linear", "dynamic") and not counts_scaling:
            return int(self.max_position_embeddings * self.rope.factor)
        return self.max_position_embeddings

    def experts_of(self, layer: int) -> ExpertsConfig | None:
        """None where the layer's MLP is dense."""
        return self.experts if self.experts is not None and layer in self.experts.layers else None

    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """(in, out) of every projection that plain LoRA may target, by module path below the model; the experts' are
        not among them, see expert_shapes()."""
        hidden, inner = self.hidden_size, self.intermediate_size
        attention = {"self_attn.o_proj": (self.q_size, hidden)}
        dense = {"mlp.down_proj": (inner, hidden)}
        if self.fused_linears:
            attention["self_attn.qkv_proj"] = (hidden, self.q_size + 2 * self.kv_size)
            dense["mlp.gate_up_proj"] = (hidden, 2 * inner)
        else:
            attention |= {f"self_attn.{kv}_proj": (hidden, self.kv_size) for kv in "kv"}
            attention["self_attn.q_proj"] = (hidden, self.q_size)
            dense |= {f"mlp.{half}_proj": (hidden, inner) for half in ("gate", "up")}
        shapes: dict[str, tuple[int, int]] = {}
        for i in range(self.num_layers):
            experts = self.experts_of(i)
            mlp = dense if experts is None else {"mlp.gate": (hidden, experts.count)}
            shapes |= {f"layers.{i}.{name}": shape for name, shape in (attention | mlp).items()}
        return shapes

    def expert_shapes(self) -> dict[str, tuple[int, int]]:
        """(in, out) of each expert's projections; empty without experts."""
        if self.experts is None:
            return {}
        hidden, inner = self.hidden_size, self.experts.intermediate_size
        return {"gate_proj": (hidden, inner), "up_proj": (hidden, inner), "down_proj": (inner, hidden)}


def read_model_config(folder: Path) -> ModelConfig:
    """Raises ConfigError where the folder or file is missing or damaged, UnsupportedModel naming what is not done."""
    if not folder.is_dir():
        raise ConfigError(f"model {str(folder)!r} is not a folder; give a local Hugging Face checkpoint.", "model")
    raw = _read_json(folder / "config.json")
    names = raw.get("architectures") or []
    if len(names) != 1 or names[0] not in _FAMILIES:
        raise UnsupportedModel(
            f"architecture {', '.join(map(str, names)) or 'missing'} in {folder / 'config.json'} is not supported; "
            f"supported are {', '.join(sorted(_FAMILIES))}.",
            "model",
        )
    raw = _DEFAULTS.get(names[0], {}) | raw
    _refuse_options(raw)
    family = _FAMILIES[names[0]](raw)
    if family.experts is not None and ACTIVATIONS[_activation(raw)] != "silu":
        raise UnsupportedModel(f"hidden_act={_activation(raw)!r} is not supported for experts; silu is.")
    generation = folder / "generation_config.json"
    eos = (_read_json(generation) if generation.exists() else {}).get("eos_token_id", raw.get("eos_token_id"))
    num_heads = _integer(raw, "num_attention_heads", 32)
    hidden = _integer(raw, "hidden_size", 4096)
    head_dim = raw.get("head_dim") or family.default_head_dim or hidden // num_heads
    kv_heads = raw.get("num_key_value_heads", family.default_kv_heads) or num_heads
    if num_heads % kv_heads:
        raise UnsupportedModel(f"num_attention_heads={num_heads} is no multiple of num_key_value_heads={kv_heads}.")
    limit = _integer(raw, "max_position_embeddings", family.default_positions)
    return ModelConfig(
        architecture=names[0],
        vocab_size=_integer(raw, "vocab_size", 32000),
        hidden_size=hidden,
        intermediate_size=_integer(raw, "intermediate_size", 11008),
        num_layers=_integer(raw, "num_hidden_layers", 32),
        num_heads=num_heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=float(raw.get("rms_norm_eps", family.default_eps)),
        max_position_embeddings=limit,
        rope=family.rope or _rope(raw, _rope_parameters(raw), head_dim, limit, family.default_theta),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=family.qkv_bias,
        o_bias=family.o_bias,
        mlp_bias=family.mlp_bias,
        qk_norm=family.qk_norm,
        sliding_windows=family.sliding_windows,
        dtype=_dtype(raw),
        eos_token_ids=tuple(eos if isinstance(eos, list) else [] if eos is None else [eos]),
        experts=family.experts,
        attention_scale=family.attention_scale or head_dim**-0.5,
        activation=ACTIVATIONS[_activation(raw)],
        sliding_rope=family.sliding_rope,
        attention_softcap=family.attention_softcap,
        final_softcap=family.final_softcap,
        embed_scale=family.embed_scale,
        norm_adds_one=family.is_gemma,
        branch_norms=family.is_gemma,
        fused_linears=family.fused_linears,
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} is missing; give a local Hugging Face checkpoint.", "model") from None
    except (OSError, ValueError) as e:
        raise ConfigError(f"{path} cannot be read as JSON: {e}", "model") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds a {type(value).__name__}, not an object.", "model")
    return value


def _integer(raw: dict[str, Any], key: str, default: int) -> int:
    value = raw.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"config.json has {key}={value!r}; it must be a positive integer.", "model")
    return value


def _refuse_options(raw: dict[str, Any]) -> None:
    if raw.get("quantization_config") and not _quantises_only_kv(raw["quantization_config"]):
        method = raw["quantization_config"].get("quant_method", "unnamed")
        raise UnsupportedModel(
            f"quantization_config ({method}) is not supported yet; use an unquantised checkpoint, "
            "or one with fp8 scales of the KV cache alone."
        )
    if _activation(raw) not in ACTIVATIONS:
        raise UnsupportedModel(f"hidden_act={_activation(raw)!r} is not supported; {', '.join(ACTIVATIONS)} are.")
    if raw.get("use_bidirectional_attention"):
        raise UnsupportedModel("use_bidirectional_attention is not supported; models that generate do not have it.")


def _activation(raw: dict[str, Any]) -> str:
    """Gemma's configs name it twice, and the first is what counts."""
    return str(raw.get("hidden_activation") or raw.get("hidden_act") or "silu")


def _quantises_only_kv(quantization: dict[str, Any]) -> bool:
    """Weights as they are, and for each layer one k_scale and v_scale for an e4m3 KV cache: weights.py reads those."""
    if quantization.get("quant_method") != "compressed-tensors":
        return False
    if any(quantization.get(other) for other in ("config_groups", "sparsity_config", "transform_config")):
        return False
    scheme = quantization.get("kv_cache_scheme") or {}
    return KV_SCHEME.items() <= scheme.items()


def _dtype(raw: dict[str, Any]) -> torch.dtype | None:
    name = raw.get("dtype") or raw.get("torch_dtype")
    if name is None:
        return None
    if name not in DTYPES:
        raise UnsupportedModel(f"config.json's dtype {name!r} is not supported; {', '.join(DTYPES)} are.")
    return DTYPES[name]


def _rope_parameters(raw: dict[str, Any]) -> dict[str, Any]:
    """Of all layers alike, as transformers 4 and 5 write them."""
    scaling = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    nested = [key for key, value in scaling.items() if isinstance(value, dict)]
    if nested:
        raise UnsupportedModel(f"rope parameters by layer type ({', '.join(nested)}) are not supported.")
    partial = raw.get("partial_rotary_factor") or scaling.get("partial_rotary_factor")
    if partial not in (None, 1.0):
        raise UnsupportedModel(f"partial_rotary_factor={partial} is not supported; 1.0 is.")
    return scaling


def _rope(
    raw: dict[str, Any], scaling: dict[str, Any], rotary_dim: int, max_positions: int, default_theta: float = 10000.0
) -> RopeConfig:
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise UnsupportedModel(f"rope_type={kind!r} is not supported; {', '.join(ROPE_TYPES)} are.")
    trained = _trained_positions(raw, scaling, max_positions)
    factor = scaling.get("factor")
    if factor is None and kind == "yarn":
        factor = max_positions / trained
    if factor is None and kind != "default":
        raise ConfigError(f"config.json's rope scaling {kind!r} has no factor.", "model")
    optional: dict[str, Any] = {
        key: float(scaling[key])
        for key in ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow")
        if scaling.get(key) is not None
    }
    return RopeConfig(
        rotary_dim=rotary_dim,
        theta=_theta(raw, scaling, default_theta),
        max_position_embeddings=max_positions,
        rope_type=kind,
        factor=float(factor or 1.0),
        original_max_position_embeddings=trained,
        attention_factor=scaling.get("attention_factor"),
        mscale=scaling.get("mscale"),
        mscale_all_dim=scaling.get("mscale_all_dim"),
        truncate=bool(scaling.get("truncate", True)),
        **optional,
    )


def _theta(raw: dict[str, Any], scaling: dict[str, Any], default: float = 10000.0) -> float:
    return float(scaling.get("rope_theta") or raw.get("rope_theta") or default)


def _trained_positions(raw: dict[str, Any], scaling: dict[str, Any], max_positions: int) -> int:
    trained = raw.get("original_max_position_embeddings") or scaling.get("original_max_position_embeddings")
    return int(trained or max_positions)


def _layers(raw: dict[str, Any]) -> int:
    return _integer(raw, "num_hidden_layers", 32)


@dataclass(frozen=True, slots=True)
class Family:
    """Where one architecture differs from the others, with transformers' defaults for what config.json leaves out."""

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
    rope: RopeConfig | None = None  # None: as most have it
    sliding_rope: RopeConfig | None = None
    attention_scale: float | None = None  # None: of the head size
    attention_softcap: float | None = None
    final_softcap: float | None = None
    embed_scale: float = 1.0
    is_gemma: bool = False
    fused_linears: bool = False


def _llama(raw: dict[str, Any]) -> Family:
    bias = bool(raw.get("attention_bias", False))
    windows = (None,) * _layers(raw)
    return Family(windows, 2048, qkv_bias=bias, o_bias=bias, mlp_bias=bool(raw.get("mlp_bias", False)))


def _mistral(raw: dict[str, Any]) -> Family:
    if raw.get("layer_types"):
        raise UnsupportedModel("Mistral with layer_types is not supported; transformers has other classes for those.")
    windows = (raw.get("sliding_window", 4096),) * _layers(raw)
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
        count=_integer(raw, "num_local_experts", 8),
        per_token=_integer(raw, "num_experts_per_tok", 2),
        intermediate_size=_integer(raw, "intermediate_size", 14336),
        sums_to_one=True,
        layers=frozenset(range(_layers(raw))),
    )
    windows = (raw.get("sliding_window"),) * _layers(raw)
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
    every, dense = _integer(raw, "decoder_sparse_step", 1), raw.get("mlp_only_layers") or []
    layers = frozenset(i for i in range(_layers(raw)) if i not in dense and (i + 1) % every == 0)
    count = "num_experts" if "num_experts" in raw else "num_local_experts"  # transformers 4, and 5
    experts = ExpertsConfig(
        count=_integer(raw, count, 128),
        per_token=_integer(raw, "num_experts_per_tok", 8),
        intermediate_size=_integer(raw, "moe_intermediate_size", 768),
        sums_to_one=bool(raw.get("norm_topk_prob", False)),
        layers=layers,
    )
    return Family(
        (window,) * _layers(raw),
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
        return tuple(window if i >= first else None for i in range(_layers(raw)))
    return _windows(raw, kinds, window)


def _windows(raw: dict[str, Any], kinds: list[str], window: int | None) -> tuple[int | None, ...]:
    unknown = set(kinds) - {"full_attention", "sliding_attention"}
    if unknown or len(kinds) != _layers(raw):
        raise UnsupportedModel(f"layer_types {sorted(set(kinds))} over {len(kinds)} layers is not supported.")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _gemma(raw: dict[str, Any], pattern: int) -> Family:
    """What Gemma 2 and 3 share. pattern: without layer_types, every such layer sees all."""
    kinds = raw.get("layer_types") or [
        "sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(_layers(raw))
    ]
    window = _integer(raw, "sliding_window", 4096)
    bias = bool(raw.get("attention_bias", False))
    return Family(
        _windows(raw, kinds, window),
        8192,
        qkv_bias=bias,
        o_bias=bias,
        attention_scale=float(raw["query_pre_attn_scalar"]) ** -0.5,
        attention_softcap=raw.get("attn_logit_softcapping"),
        final_softcap=raw.get("final_logit_softcapping"),
        embed_scale=_integer(raw, "hidden_size", 0) ** 0.5,
        is_gemma=True,
    )


def _gemma2(raw: dict[str, Any]) -> Family:
    return _gemma(raw, 2)


def _gemma3(raw: dict[str, Any]) -> Family:
    """Each kind of layer has a rope of its own."""
    if raw.get("attn_logit_softcapping") is not None:
        raise UnsupportedModel("attn_logit_softcapping of Gemma 3 is not supported; transformers does not apply it.")
    scaling = raw.get("rope_parameters") or {}
    if set(scaling) - {"full_attention", "sliding_attention"}:
        raise UnsupportedModel(f"rope_parameters {sorted(scaling)} are not supported; those by layer type are.")
    full = {"rope_theta": raw.get("rope_theta", 1_000_000.0)} | (scaling.get("full_attention") or {})
    sliding = {"rope_theta": raw.get("rope_local_base_freq", 10_000.0)} | (scaling.get("sliding_attention") or {})
    ropes = []
    for kind in (full | (raw.get("rope_scaling") or {}), sliding):
        rope = _rope(raw, _rope_parameters({"rope_parameters": kind}), raw["head_dim"], raw["max_position_embeddings"])
        if rope.depends_on_length:
            raise UnsupportedModel(f"rope_type={rope.rope_type!r} is not supported for Gemma 3.")
        ropes.append(rope)
    shared = _gemma(raw, _integer(raw, "sliding_window_pattern", 6))
    return replace(shared, qk_norm=True, rope=ropes[0], sliding_rope=ropes[1])


def _phi3(raw: dict[str, Any]) -> Family:
    return Family((raw.get("sliding_window"),) * _layers(raw), 4096, rope=_phi3_rope(raw), fused_linears=True)


def _phi3_rope(raw: dict[str, Any]) -> RopeConfig:
    scaling = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    partial = scaling.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0
    head_dim = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
    rotary_dim, positions = int(head_dim * partial), raw["max_position_embeddings"]
    if rotary_dim % 2:
        raise UnsupportedModel(
            f"partial_rotary_factor={partial} of head_dim={head_dim} is odd, which is not supported."
        )
    plain = RopeConfig(rotary_dim, _theta(raw, scaling), positions)
    if kind == "default":
        return plain
    if kind not in ("longrope", "su", "yarn"):  # names that one thing has had
        raise UnsupportedModel(f"rope_type={kind!r} is not supported for Phi-3; longrope is.")
    factors: dict[str, Any] = {}
    for name in ("short_factor", "long_factor"):
        values = scaling.get(name)
        if not isinstance(values, list) or len(values) != rotary_dim // 2:
            raise ConfigError(f"config.json's rope scaling has no {name} with {rotary_dim // 2} numbers.", "model")
        factors[name] = tuple(map(float, values))
    trained = _trained_positions(raw, scaling, positions)
    return replace(
        plain,
        rope_type="longrope",
        factor=float(scaling.get("factor") or positions / trained),
        original_max_position_embeddings=trained,
        attention_factor=scaling.get("attention_factor"),
        **factors,
    )


_FAMILIES: dict[str, Callable[[dict[str, Any]], Family]] = {
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
# What transformers leaves out of config.json, since it is the default of the family.
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
_DEFAULTS: dict[str, dict[str, Any]] = {
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
