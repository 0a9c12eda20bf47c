"""Tiny models of architectures that run as transformers' own modules."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import transformers

from tiny_models import COMMON, tokenizer

GENERIC_SMALL = COMMON | {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
}
GENERIC_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "olmo2": ("Olmo2ForCausalLM", {}),  # norms behind the branches, and of whole projections
    "granite": (
        "GraniteForCausalLM",
        {"embedding_multiplier": 3.0, "residual_multiplier": 0.6, "attention_multiplier": 0.2, "logits_scaling": 2.5},
    ),
    "cohere2": (
        "Cohere2ForCausalLM",
        {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"], "logit_scale": 0.4},
    ),
    "starcoder2": ("Starcoder2ForCausalLM", {"use_bias": True, "sliding_window": 12}),
    "phi": ("PhiForCausalLM", {"partial_rotary_factor": 0.5}),  # biases everywhere, the head's too
    "smollm3": ("SmolLM3ForCausalLM", {"no_rope_layers": [1, 0]}),
    "stablelm": ("StableLmForCausalLM", {"use_qkv_bias": True}),
    "gpt_neox": ("GPTNeoXForCausalLM", {}),  # one linear for q, k and v, and names of its own
    "olmoe": ("OlmoeForCausalLM", {"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64}),
}


@dataclass(frozen=True)
class GenericJob:
    """One model for ranks to compute."""

    base: Path
    adapter: Path
    fully_sharded: bool = False
    quantization: Literal["int4"] | None = None


def make_generic(folder: Path, name: str, **changes: Any) -> Path:
    """Saves a random model of the case, in which norms and biases matter."""
    class_name, options = GENERIC_CASES[name]
    model_class = getattr(transformers, class_name)
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**(GENERIC_SMALL | options | changes)))
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("bias") or "norm" in parameter_name:
            torch.nn.init.normal_(parameter, mean=0.0 if parameter_name.endswith("bias") else 1.0, std=0.1)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder
