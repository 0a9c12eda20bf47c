"""Configs of mixtures: as published by transformers 4, as transformers 5 writes them, and with defaults alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from lorafleet.protocol.errors import UnsupportedModel
from lorafleet.workers.bases.checkpoint import read_model_config
from lorafleet.workers.bases.model_config import ModelConfig

SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
}
# The keys of published checkpoints' config.json, with small sizes.
PUBLISHED: dict[str, dict[str, Any]] = {
    "GptOssForCausalLM": {
        "model_type": "gpt_oss",
        "head_dim": 16,
        "attention_bias": True,
        "experts_per_token": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 128,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "sliding_window": 16,
        "swiglu_limit": 7.0,
        "eos_token_id": 20,
    },
    "Glm4ForCausalLM": {
        "model_type": "glm4",
        "head_dim": 16,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
        "rope_theta": 10000.0,
        "eos_token_id": [1, 2],
    },
    "Glm4MoeForCausalLM": {
        "model_type": "glm4_moe",
        "head_dim": 16,
        "attention_bias": True,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 24,
        "n_group": 1,
        "topk_group": 1,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 2,
        "num_nextn_predict_layers": 1,
        "partial_rotary_factor": 0.5,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "routed_scaling_factor": 2.5,
        "use_qk_norm": True,
        "eos_token_id": 1,
    },
    "Llama4ForCausalLM": {
        "model_type": "llama4_text",
        "head_dim": 16,
        "intermediate_size_mlp": 128,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2,
        "no_rope_layers": [],
        "attention_chunk_size": 16,
        "attn_temperature_tuning": True,
        "floor_scale": 64,
        "attn_scale": 0.1,
        "use_qk_norm": True,
        "rope_scaling": {
            "factor": 16.0,
            "high_freq_factor": 1.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 64,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "eos_token_id": [1, 2],
    },
    "Qwen2MoeForCausalLM": {
        "model_type": "qwen2_moe",
        "decoder_sparse_step": 1,
        "max_window_layers": 2,
        "use_sliding_window": True,
        "sliding_window": 32,
        "moe_intermediate_size": 24,
        "num_experts": 8,
        "num_experts_per_tok": 4,
        "norm_topk_prob": False,
        "shared_expert_intermediate_size": 48,
        "rope_theta": 1000000.0,
        "eos_token_id": 1,
    },
    "GraniteMoeForCausalLM": {
        "model_type": "granitemoe",
        "attention_multiplier": 0.015625,
        "embedding_multiplier": 12.0,
        "logits_scaling": 6.0,
        "residual_multiplier": 0.22,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "eos_token_id": 0,
    },
    "OlmoeForCausalLM": {
        "model_type": "olmoe",
        "clip_qkv": None,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": False,
        "rope_theta": 10000.0,
        "eos_token_id": 1,
    },
    "Ernie4_5_MoeForCausalLM": {
        "model_type": "ernie4_5_moe",
        "moe_intermediate_size": 24,
        "moe_k": 2,
        "moe_layer_end_index": 3,
        "moe_layer_interval": 1,
        "moe_layer_start_index": 1,
        "moe_num_experts": 8,
        "moe_num_shared_experts": 2,
        "rope_theta": 500000.0,
        "use_bias": False,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
    },
    "HunYuanDenseV1ForCausalLM": {
        "model_type": "hunyuan_v1_dense",
        "head_dim": 16,
        "attention_bias": False,
        "rope_scaling": {"alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "type": "dynamic"},
        "rope_theta": 10000.0,
        "use_qk_norm": True,
        "eos_token_id": 2,
    },
    "HunYuanMoEV1ForCausalLM": {
        "model_type": "hunyuan_v1_moe",
        "head_dim": 16,
        "moe_intermediate_size": [96] * 4,
        "moe_topk": [2] * 4,
        "num_experts": 8,
        "num_shared_expert": [1] * 4,
        "rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"},
        "rope_theta": 10000.0,
        "use_mixed_mlp_moe": True,
        "eos_token_id": 2,
    },
    "MiniMaxM2ForCausalLM": {
        "model_type": "minimax_m2",
        "head_dim": 16,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "qk_norm_type": "per_layer",
        "rope_theta": 5000000,
        "rotary_dim": 8,
        "scoring_func": "sigmoid",
        "use_qk_norm": True,
        "eos_token_id": 1,
    },
}
ARCHITECTURES = [*PUBLISHED, "GlmForCausalLM", "GraniteMoeSharedForCausalLM"]


def described(folder: Path, config: dict[str, Any]) -> ModelConfig:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return read_model_config(folder)


def rewritten(config: transformers.PretrainedConfig, folder: Path, architecture: str) -> ModelConfig:
    config.architectures = [architecture]
    config.save_pretrained(folder)
    return read_model_config(folder)


@pytest.mark.parametrize("architecture", PUBLISHED)
def test_transformers_5_writes_what_was_published(architecture: str, tmp_path: Path) -> None:
    config = SIZES | {"architectures": [architecture]} | PUBLISHED[architecture]
    published = described(tmp_path / "published", config)
    config_class = getattr(transformers, architecture).config_class
    assert rewritten(config_class.from_dict(config), tmp_path / "new", architecture) == published


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_is_left_out_has_the_defaults_of_transformers(architecture: str, tmp_path: Path) -> None:
    config = getattr(transformers, architecture).config_class(head_dim=128)
    found = described(tmp_path / "bare", {"architectures": [architecture], "head_dim": 128})
    assert rewritten(config, tmp_path / "whole", architecture) == found


def test_llama_4_with_pictures_has_its_text_part(tmp_path: Path) -> None:
    text = SIZES | PUBLISHED["Llama4ForCausalLM"]
    alone = described(tmp_path / "alone", text | {"architectures": ["Llama4ForCausalLM"]})
    wrapper = {"architectures": ["Llama4ForConditionalGeneration"], "torch_dtype": "bfloat16"}
    inside = described(tmp_path / "inside", wrapper | {"text_config": text})
    assert inside.is_text_part
    assert (inside.layers, inside.experts, inside.names) == (alone.layers, alone.experts, alone.names)


@pytest.mark.parametrize(
    ("architecture", "options", "message"),
    [
        ("OlmoeForCausalLM", {"clip_qkv": 8.0}, "clip_qkv=8.0"),
        ("HunYuanMoEV1ForCausalLM", {"moe_topk": [1, 2, 2, 2]}, "moe_topk="),
        ("HunYuanMoEV1ForCausalLM", {"moe_intermediate_size": 24}, "moe_intermediate_size"),
        ("Ernie4_5_MoeForCausalLM", {"use_bias": True}, "use_bias=True"),
        ("Glm4MoeForCausalLM", {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported for experts"),
        ("OlmoeForCausalLM", {"quantization_config": {"quant_method": "hqq"}}, "hqq"),
    ],
)
def test_what_is_not_served_is_named(architecture: str, options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        described(tmp_path / "a", SIZES | {"architectures": [architecture]} | PUBLISHED[architecture] | options)
