"""Describes Ernie 4.5 with a mixture: rotated neighbors, a corrected choice of experts, and shared experts."""

from __future__ import annotations

from dataclasses import replace

from lorafleet.workers.bases.experts_config import ExpertsConfig, SharedExpertConfig
from lorafleet.workers.bases.families.config_fields import ConfigFields
from lorafleet.workers.bases.families.family import Family
from lorafleet.workers.bases.layer_config import LayerConfig
from lorafleet.workers.bases.model_config import ModelConfig
from lorafleet.workers.bases.module_names import ModuleNames

POSITIONS = 131072


def _ernie_moe(fields: ConfigFields) -> ModelConfig:
    fields.refuse("use_bias", False)
    attention = fields.attention(fields.rope(POSITIONS, theta=500000.0, is_interleaved=True), kv_heads=4)
    model = fields.model(fields.equal_layers(LayerConfig(attention, fields.mlp())), POSITIONS, eps=1e-5)
    sparse = _sparse_layers(fields)
    return replace(
        model,
        experts=_experts(fields, sparse) if sparse else None,
        names=ModuleNames(older=(("mlp.gate.moe_statics", "mlp.moe_statics"),)),
        mtp_names=("model.mtp_",),
    )


def _sparse_layers(fields: ConfigFields) -> frozenset[int]:
    first, last = fields.raw.get("moe_layer_start_index", 1), fields.raw.get("moe_layer_end_index", -1)
    every, layers = fields.integer("moe_layer_interval", 1), range(fields.num_layers)
    return frozenset(i for i in layers if (i + 1) % every == 0 and i >= first and (last == -1 or i <= last))


def _experts(fields: ConfigFields, layers: frozenset[int]) -> ExpertsConfig:
    inner, num_shared = fields.integer("moe_intermediate_size", 1536), fields.raw.get("moe_num_shared_experts", 2)
    return ExpertsConfig(
        count=fields.integer("moe_num_experts", 64),
        per_token=fields.integer("moe_k", 6),
        intermediate_size=inner,
        sums_to_one=True,
        layers=layers,
        correction_name="gate.moe_statics.e_score_correction_bias",
        router_float32=True,
        activation=fields.expert_activation(),
        shared=SharedExpertConfig(inner * num_shared) if num_shared else None,
    )


ERNIE_MOE = Family(
    "Ernie4_5_MoeForCausalLM",
    "Ernie 4.5 21B-A3B, 300B-A47B",
    "a mixture with shared experts behind dense layers",
    _ernie_moe,
    {
        "vocab_size": 103424,
        "hidden_size": 2560,
        "intermediate_size": 12288,
        "num_hidden_layers": 28,
        "num_attention_heads": 20,
        "max_position_embeddings": POSITIONS,
        "eos_token_id": 2,
        "tie_word_embeddings": True,
    },
)
