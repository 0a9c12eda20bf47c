"""Describes MiniMax-M2, whose router has corrected sigmoid scores. All heads of q, and of k, share one norm."""

from __future__ import annotations

from dataclasses import replace

from lorafleet.workers.bases.experts_config import ExpertsConfig
from lorafleet.workers.bases.families.config_fields import ConfigFields
from lorafleet.workers.bases.families.family import Family
from lorafleet.workers.bases.families.mixtures import MIXTRAL_NAMES
from lorafleet.workers.bases.layer_config import LayerConfig
from lorafleet.workers.bases.model_config import ModelConfig

POSITIONS = 196608


def _minimax_m2(fields: ConfigFields) -> ModelConfig:
    size = fields.head_dim(128)
    partial = fields.integer("rotary_dim", size) / size
    rope = fields.rope(POSITIONS, theta=5e6, head_dim=128, partial=partial)
    attention = replace(fields.attention(rope, kv_heads=8, head_dim=128), qk_norm="row")
    experts = ExpertsConfig(
        count=fields.integer("num_local_experts", 256),
        per_token=fields.integer("num_experts_per_tok", 8),
        intermediate_size=fields.integer("intermediate_size", 1536),
        sums_to_one=True,
        layers=frozenset(range(fields.num_layers)),
        scores="sigmoid",
        correction_name="e_score_correction_bias",
        activation=fields.expert_activation(),
    )
    model = fields.model(fields.equal_layers(LayerConfig(attention, fields.mlp())), POSITIONS)
    return replace(model, experts=experts, names=MIXTRAL_NAMES)


MINIMAX_M2 = Family(
    "MiniMaxM2ForCausalLM",
    "MiniMax-M2",
    "norms of all heads together, partly rotated heads, a mixture in every layer",
    _minimax_m2,
    {
        "vocab_size": 200064,
        "hidden_size": 3072,
        "intermediate_size": 1536,
        "num_hidden_layers": 62,
        "num_attention_heads": 48,
        "max_position_embeddings": POSITIONS,
        "eos_token_id": 200020,
    },
)
