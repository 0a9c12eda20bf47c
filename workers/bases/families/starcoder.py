"""Describes the layers of StarCoder 2: layer norms and linears with biases, and an MLP without a gate."""

from __future__ import annotations

from dataclasses import replace

from lorafleet.workers.bases.families.config_fields import ConfigFields
from lorafleet.workers.bases.families.family import Family
from lorafleet.workers.bases.layer_config import LayerConfig, MLPConfig
from lorafleet.workers.bases.model_config import ModelConfig, NormStyle

POSITIONS = 4096


def _starcoder2(fields: ConfigFields) -> ModelConfig:
    bias = fields.flag("use_bias", True)
    attention = replace(
        fields.attention(fields.rope(POSITIONS)), qkv_bias=bias, o_bias=bias, window=fields.raw.get("sliding_window")
    )
    mlp = MLPConfig(
        fields.integer("intermediate_size", 12288),
        fields.activation(),
        bias,
        gate_name=None,
        up_name="mlp.c_fc",
        down_name="mlp.c_proj",
    )
    model = fields.model(fields.equal_layers(LayerConfig(attention, mlp)), POSITIONS)
    return replace(model, norm=NormStyle(fields.number("norm_epsilon", 1e-5), kind="layer", has_bias=True))


STARCODER2 = Family(
    "Starcoder2ForCausalLM",
    "StarCoder2",
    "layer norms, an MLP without a gate, biases, a sliding window",
    _starcoder2,
    {
        "vocab_size": 49152,
        "hidden_size": 3072,
        "num_hidden_layers": 30,
        "num_attention_heads": 24,
        "num_key_value_heads": 2,
        "hidden_act": "gelu_pytorch_tanh",
        "eos_token_id": 50256,
        "tie_word_embeddings": True,
    },
)
