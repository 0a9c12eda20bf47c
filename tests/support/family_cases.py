"""Tiny models of the families that a description alone adds, which tests compare with transformers and PEFT.

A case has every kind of layer of its family. Each costs about a second in tests/api/routes/test_all_families.py and
another in tests/workers/tp/test_families.py, so that one or two cases a family must do.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from tiny_models import COMMON, ROPE_LLAMA3, ROPE_YARN, load_base, tokenizer

SMALL = COMMON | {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48}

GPT_OSS_ROPE = ROPE_YARN | {"rope_theta": 150000.0, "factor": 4.0, "truncate": False}
HUNYUAN_ROPE = {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 20.0, "factor": 1.0}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EXPERTS = ("experts.gate_up_proj", "experts.down_proj")
ROPE_PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
GRANITE4 = {
    "layer_types": ["full_attention"] * 2,
    "num_local_experts": 0,
    "mamba_n_heads": 4,
    "shared_intermediate_size": 48,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.3,
    "attention_multiplier": 0.2,
}


@dataclass(frozen=True)
class FamilyCase:
    name: str  # transformers' class, without ForCausalLM
    options: dict[str, Any] = field(default_factory=dict)  # config values beside SMALL's
    targets: Any = "all-linear"  # PEFT's target_modules
    suffix: str = "ForCausalLM"
    parameters: tuple[str, ...] = ()  # PEFT's target_parameters of the adapter that is no DoRA
    dora_targets: Any = None  # target_modules of the DoRA adapter, if they are others


# Latent attention, a dense layer, and a mixture of experts.
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
}
DELTA_NET: dict[str, Any] = {
    "head_dim": 16,
    "partial_rotary_factor": 0.5,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
}
SHARED_EXPERT = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
}
MAMBA: dict[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 2,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}
NEMOTRON_H: dict[str, Any] = {
    "head_dim": 8,
    "num_hidden_layers": 5,
    "mamba_num_heads": 4,
    "mamba_head_dim": 12,
    "ssm_state_size": 8,
    "n_groups": 2,
    "chunk_size": 8,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "moe_shared_expert_intermediate_size": 24,
    "routed_scaling_factor": 1.5,
    "n_group": 2,
}
# PEFT refuses out_proj of the models whose type says Mamba.
NEMOTRON_TARGETS = [*ATTENTION, "in_proj", "up_proj", "down_proj"]
LFM2: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": ["conv", "full_attention", "conv"],
    "block_auto_adjust_ff_dim": False,
}
LATENT_TARGETS = ["q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
LATENT_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}

CASES: dict[str, FamilyCase] = {
    "olmo2": FamilyCase("Olmo2"),
    "olmo3": FamilyCase(
        "Olmo3",
        {
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": ROPE_YARN | {"attention_factor": 1.2},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
            },
        },
    ),
    "exaone4": FamilyCase(
        "Exaone4", {"sliding_window": 8, "sliding_window_pattern": 2, "rope_parameters": ROPE_LLAMA3}
    ),
    "exaone4_full": FamilyCase(
        "Exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2, "tie_word_embeddings": True}
    ),
    "smollm3": FamilyCase("SmolLM3", {"no_rope_layer_interval": 2}),
    "seed_oss": FamilyCase("SeedOss", {"head_dim": 16}),
    "arcee": FamilyCase("Arcee", {"rope_parameters": ROPE_YARN}),
    "apertus": FamilyCase("Apertus"),
    "phi": FamilyCase("Phi", {"rope_parameters": ROPE_PLAIN | {"partial_rotary_factor": 0.75}}),
    "granite4": FamilyCase(
        "GraniteMoeHybrid",
        GRANITE4 | {"position_embedding_type": "rope", "tie_word_embeddings": True, "logits_scaling": 2.0},
    ),
    "granite4_nope": FamilyCase("GraniteMoeHybrid", GRANITE4),
    "ministral": FamilyCase(
        "Ministral", {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 16}
    ),
    "ministral3": FamilyCase(
        "Ministral3",
        {
            "head_dim": 16,
            "tie_word_embeddings": True,
            "rope_parameters": ROPE_YARN
            | {
                "original_max_position_embeddings": 16,
                "llama_4_scaling_beta": 0.3,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
        },
    ),
    "helium": FamilyCase("Helium", {"head_dim": 8, "mlp_bias": True}),
    "stablelm": FamilyCase("StableLm", {"use_qkv_bias": True}),
    "stablelm_parallel": FamilyCase("StableLm", {"use_parallel_residual": True, "tie_word_embeddings": True}),
    "nemotron": FamilyCase("Nemotron"),
    "olmo": FamilyCase("Olmo"),
    "cohere": FamilyCase("Cohere", {"logit_scale": 0.5}),
    "gemma": FamilyCase("Gemma", {"head_dim": 16, "hidden_act": "gelu"}),
    "granite": FamilyCase(
        "Granite",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.3,
            "attention_multiplier": 0.2,
            "logits_scaling": 2.0,
            "tie_word_embeddings": True,
        },
    ),
    "starcoder2": FamilyCase("Starcoder2", {"sliding_window": 8, "hidden_act": "gelu_pytorch_tanh"}),
    "cohere2": FamilyCase(
        "Cohere2", {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"], "logit_scale": 0.5}
    ),
    "gpt_oss": FamilyCase(
        "GptOss",
        {
            "head_dim": 16,
            "sliding_window": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": GPT_OSS_ROPE,
        },
        parameters=(*EXPERTS, "router.weight"),
    ),
    "glm": FamilyCase("Glm", {"head_dim": 16, "attention_bias": True}),
    "glm4": FamilyCase("Glm4", {"head_dim": 16, "attention_bias": True}),
    "glm4_moe": FamilyCase(
        "Glm4Moe",
        {
            "head_dim": 16,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "moe_intermediate_size": 24,
            "routed_scaling_factor": 1.5,
            "use_qk_norm": True,
            "attention_bias": True,
            "num_mtp_layers": 0,
        },
        dora_targets=ATTENTION,
    ),
    "llama4": FamilyCase(
        "Llama4",
        {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "intermediate_size": 24,
            "intermediate_size_mlp": 48,
            "num_local_experts": 4,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 8,
            "floor_scale": 8,
            "no_rope_layers": [1, 0, 1, 1],
            "rope_parameters": ROPE_LLAMA3 | {"high_freq_factor": 1.0},
        },
        targets=[*ATTENTION, "gate_proj", "up_proj", "down_proj"],
        parameters=EXPERTS,
    ),
    "qwen2_moe": FamilyCase(
        "Qwen2Moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
            "mlp_only_layers": [1],
            "use_sliding_window": True,
            "sliding_window": 8,
        },
        parameters=(*EXPERTS, "gate.weight"),
        dora_targets=ATTENTION,
    ),
    "granite_moe": FamilyCase(
        "GraniteMoeShared",
        {
            "num_local_experts": 4,
            "shared_intermediate_size": 40,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.3,
            "attention_multiplier": 0.2,
            "logits_scaling": 2.0,
        },
        parameters=(*EXPERTS, "router.weight"),
    ),
    "olmoe": FamilyCase("Olmoe", {"num_experts": 6, "num_experts_per_tok": 2}, dora_targets=ATTENTION),
    "ernie_moe": FamilyCase(
        "Ernie4_5_Moe",
        {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 24, "moe_num_shared_experts": 2},
        dora_targets=ATTENTION,
    ),
    "phimoe": FamilyCase(
        "Phimoe",
        {
            "num_local_experts": 6,
            "router_jitter_noise": 0.3,
            "attention_bias": True,
            "lm_head_bias": True,
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0, 1.2, 1.5, 3.0],
                "long_factor": [1.0, 2.0, 4.0, 8.0],
                "short_mscale": 1.2,
                "long_mscale": 1.2,
                "original_max_position_embeddings": 64,
            },
        },
        ATTENTION,
        parameters=EXPERTS,
    ),
    "hunyuan": FamilyCase("HunYuanDenseV1", {"head_dim": 16, "rope_parameters": HUNYUAN_ROPE}),
    "hunyuan_moe": FamilyCase(
        "HunYuanMoEV1",
        {"head_dim": 16, "num_experts": 6, "moe_topk": 2, "rope_parameters": HUNYUAN_ROPE},
        dora_targets=ATTENTION,
    ),
    "minimax_m2": FamilyCase(
        "MiniMaxM2",
        {
            "head_dim": 16,
            "rotary_dim": 8,
            "partial_rotary_factor": 0.5,  # Checkpoints have rotary_dim alone, which transformers 5.17 does not read.
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
        },
        dora_targets=ATTENTION,
    ),
    "deepseek_v2": FamilyCase(
        "DeepseekV2",
        LATENT | {"q_lora_rank": None, "topk_method": "group_limited_greedy", "rope_parameters": LATENT_YARN},
        LATENT_TARGETS,
    ),
    "deepseek_v3": FamilyCase(
        "DeepseekV3", LATENT | {"attention_bias": True, "rope_parameters": LATENT_YARN}, LATENT_TARGETS
    ),
    "glm4_moe_lite": FamilyCase(
        "Glm4MoeLite", LATENT | {"n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-3}, LATENT_TARGETS
    ),
    "qwen3_5": FamilyCase("Qwen3_5", DELTA_NET),
    "qwen3_5_moe": FamilyCase("Qwen3_5Moe", DELTA_NET | SHARED_EXPERT),
    "qwen3_next": FamilyCase(
        "Qwen3Next",
        DELTA_NET | SHARED_EXPERT,
        dora_targets=[*ATTENTION, "in_proj_qkvz", "in_proj_ba", "out_proj"],
    ),
}

CASES |= {
    "nemotron_h": FamilyCase(
        "NemotronH",
        NEMOTRON_H | {"hybrid_override_pattern": "M-M*E", "use_bias": True},
        NEMOTRON_TARGETS,
        parameters=("experts.up_proj", "experts.down_proj", "gate.weight"),
    ),
    "nemotron_h_latent": FamilyCase(
        "NemotronH",
        NEMOTRON_H | {"hybrid_override_pattern": "*EME-", "moe_latent_size": 16, "n_groups": 1},
        [*NEMOTRON_TARGETS, "fc1_latent_proj", "fc2_latent_proj"],
        parameters=("experts.up_proj", "experts.down_proj"),
    ),
    "granite4_hybrid": FamilyCase(
        "GraniteMoeHybrid",
        GRANITE4
        | MAMBA
        | {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
        | {"mamba_n_groups": 1},
    ),
    "granite4_hybrid_experts": FamilyCase(
        "GraniteMoeHybrid",
        GRANITE4 | MAMBA | {"layer_types": ["linear_attention", "full_attention"], "num_local_experts": 4},
        parameters=(*EXPERTS, "router.weight"),
        dora_targets=[*ATTENTION, "in_proj", "out_proj", "input_linear", "output_linear"],
    ),
    "bamba": FamilyCase(
        "Bamba",
        MAMBA
        | {"num_hidden_layers": 3, "attn_layer_indices": [1], "mamba_proj_bias": True}
        | {"tie_word_embeddings": True},
    ),
    "falcon_h1": FamilyCase(
        "FalconH1",
        MAMBA
        | {"mamba_d_ssm": 48, "mamba_d_head": 12, "mamba_rms_norm": True, "head_dim": 12, "projectors_bias": True}
        | {"embedding_multiplier": 3.0, "lm_head_multiplier": 0.5, "key_multiplier": 0.7}
        | {"attention_in_multiplier": 1.2, "attention_out_multiplier": 0.8, "mlp_multipliers": [1.3, 0.6]}
        | {"ssm_in_multiplier": 1.4, "ssm_out_multiplier": 0.9, "ssm_multipliers": [0.8, 1.2, 1.5, 0.7, 1.1]},
        [*ATTENTION, "in_proj", "gate_proj", "up_proj", "down_proj"],
    ),
    "falcon_h1_ungrouped": FamilyCase(
        "FalconH1",
        MAMBA | {"mamba_d_ssm": 64, "mamba_n_groups": 1, "mamba_rms_norm": False},
        [*ATTENTION, "in_proj", "gate_proj", "up_proj", "down_proj"],
    ),
    "lfm2": FamilyCase("Lfm2", LFM2 | {"conv_bias": True}),
    "lfm2_moe": FamilyCase(
        "Lfm2Moe",
        LFM2 | {"num_dense_layers": 1, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20},
        parameters=(*EXPERTS, "gate.weight"),
        dora_targets=["q_proj", "k_proj", "v_proj", "in_proj", "out_proj", "w1", "w2", "w3"],
    ),
}
# transformers saves the convolutions of queries, keys and values in equal parts, so these have equal sizes.
OLMO_HYBRID = DELTA_NET | {"head_dim": 8, "partial_rotary_factor": 1.0, "linear_key_head_dim": 32}
CASES |= {
    "olmo_hybrid": FamilyCase(
        "OlmoHybrid", OLMO_HYBRID | {"rope_parameters": {"rope_type": "default", "rope_theta": None}}
    ),
    "olmo_hybrid_rotated": FamilyCase(
        "OlmoHybrid", OLMO_HYBRID | {"linear_allow_neg_eigval": False, "rope_parameters": ROPE_PLAIN}
    ),
}
GEMMA4 = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 8,
    "head_dim": 8,
    "global_head_dim": 16,
    "num_global_key_value_heads": 1,
    "final_logit_softcapping": 3.0,
    "hidden_size_per_layer_input": 0,
}
CASES |= {
    "gemma3n": FamilyCase(
        "Gemma3n",
        {
            "num_hidden_layers": 4,
            "intermediate_size": [48, 40, 48, 56],
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "sliding_window": 8,
            "head_dim": 8,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 12,
            "vocab_size_per_layer_input": 300,  # of 320 tokens
            "activation_sparsity_pattern": [0.9, 0.6, 0.0, 0.0],
            "altup_num_inputs": 3,
            "laurel_rank": 6,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma4_dense": FamilyCase("Gemma4", GEMMA4 | {"attention_k_eq_v": True}),
    "gemma4_small": FamilyCase(
        "Gemma4",
        GEMMA4
        | {
            "hidden_size_per_layer_input": 12,
            "vocab_size_per_layer_input": 320,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
        },
    ),
    "gemma4_experts": FamilyCase(
        "Gemma4",
        GEMMA4
        | {
            "attention_k_eq_v": True,
            "num_hidden_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"],
            "enable_moe_block": True,
            "num_experts": 5,
            "top_k_experts": 2,
            "moe_intermediate_size": 24,
        },
    ),
}


def make_case(folder: Path, case: FamilyCase) -> Path:
    """Saves a random model of the case, in which every weight matters."""
    model_class = getattr(transformers, case.name + case.suffix)
    config = model_class.config_class(**(SMALL | case.options))
    torch.manual_seed(0)
    model = model_class(config)
    for name, tensor in model.state_dict().items():
        if tensor.ndim == 1 or name.endswith("bias"):
            torch.nn.init.normal_(tensor, mean=0.0 if name.endswith("bias") else 1.0, std=0.1)
        if name.endswith("layer_scalar"):
            torch.nn.init.normal_(tensor, mean=1.0, std=0.3)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def make_case_adapter(folder: Path, model: Path, case: FamilyCase, **options: Any) -> Path:
    """Saves a PEFT adapter on the case's targets, with random numbers."""
    import peft

    base = load_base(model, getattr(transformers, case.name + case.suffix))
    torch.manual_seed(1)
    settings: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": case.targets} | options
    if not settings.get("use_dora"):
        settings["target_parameters"] = list(case.parameters) or None
    elif case.dora_targets is not None:
        settings["target_modules"] = case.dora_targets
    wrapped = peft.get_peft_model(base, peft.LoraConfig(**settings))
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name and "magnitude" not in name:
            torch.nn.init.normal_(parameter, std=0.15)
    wrapped.save_pretrained(folder)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": model.name}))
    (folder / "README.md").unlink(missing_ok=True)
    return folder


