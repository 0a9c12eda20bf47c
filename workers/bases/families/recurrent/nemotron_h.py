"""Describes Nemotron-H, Nemotron Nano 2 and Nemotron 3: each layer is a Mamba-2 state space, attention without
rotation, an MLP without a gate, or a mixture of such MLPs, behind one norm."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lorafleet.kernels.moe.routing_rule import ExpertGroups
from lorafleet.protocol.errors import ConfigError, UnsupportedModel
from lorafleet.workers.bases.experts_config import ExpertsConfig, SharedExpertConfig
from lorafleet.workers.bases.families.config_fields import ConfigFields
from lorafleet.workers.bases.families.family import Family
from lorafleet.workers.bases.families.recurrent.mamba_fields import (
    ATTENTION,
    OLDER_KINDS,
    RECURRENT,
    checked_mamba,
    require_attention,
)
from lorafleet.workers.bases.layer_config import AttentionConfig, LayerConfig, LayerNorms, MLPConfig
from lorafleet.workers.bases.model_config import ModelConfig
from lorafleet.workers.bases.module_names import ModuleNames
from lorafleet.workers.bases.recurrence_config import Mamba2Config

POSITIONS = 4096
_MLP, _MOE = "mlp", "moe"
_BY_LETTER = {"M": RECURRENT, "*": ATTENTION, "-": _MLP, "E": _MOE}  # in hybrid_override_pattern
_NORM = LayerNorms("norm", before_mlp=None)
_LEAVES = {
    "self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mamba": ("in_proj", "out_proj", "conv1d", "norm", "A_log", "dt_bias", "D"),
    "mlp": ("up_proj", "down_proj", "gate", "experts", "shared_experts", "fc1_latent_proj", "fc2_latent_proj"),
}
NAMES = ModuleNames(
    root="backbone.",
    embedding="embeddings",
    newest=tuple((f"{ours}.{leaf}", f"mixer.{leaf}") for ours, leaves in _LEAVES.items() for leaf in leaves),
)


def _nemotron_h(fields: ConfigFields) -> ModelConfig:
    kinds = _kinds(fields)
    fields.raw["num_hidden_layers"] = len(kinds)
    if fields.raw.get("mlp_hidden_act", "relu2") != "relu2":
        raise UnsupportedModel(f"mlp_hidden_act={fields.raw['mlp_hidden_act']!r} is not supported; only relu2 is.")
    fields.refuse("sliding_window")
    mixers: dict[str, AttentionConfig | Mamba2Config] = {RECURRENT: _mamba(fields), ATTENTION: _attention(fields)}
    mlp = MLPConfig(fields.integer("intermediate_size", 21504), "relu2", fields.flag("mlp_bias"), gate_name=None)
    layers = tuple(LayerConfig(mixers.get(kind), mlp if kind == _MLP else None, _NORM) for kind in kinds)
    sparse = frozenset(i for i, kind in enumerate(kinds) if kind == _MOE)
    return replace(
        fields.model(layers, POSITIONS, eps=1e-5, eps_key="layer_norm_epsilon"),
        experts=_experts(fields, sparse) if sparse else None,
        final_norm="norm_f",
        names=NAMES,
        mtp_names=("mtp.",),
    )


def _kinds(fields: ConfigFields) -> list[str]:
    """Returns the kind of each layer, from any of the three keys that releases have."""
    given, pattern = fields.raw.get("layers_block_type"), fields.raw.get("hybrid_override_pattern")
    given = fields.raw.get("layer_types") if given is None else given
    if given is None and isinstance(pattern, str):
        given = [_BY_LETTER.get(letter, letter) for letter in pattern]
    if not isinstance(given, list) or not given:
        raise ConfigError("config.json lacks layers_block_type and hybrid_override_pattern, of which one is needed.")
    kinds = [OLDER_KINDS.get(kind, kind) for kind in given]
    if unknown := set(kinds) - set(_BY_LETTER.values()):
        raise UnsupportedModel(f"layers of the kinds {sorted(map(str, unknown))} are not supported.")
    require_attention(kinds)
    return kinds


def _attention(fields: ConfigFields) -> AttentionConfig:
    fields.refuse("attention_bias", False)
    return fields.attention(None, kv_heads=8, head_dim=128)


def _mamba(fields: ConfigFields) -> Mamba2Config:
    if fields.raw.get("mamba_hidden_act", "silu") != "silu":
        raise UnsupportedModel(f"mamba_hidden_act={fields.raw['mamba_hidden_act']!r} is not supported; only silu is.")
    bias = fields.flag("use_bias")
    return checked_mamba(
        Mamba2Config(
            num_heads=fields.integer("mamba_num_heads", 128),
            head_dim=fields.integer("mamba_head_dim", 64),
            num_groups=fields.integer("n_groups", 8),
            state_size=fields.integer("ssm_state_size", 128),
            conv_size=fields.integer("conv_kernel", 4),
            conv_bias=fields.flag("use_conv_bias", True),
            in_bias=bias,
            out_bias=bias,
            dt_limits=(fields.number("time_step_min", 0.001), math.inf),
        )
    )


def _experts(fields: ConfigFields, layers: frozenset[int]) -> ExpertsConfig:
    fields.refuse("mlp_bias", False)
    count, per_token = fields.integer("n_group", 1), fields.integer("topk_group", 1)
    latent = fields.raw.get("moe_latent_size")
    return ExpertsConfig(
        count=fields.integer("n_routed_experts", 8),
        per_token=fields.integer("num_experts_per_tok", 2),
        intermediate_size=fields.integer("moe_intermediate_size", 7688),
        sums_to_one=fields.flag("norm_topk_prob", True),
        layers=layers,
        scores="sigmoid",
        groups=None if count == per_token else ExpertGroups(count, per_token, "top_two"),
        scaling=fields.number("routed_scaling_factor", 1.0),
        correction_name="gate.e_score_correction_bias",
        router_float32=True,
        activation="relu2",
        latent_size=None if latent is None else fields.integer("moe_latent_size", 1024),
        shared=SharedExpertConfig(fields.integer("moe_shared_expert_intermediate_size", 7688)),
    )


_DEFAULTS: Mapping[str, Any] = {"vocab_size": 131072, "eos_token_id": 2, "num_key_value_heads": 8}

NEMOTRON_H = Family(
    "NemotronHForCausalLM",
    "Nemotron-H, Nemotron Nano 2, Nemotron 3 Nano and Super",
    "layers of one kind each: a Mamba-2 state space, attention without rotation, an MLP, or a mixture of experts, "
    "which may read latent vectors",
    _nemotron_h,
    _DEFAULTS,
)
