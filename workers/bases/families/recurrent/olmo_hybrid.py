"""Describes OLMo hybrid, whose layers are recurrent except for every fourth, which has OLMo 2's attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from lorafleet.protocol.errors import UnsupportedModel
from lorafleet.workers.bases.families.config_fields import ConfigFields
from lorafleet.workers.bases.families.family import Family
from lorafleet.workers.bases.families.recurrent.qwen_recurrent import checked_delta_net
from lorafleet.workers.bases.layer_config import NORMS_AFTER, DeltaNetConfig, LayerConfig
from lorafleet.workers.bases.model_config import ModelConfig
from lorafleet.workers.bases.module_names import ModuleNames

POSITIONS = 65536
GATED_NORM_EPS = 1e-5  # whatever rms_norm_eps is
_FULL, _RECURRENT = "full_attention", "linear_attention"


def _olmo_hybrid(fields: ConfigFields) -> ModelConfig:
    if fields.activation() != "silu":
        raise UnsupportedModel(f"hidden_act={fields.raw['hidden_act']!r} is not supported; only silu is.")
    last, mlp = fields.num_layers - 1, fields.mlp()
    # Models of fewer than four layers have attention in the last.
    kinds = fields.layer_types(
        lambda i: _FULL if i % 4 == 3 or (i == last < 3) else _RECURRENT, served=(_FULL, _RECURRENT)
    )
    if _FULL not in kinds:
        raise UnsupportedModel("layer_types without full_attention are not supported; at least one layer must have it.")
    bias = fields.flag("attention_bias")
    attention = replace(fields.attention(fields.rope(POSITIONS)), qkv_bias=bias, o_bias=bias, qk_norm="row")
    if _is_without_rope(fields):
        attention = replace(attention, rope=None)
    of_kind = {
        _FULL: LayerConfig(attention, mlp, NORMS_AFTER),
        _RECURRENT: LayerConfig(_delta_net(fields, attention.num_heads), mlp),
    }
    return replace(fields.model(tuple(of_kind[kind] for kind in kinds), POSITIONS), names=NAMES)


def _delta_net(fields: ConfigFields, num_heads: int) -> DeltaNetConfig:
    k_heads = fields.integer("linear_num_key_heads", num_heads)
    k_dim = fields.integer("linear_key_head_dim", int(0.75 * fields.hidden_size / k_heads))
    return checked_delta_net(
        DeltaNetConfig(
            num_k_heads=k_heads,
            num_v_heads=fields.integer("linear_num_value_heads", num_heads),
            k_dim=k_dim,
            v_dim=fields.integer("linear_value_head_dim", 2 * k_dim),
            conv_size=fields.integer("linear_conv_kernel_dim", 4),
            layout="apart",
            beta_scale=2.0 if fields.flag("linear_allow_neg_eigval", True) else 1.0,
            norm_eps=GATED_NORM_EPS,
        )
    )


def _is_without_rope(fields: ConfigFields) -> bool:
    """Returns whether rope_theta is null, as in released checkpoints. transformers rotates if it is absent."""
    given = fields.raw.get("rope_parameters")
    return isinstance(given, Mapping) and "rope_theta" in given and given["rope_theta"] is None


NAMES = ModuleNames(
    older=(("input_layernorm", "attention_layer_norm"), ("post_attention_layernorm", "feedforward_layer_norm"))
)

OLMO_HYBRID = Family(
    "OlmoHybridForCausalLM",
    "OLMo Hybrid 7B",
    "gated delta rule in three of four layers, OLMo 2's attention without rotation in the others",
    _olmo_hybrid,
    {
        "vocab_size": 100352,
        "hidden_size": 3840,
        "num_attention_heads": 30,
        "intermediate_size": 11008,
        "eos_token_id": 100257,
    },
)