def make_adapter_of_matrices(folder: Path, base: Path, changed: Path) -> Path:
    """Saves an adapter with LoRA on every matrix of the layers, named as in the checkpoint, which is how PEFT named
    modules under transformers 4. `changed` gets the checkpoint with s * B * A added to each."""
    generator = torch.Generator().manual_seed(2)
    tensors, adapter = load_file(base / "model.safetensors"), {}
    for name, weight in tensors.items():
        if weight.ndim != 2 or not name.endswith(".weight") or ".layers." not in name:
            continue
        a_RD = 0.15 * torch.randn(4, weight.shape[1], generator=generator)
        b_OR = 0.15 * torch.randn(weight.shape[0], 4, generator=generator)
        module = f"base_model.model.{name.removesuffix('.weight')}"
        adapter |= {f"{module}.lora_A.weight": a_RD, f"{module}.lora_B.weight": b_OR}
        tensors[name] = weight + 2.0 * b_OR @ a_RD
    folder.mkdir()
    save_file(adapter, folder / "adapter_model.safetensors")
    modules = sorted({name.split(".lora_")[0].removeprefix("base_model.model.") for name in adapter})
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": modules}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    shutil.copytree(base, changed)
    save_file(tensors, changed / "model.safetensors", {"format": "pt"})
    return folder
