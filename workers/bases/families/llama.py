"""Describes Llama and families that differ from it in biases, windows or the MLP alone: a norm before attention and
before the MLP, rotated heads, a gated MLP."""

from __future__ import annotations

from dataclasses import replace

from lorafleet.workers.bases.families.config_fields import ConfigFields
from lorafleet.workers.bases.families.family import Family
from lorafleet.workers.bases.layer_config import LayerConfig, LayerNorms, MLPConfig
from lorafleet.workers.bases.model_config import ModelConfig
from lorafleet.workers.bases.rope_parameters import with_rope

_APERTUS_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


def _llama(fields: ConfigFields) -> ModelConfig:
    bias, positions = fields.flag("attention_bias"), 2048
    attention = replace(fields.attention(fields.rope(positions)), qkv_bias=bias, o_bias=bias)
    layer = LayerConfig(attention, fields.mlp(has_bias=fields.flag("mlp_bias")))
    return fields.model(fields.equal_layers(layer), positions)


def _internlm3(fields: ConfigFields) -> ModelConfig:
    """Returns the settings of InternLM 3, whose names of biases transformers 5 has replaced by those of Llama."""
    bias = fields.flag("bias", fields.flag("mlp_bias"))
    attention = fields.attention(fields.rope(32768, head_dim=128), kv_heads=2, head_dim=128)
    attention = replace(attention, qkv_bias=fields.flag("qkv_bias", fields.flag("attention_bias")), o_bias=bias)
    layer = LayerConfig(attention, fields.mlp(10240, has_bias=bias))
    return fields.model(fields.equal_layers(layer), 32768, eps=1e-5)


def _helium(fields: ConfigFields) -> ModelConfig:
    positions, size = 4096, 128
    rope = fields.rope(positions, theta=1e5, head_dim=size, is_interleaved=True)
    attention = replace(fields.attention(rope, kv_heads=20, head_dim=size), qkv_bias=fields.flag("attention_bias"))
    layer = LayerConfig(attention, fields.mlp(7040, has_bias=fields.flag("mlp_bias")))
    return fields.model(fields.equal_layers(layer), positions, eps=1e-8)


def _seed_oss(fields: ConfigFields) -> ModelConfig:
    positions, size = 524288, 128
    attention = fields.attention(fields.rope(positions, head_dim=size), kv_heads=8, head_dim=size)
    attention = replace(
        attention, qkv_bias=fields.flag("attention_bias", True), o_bias=fields.flag("attention_out_bias")
    )
    layer = LayerConfig(attention, fields.mlp(27648, has_bias=fields.flag("mlp_bias")))
    return fields.model(fields.equal_layers(layer), positions)


def _arcee(fields: ConfigFields) -> ModelConfig:
    bias, positions = fields.flag("attention_bias"), 4096
    attention = replace(fields.attention(fields.rope(positions)), qkv_bias=bias, o_bias=bias)
    layer = LayerConfig(attention, replace(fields.mlp(18432, has_bias=fields.flag("mlp_bias")), gate_name=None))
    return fields.model(fields.equal_layers(layer), positions, eps=1e-5)


def _apertus(fields: ConfigFields) -> ModelConfig:
    fields.refuse("hidden_act", "xielu")
    fields = ConfigFields(with_rope(fields.raw, _APERTUS_ROPE), {})
    bias, positions = fields.flag("attention_bias"), 65536
    attention = replace(fields.attention(fields.rope(positions, theta=1.2e7)), qkv_bias=bias, o_bias=bias)
    mlp = MLPConfig(fields.integer("intermediate_size", 14336), "xielu", gate_name=None)
    norms = LayerNorms("attention_layernorm", None, "feedforward_layernorm")
    layer = LayerConfig(replace(attention, qk_norm="head"), mlp, norms)
    return fields.model(fields.equal_layers(layer), positions, eps=1e-5)


LLAMA = Family(
    "LlamaForCausalLM", "Llama 2, 3, 3.1 to 3.3", "rope scaling: linear, dynamic, llama3, yarn; biases", _llama
)
INTERNLM3 = Family(
    "InternLM3ForCausalLM",
    "InternLM3",
    "dynamic rope scaling, biases",
    _internlm3,
    {"vocab_size": 128512, "num_hidden_layers": 48, "eos_token_id": 2},
)
HELIUM = Family(
    "HeliumForCausalLM",
    "Helium 1",
    "interleaved rotation",
    _helium,
    {
        "vocab_size": 48000,
        "hidden_size": 2560,
        "num_hidden_layers": 24,
        "num_attention_heads": 20,
        "eos_token_id": 2,
    },
)
SEED_OSS = Family(
    "SeedOssForCausalLM",
    "Seed-OSS",
    "biases of q, k and v",
    _seed_oss,
    {"vocab_size": 155136, "num_hidden_layers": 64, "num_attention_heads": 80, "eos_token_id": 2},
)
ARCEE = Family(
    "ArceeForCausalLM",
    "Arcee AFM",
    "an MLP without a gate",
    _arcee,
    {"hidden_size": 2560, "hidden_act": "relu2", "eos_token_id": 128001},
)
APERTUS = Family(
    "ApertusForCausalLM",
    "Apertus",
    "xIELU without a gate, norms of q and k",
    _apertus,
    {"vocab_size": 131072, "eos_token_id": 2},
)
