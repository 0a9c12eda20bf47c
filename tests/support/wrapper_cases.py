"""Tiny models with a part for pictures, of which only texts are served."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from safetensors.torch import load_file, save_file

from family_cases import CASES, ROPE_PLAIN, SMALL
from tiny_models import FAMILIES, ROPE_YARN, load_base, tokenizer

PIXTRAL = {
    "model_type": "pixtral", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "head_dim": 8, "image_size": 28, "patch_size": 14,
}  # fmt: skip
QWEN_VISION = {
    "depth": 1, "hidden_size": 16, "embed_dim": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 4,
    "deepstack_visual_indexes": [0], "num_position_embeddings": 16,
}  # fmt: skip
MROPE = ROPE_PLAIN | {"mrope_section": [2, 1, 1]}
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
TEXT_ALONE = r".*language_model.*\.(q_proj|o_proj|down_proj|in_proj_qkv|out_proj)"
TEMPERATURE = {"original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.3}


@dataclass(frozen=True)
class WrapperCase:
    name: str  # transformers' class, without ForConditionalGeneration
    text: dict[str, Any]  # text_config beside SMALL's values
    vision: dict[str, Any] | None
    tied: bool = False
    others: dict[str, Any] = field(default_factory=dict)  # other values of the whole config

    @property
    def model_class(self) -> Any:
        return getattr(transformers, f"{self.name}ForConditionalGeneration")


WRAPPERS = {
    "mistral": WrapperCase("Mistral3", {"model_type": "mistral", "head_dim": 16, "sliding_window": None}, PIXTRAL),
    "mistral_tied": WrapperCase("Mistral3", {"model_type": "mistral", "sliding_window": None}, PIXTRAL, tied=True),
    "ministral3": WrapperCase(
        "Mistral3",
        {"model_type": "ministral3", "head_dim": 16, "rope_parameters": ROPE_YARN | TEMPERATURE},
        PIXTRAL,
        tied=True,
    ),
    "qwen2": WrapperCase("Qwen2VL", {"rope_parameters": MROPE}, QWEN_VISION | {"hidden_size": 32}, tied=True),
    "qwen2.5": WrapperCase("Qwen2_5_VL", {"rope_parameters": MROPE}, QWEN_VISION | {"out_hidden_size": 32}),
    "qwen3": WrapperCase(
        "Qwen3VL",
        {"rope_parameters": ROPE_PLAIN | {"mrope_section": [4, 2, 2]}, "head_dim": 16},
        QWEN_VISION | {"out_hidden_size": 32},
        tied=True,
    ),
    "gemma3": WrapperCase(
        "Gemma3",
        FAMILIES["gemma3"][1],
        VISION | {"image_size": 28, "patch_size": 14, "vision_use_head": False},
        tied=True,
        others={"mm_tokens_per_image": 4},
    ),
    "gemma4": WrapperCase(
        "Gemma4",
        CASES["gemma4_small"].options,
        VISION | {"num_key_value_heads": 2, "head_dim": 8, "patch_size": 4, "position_embedding_size": 16},
        tied=True,
        others={"audio_config": None},
    ),
    "gemma4_unified": WrapperCase(
        "Gemma4Unified", CASES["gemma4_dense"].options, None, tied=True, others={"audio_config": None}
    ),
    "llama4": WrapperCase(
        "Llama4",
        CASES["llama4"].options,
        VISION
        | {"image_size": 28, "patch_size": 14}
        | dict.fromkeys(("vision_output_dim", "projector_input_dim", "projector_output_dim"), 16),
    ),
    "qwen3_5": WrapperCase("Qwen3_5", CASES["qwen3_5"].options, QWEN_VISION | {"out_hidden_size": 32}),
    "qwen3_5_moe": WrapperCase("Qwen3_5Moe", CASES["qwen3_5_moe"].options, QWEN_VISION | {"out_hidden_size": 32}),
}


def make_wrapper(folder: Path, case: WrapperCase) -> Path:
    """Saves a random model of the case."""
    config = case.model_class.config_class(
        text_config=SMALL | case.text, vision_config=case.vision, tie_word_embeddings=case.tied, **case.others
    )
    torch.manual_seed(0)
    case.model_class(config).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def make_wrapper_adapter(folder: Path, base: Path, case: WrapperCase, targets: str = TEXT_ALONE, **options: Any) -> Any:
    """Saves an adapter on the modules that the regular expression matches, and returns PEFT's model."""
    model = load_base(base, case.model_class)
    torch.manual_seed(1)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=targets, **options))
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's own
        wrapped.save_pretrained(folder)
    return wrapped.eval()


def wrapped_text(text: Path, folder: Path, architecture: str) -> Path:
    """Copies a checkpoint of a text class to one of a wrapper, for classes whose part for pictures needs packages that
    tests do not have."""
    folder.mkdir()
    tensors = load_file(text / "model.safetensors")
    renamed = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    save_file(renamed, folder / "model.safetensors")
    config = {"architectures": [architecture], "text_config": json.loads((text / "config.json").read_text())}
    (folder / "config.json").write_text(json.dumps(config))
    return folder
