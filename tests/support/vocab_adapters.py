"""Makes adapters of embedding and head with PEFT itself, and computes PEFT's own answer."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import peft
import torch
from transformers import PreTrainedTokenizerFast

from tiny_models import load_base

NUM_ADDED = 13
# Maps a name to options of LoraConfig, and to whether the vocabulary is resized first.
VOCAB_ADAPTERS: dict[str, tuple[dict[str, Any], bool]] = {
    "embedding_lora": ({"target_modules": ["q_proj", "embed_tokens"]}, False),
    "head_lora": ({"target_modules": ["v_proj", "lm_head"], "lora_bias": True}, False),
    "both_loras": ({"target_modules": ["embed_tokens", "lm_head"], "use_rslora": True}, False),
    "saved_embedding": ({"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}, False),
    "saved_head": ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, False),
    "resized": ({"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}, True),
    "resized_lora": ({"target_modules": ["o_proj", "embed_tokens", "lm_head"]}, True),
    "trained_tokens": ({"target_modules": ["q_proj"], "trainable_token_indices": [1, 300, 7, 319]}, False),
}


@contextmanager
def peft_warnings_ignored() -> Iterator[None]:
    """Ignores PEFT's own warnings about tied weights and resized vocabularies."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _base(model: Path, num_added: int) -> Any:
    base = load_base(model)
    if num_added:
        base.resize_token_embeddings(base.config.vocab_size + num_added, mean_resizing=False)
    return base


@torch.no_grad()
def make_vocab_adapter(folder: Path, model: Path, name: str, tokenizer: PreTrainedTokenizerFast | None = None) -> Path:
    """Saves an adapter with random values everywhere, and the tokenizer beside it, as trainers do."""
    options, is_resized = VOCAB_ADAPTERS[name]
    with peft_warnings_ignored():
        base = _base(model, NUM_ADDED if is_resized else 0)
        torch.manual_seed(sum(map(ord, name)))
        wrapped = peft.get_peft_model(base, peft.LoraConfig(r=6, lora_alpha=9, **options))
        for parameter_name, parameter in wrapped.named_parameters():
            if "lora_" in parameter_name or "modules_to_save" in parameter_name or "trainable_tokens" in parameter_name:
                torch.nn.init.normal_(parameter, std=0.15)
        wrapped.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return folder


@torch.inference_mode()
def peft_logits(model: Path, adapter: Path | None, tokens: list[int], num_added: int = 0) -> torch.Tensor:
    """Returns the logits of transformers with PEFT as [T, V]."""
    with peft_warnings_ignored():
        loaded = _base(model, num_added)
        if adapter is not None:
            loaded = peft.PeftModel.from_pretrained(loaded, adapter).eval()
        logits_TV: torch.Tensor = loaded(input_ids=torch.tensor([tokens])).logits[0].float()
    return logits_TV
