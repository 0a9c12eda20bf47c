"""A tensor of a table, a norm or a linear counts only where PEFT's model has it: PEFT's answer, or a refusal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoHaConfig, LoraConfig, PeftConfig, TrainableTokensConfig, VeraConfig

from lorafleet.protocol.errors import AdapterError
from tests.workers.adapters.kinds.harness import logits_with, make, peft_logits, read
from tests.workers.conftest import peft_warnings_ignored

Q, OUT = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.o_proj"
TABLES = ("lm_head", "model.embed_tokens")
LEAVES = (
    "weight",
    "base_layer.weight",
    "token_adapter.base_layer.weight",
    "original_module.weight",
    "modules_to_save.weight",
)
PLACES: dict[str, tuple[int, ...]] = {
    **{f"{table}.{leaf}": (64, 32) for table in TABLES for leaf in LEAVES},
    **{f"{table}.token_adapter.trainable_tokens_delta": (2, 32) for table in TABLES},
    "lm_head.bias": (64,),
    "lm_head.base_layer.bias": (64,),
    "model.norm.weight": (32,),
    "model.norm.base_layer.weight": (32,),
    "model.norm.modules_to_save.weight": (32,),
    **{f"{module}.{leaf}": (32, 32) for module in (Q, OUT) for leaf in ("weight", "base_layer.weight")},
    f"{Q}.base_layer.bias": (32,),
    f"{OUT}.bias": (32,),
}
LORA: dict[str, Any] = {"r": 2, "target_modules": ["q_proj"]}
COPIES = {"lm_head.weight", "model.embed_tokens.weight"}
# Each configuration, and the places where PEFT's model has a tensor for a table.
CONFIGS: dict[str, tuple[PeftConfig, set[str]]] = {
    "a linear": (LoraConfig(**LORA), COPIES),
    "IA3": (IA3Config(target_modules=["q_proj"], feedforward_modules=[]), COPIES),
    "VeRA": (VeraConfig(r=2, target_modules=["q_proj"]), COPIES),
    "LoHa of the head": (
        LoHaConfig(r=2, target_modules=["q_proj", "lm_head"]),
        {"lm_head.base_layer.weight", "model.embed_tokens.weight"},
    ),
    "the head": (
        LoraConfig(r=2, target_modules=["q_proj", "lm_head"]),
        {"lm_head.base_layer.weight", "model.embed_tokens.weight"},
    ),
    "the embedding": (
        LoraConfig(r=2, target_modules=["q_proj", "embed_tokens"]),
        {"lm_head.weight", "model.embed_tokens.base_layer.weight"},
    ),
    "the head saved": (
        LoraConfig(**LORA, modules_to_save=["lm_head"]),
        {"lm_head.weight", "model.embed_tokens.weight", "lm_head.original_module.weight"},
    ),
    "tokens": (
        LoraConfig(**LORA, trainable_token_indices=[1, 5]),
        {"lm_head.weight", "model.embed_tokens.token_adapter.base_layer.weight"},
    ),
    "tokens alone": (
        TrainableTokensConfig(target_modules=["embed_tokens"], token_indices=[1, 5]),
        {"lm_head.weight", "model.embed_tokens.base_layer.weight"},
    ),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_copy_gives_pefts_answer_or_is_refused(tmp_path: Path, case: str) -> None:
    config, places = CONFIGS[case]
    adapter = make(tmp_path / "a", "llama", config)
    saved, served = adapter.tensors, set[str]()
    for place, shape in PLACES.items():
        torch.manual_seed(3)
        adapter.write(saved | {f"base_model.model.{place}": torch.randn(shape)})
        try:
            forms = read(adapter)
        except AdapterError:
            continue
        with peft_warnings_ignored():
            expected = peft_logits(adapter)
        torch.testing.assert_close(logits_with(forms, "llama"), expected, atol=1e-4, rtol=1e-4)
        served.add(place)
    assert served == places | {place for place in PLACES if f"base_model.model.{place}" in saved}
