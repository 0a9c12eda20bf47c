"""Describes Hunyuan V1, dense or with a mixture. Its norms of q and k stand behind the rotation."""

from __future__ import annotations

from dataclasses import replace

from lorafleet.protocol.errors import UnsupportedModel
from lorafleet.workers.bases.experts_config import ExpertsConfig, SharedExpertConfig
from lorafleet.workers.bases.families.config_fields import ConfigFields
from lorafleet.workers.bases.families.family import Family
from lorafleet.workers.bases.layer_config import LayerConfig
from lorafleet.workers.bases.model_config import ModelConfig
from lorafleet.workers.bases.rope_config import RopeConfig

POSITIONS = 2048


def _hunyuan(fields: ConfigFields) -> ModelConfig:
    bias = fields.flag("attention_bias")
    attention = replace(
        fields.attention(_rope(fields)),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="head_after",
        qk_norm_names=("self_attn.query_layernorm", "self_attn.key_layernorm"),
    )
    return fields.model(fields.equal_layers(LayerConfig(attention, fields.mlp())), POSITIONS, eps=1e-5)


def _rope(fields: ConfigFields) -> RopeConfig:
    """Returns the rope of all layers. A scaling "dynamic" with an alpha does not depend on the length."""
    scaling = fields.raw.get("rope_parameters") or fields.raw.get("rope_scaling") or {}
    if scaling.get("rope_type", scaling.get("type")) != "dynamic" or not scaling.get("alpha"):
        return fields.rope(POSITIONS)
    theta = scaling.get("rope_theta") or fields.number("rope_theta", 10000.0)
    size = fields.head_dim()
    alpha = scaling["alpha"]
    return RopeConfig(size, theta * alpha ** (size / (size - 2)), fields.max_positions(POSITIONS), factor=alpha)


def _hunyuan_moe(fields: ConfigFields) -> ModelConfig:
    inner = fields.integer("intermediate_size", 11008)
    experts = ExpertsConfig(
        count=_of_all_layers(fields, "num_experts", 1),
        per_token=_of_all_layers(fields, "moe_topk", 1),
        intermediate_size=inner,
        sums_to_one=True,
        layers=frozenset(range(fields.num_layers)),
        router_float32=True,
        router_name="gate.wg",
        activation=fields.expert_activation(),
        shared=SharedExpertConfig(inner, "shared_mlp"),
    )
    for key, served in (("moe_intermediate_size", inner), ("num_shared_expert", 1)):
        if _of_all_layers(fields, key, served) != served:
            raise UnsupportedModel(f"{key} is supported only if it is {served} in all layers; transformers ignores it.")
    return replace(_hunyuan(fields), experts=experts)


def _of_all_layers(fields: ConfigFields, key: str, default: int) -> int:
    """Returns a positive integer. config.json may list one for each layer, if they are equal."""
    given = fields.raw.get(key)
    if isinstance(given, list):
        if len(set(given)) != 1:
            raise UnsupportedModel(f"{key}={given} is not supported; only equal numbers for all layers are.")
        return ConfigFields({key: given[0]}, {}).integer(key, default)
    return fields.integer(key, default)


_DEFAULTS = {"vocab_size": 290943, "max_position_embeddings": POSITIONS, "eos_token_id": 2}

HUNYUAN = Family(
    "HunYuanDenseV1ForCausalLM",
    "Hunyuan 0.5B to 7B",
    "norms of q and k behind the rotation",
    _hunyuan,
    _DEFAULTS,
)
HUNYUAN_MOE = Family(
    "HunYuanMoEV1ForCausalLM",
    "Hunyuan A13B",
    "as Hunyuan, with a mixture and a shared expert in every layer",
    _hunyuan_moe,
    _DEFAULTS,
)
