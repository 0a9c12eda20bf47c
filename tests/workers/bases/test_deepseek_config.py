"""The config.json of releases with latent attention, as they are on the hub and as transformers 5 writes them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers

from lorafleet.kernels.moe.routing_rule import ExpertGroups
from lorafleet.protocol.errors import UnsupportedModel
from lorafleet.workers.bases.checkpoint import read_model_config
from lorafleet.workers.bases.layer_config import LatentAttentionConfig
from lorafleet.workers.bases.model_config import ModelConfig

YARN = {
    "type": "yarn",
    "factor": 40,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}
V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "attention_bias": False,
    "eos_token_id": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": YARN,
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
V2_LITE = V3 | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_group": 1,
    "topk_method": "greedy",
}
GLM = V3 | {
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "model_type": "glm4_moe_lite",
    "first_k_dense_replace": 1,
    "n_group": 1,
    "num_attention_heads": 20,
    "num_hidden_layers": 47,
    "num_key_value_heads": 20,
    "partial_rotary_factor": 1.0,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "topk_group": 1,
    "v_head_dim": 256,
}

# Kimi K2 is published under DeepSeek's architecture. Its model_type and auto_map lead to code that is never run.
KIMI_K2 = V3 | {
    "model_type": "kimi_k2",
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "first_k_dense_replace": 1,
    "n_group": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "rope_scaling": YARN | {"factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0},
    "routed_scaling_factor": 2.827,
    "topk_group": 1,
    "vocab_size": 163840,
}


def read(folder: Path, raw: dict[str, Any]) -> ModelConfig:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    return read_model_config(folder)


@pytest.mark.parametrize("raw", [V3, V2_LITE, GLM], ids=["v3", "v2-lite", "glm-4.7-flash"])
def test_both_spellings_describe_one_model(tmp_path: Path, raw: dict[str, Any]) -> None:
    hub = read(tmp_path / "hub", raw)
    transformers.AutoConfig.for_model(**raw).save_pretrained(tmp_path / "saved")
    assert "rope_scaling" not in json.loads((tmp_path / "saved" / "config.json").read_text())
    assert read_model_config(tmp_path / "saved") == hub


def test_deepseek_v3_is_read_as_released(tmp_path: Path) -> None:
    config = read(tmp_path / "v3", V3)
    attention, experts = config.layers[0].attention, config.experts
    assert isinstance(attention, LatentAttentionConfig) and experts is not None
    assert attention.scale == pytest.approx(192**-0.5 * (0.1 * math.log(40) + 1) ** 2)
    assert attention.cached_dim == 576 and attention.rope.is_interleaved and attention.rope.rotary_dim == 64
    assert experts.layers == frozenset(range(3, 61))
    assert experts.groups == ExpertGroups(8, 4, "top_two")
    assert len(config.mtp_names) == 1 and config.context_limit == 163840


def test_kimi_k2_is_read_under_both_names_of_its_architecture(tmp_path: Path) -> None:
    published = read(tmp_path / "published", KIMI_K2)
    named = read(tmp_path / "named", KIMI_K2 | {"architectures": ["KimiK2ForCausalLM"]})
    assert replace(named, architecture=published.architecture) == published
    assert published.experts is not None and published.experts.groups is None
    assert published.experts.layers == frozenset(range(1, 61)) and published.mtp_names == ()


def test_what_no_release_has_is_refused(tmp_path: Path) -> None:
    for raw, name in (
        (V3 | {"scoring_func": "softmax"}, "scoring_func"),
        (V3 | {"moe_layer_freq": 2}, "moe_layer_freq"),
        (V3 | {"num_key_value_heads": 8}, "num_key_value_heads"),
        (V2_LITE | {"norm_topk_prob": True}, "norm_topk_prob"),
        (V2_LITE | {"topk_method": "noaux_tc"}, "topk_method"),
        (GLM | {"mlp_layer_types": ["dense"] * 46 + ["other"]}, "mlp_layer_types"),
    ):
        with pytest.raises(UnsupportedModel, match=name):
            read(tmp_path / "refused", raw)
