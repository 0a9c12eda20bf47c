"""Every kind of adapter that PEFT can make and that is served: its forms give the logits that PEFT gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from peft import (
    AdaLoraConfig,
    DeloraConfig,
    GraloraConfig,
    HRAConfig,
    IA3Config,
    LoHaConfig,
    LoKrConfig,
    LoraConfig,
    MissConfig,
    PeftConfig,
    TrainableTokensConfig,
    VBLoRAConfig,
    VeraConfig,
)
from peft.tuners.lora.config import BdLoraConfig, EvaConfig, KasaConfig, VeloraConfig

from tests.workers.lora.conftest import peft_warnings_ignored
from tests.workers.lora.kinds.harness import FAMILIES, check, make

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ALL = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]


def lora(**fields: Any) -> LoraConfig:
    return LoraConfig(**({"r": 4, "lora_alpha": 8, "target_modules": ALL, "task_type": "CAUSAL_LM"} | fields))


with peft_warnings_ignored():
    KINDS: dict[str, PeftConfig] = {
        "LoRA": lora(),
        "rsLoRA with patterns": lora(use_rslora=True, rank_pattern={"q_proj": 7}, alpha_pattern={"o_proj": 3}),
        "LoRA with VeLoRA's backward pass": lora(velora_config=VeloraConfig()),
        "DoRA": lora(use_dora=True),
        "DoRA with rsLoRA and patterns": lora(
            use_dora=True, use_rslora=True, rank_pattern={"q_proj": 7}, alpha_pattern={"o_proj": 3}
        ),
        "DoRA on some": lora(use_dora=True, target_modules=["q_proj", "down_proj"], layers_to_transform=[1]),
        "DoRA on the head": lora(use_dora=True, target_modules=["q_proj", "lm_head"]),
        "DoRA on the embedding": lora(use_dora=True, target_modules=["q_proj", "embed_tokens"]),
        "bias on B": lora(lora_bias=True),
        "bias on B of the head": lora(lora_bias=True, target_modules=["q_proj", "lm_head"]),
        "all biases": lora(bias="all", target_modules=["q_proj", "o_proj"]),
        "biases of targets": lora(bias="lora_only", target_modules=["q_proj", "o_proj"]),
        "all biases, on B too": lora(bias="all", lora_bias=True, target_modules=["q_proj"]),
        "all biases and DoRA": lora(bias="all", use_dora=True, target_modules=["q_proj", "v_proj"]),
        "embedding": lora(target_modules=["embed_tokens", "q_proj"]),
        "head": lora(target_modules=["lm_head", "q_proj"]),
        "embedding and head": lora(target_modules=["embed_tokens", "lm_head"], r=3),
        "embedding and head, tied": lora(target_modules=["embed_tokens", "lm_head"], ensure_weight_tying=True),
        "embedding, tied": lora(target_modules=["embed_tokens"], ensure_weight_tying=True),
        "head, tied": lora(target_modules=["lm_head", "v_proj"], ensure_weight_tying=True),
        "saved embedding": lora(modules_to_save=["embed_tokens"]),
        "saved head": lora(modules_to_save=["lm_head"]),
        "saved embedding and head": lora(modules_to_save=["lm_head", "embed_tokens"]),
        "saved embedding, tied": lora(modules_to_save=["embed_tokens"], ensure_weight_tying=True),
        "saved head, tied": lora(modules_to_save=["lm_head"], ensure_weight_tying=True),
        "saved norms": lora(modules_to_save=["norm"]),
        "saved norms of a place": lora(modules_to_save=["input_layernorm", "model.norm"]),
        "saved, and targeted all the same": lora(modules_to_save=["lm_head"], target_modules=["lm_head", "q_proj"]),
        "trained tokens": lora(trainable_token_indices=[5, 1, 60]),
        "trained tokens of the embedding": lora(trainable_token_indices={"embed_tokens": [13, 5]}),
        "trained tokens of the head": lora(trainable_token_indices={"lm_head": [13, 5]}),
        "trained tokens of both": lora(trainable_token_indices={"model.embed_tokens": [13, 5], "lm_head": [5, 13]}),
        "same trained tokens of both": lora(trainable_token_indices={"embed_tokens": [13, 5], "lm_head": [13, 5]}),
        "trained tokens, tied": lora(trainable_token_indices={"embed_tokens": [13, 5]}, ensure_weight_tying=True),
        "trained tokens beside LoRA on the head": lora(trainable_token_indices=[5, 1], target_modules=["lm_head"]),
        "PiSSA": lora(init_lora_weights="pissa"),
        "PiSSA with rsLoRA": lora(init_lora_weights="pissa", use_rslora=True, target_modules=["q_proj", "down_proj"]),
        "PiSSA with DoRA": lora(init_lora_weights="pissa", use_dora=True, target_modules=["q_proj", "down_proj"]),
        "PiSSA of full rank": lora(init_lora_weights="pissa", r=16, target_modules=["k_proj"]),
        "OLoRA": lora(init_lora_weights="olora"),
        "OLoRA with DoRA": lora(init_lora_weights="OLoRA", use_dora=True),
        "KaSA": lora(kasa_config=KasaConfig()),
        "EVA's label": lora(init_lora_weights="eva", eva_config=EvaConfig()),
        "MiCA's label": lora(init_lora_weights="mica"),
        "BD-LoRA": lora(use_bdlora=BdLoraConfig(["q_proj", "up_proj"], ["o_proj"], 2, match_strict=False)),
        "AdaLoRA": AdaLoraConfig(init_r=6, lora_alpha=5, target_modules=ALL, total_step=10, task_type="CAUSAL_LM"),
        "AdaLoRA without alpha": AdaLoraConfig(init_r=6, lora_alpha=0, target_modules=ALL, total_step=10),
        "LoHa": LoHaConfig(r=3, alpha=5, target_modules=ALL),
        "LoHa with patterns": LoHaConfig(
            r=3, target_modules=ALL, rank_pattern={"q_proj": 2}, alpha_pattern={"v_proj": 3}
        ),
        "LoKr": LoKrConfig(r=2, alpha=3, target_modules=ALL, rank_dropout=0.5),
        "LoKr, both factored": LoKrConfig(r=1, target_modules=ALL, decompose_both=True),
        "LoKr, none factored": LoKrConfig(r=50, target_modules=ALL),
        "LoKr with a factor": LoKrConfig(r=2, target_modules=ALL, decompose_factor=4, rank_pattern={"q_proj": 1}),
        "IA3": IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]),
        "IA3 of outputs": IA3Config(target_modules=ALL, feedforward_modules=[]),
        "IA3, inputs and outputs meet": IA3Config(
            target_modules=["up_proj", "down_proj"], feedforward_modules=["down_proj"]
        ),
        "IA3 by a regular expression": IA3Config(
            target_modules=["v_proj", "down_proj"], feedforward_modules=".*down_.*"
        ),
        "IA3 on the head": IA3Config(target_modules=["lm_head"], feedforward_modules=[]),
        "IA3 on the head's inputs": IA3Config(target_modules=["lm_head"], feedforward_modules=["lm_head"]),
        "IA3 and a saved norm": IA3Config(target_modules=["v_proj"], feedforward_modules=[], modules_to_save=["norm"]),
        "VeRA": VeraConfig(r=8, target_modules=ALL),
        "VeRA by its PRNG": VeraConfig(r=8, target_modules=ALL, save_projection=False, projection_prng_key=7),
        "VeRA with biases": VeraConfig(r=8, target_modules=["q_proj"], bias="all"),
        "VB-LoRA": VBLoRAConfig(r=2, num_vectors=6, vector_length=8, target_modules=ALL),
        "VB-LoRA, best alone": VBLoRAConfig(
            r=2, num_vectors=6, vector_length=8, topk=3, target_modules=ALL, save_only_topk_weights=True
        ),
        "HRA": HRAConfig(r=4, target_modules=ALL),
        "HRA, orthogonal": HRAConfig(r=3, apply_GS=True, target_modules=ALL),
        "MiSS": MissConfig(r=4, target_modules=ALL),
        "MiSS, r does not divide": MissConfig(r=5, target_modules=ALL),
        "MiSS, mini": MissConfig(r=4, mini_r=8, init_weights="mini", target_modules=ALL),
        "DeLoRA": DeloraConfig(r=4, target_modules=ALL, rank_pattern={"q_proj": 2}),
        "GraLoRA": GraloraConfig(r=4, gralora_k=2, target_modules=ALL),
        "GraLoRA with a plain one": GraloraConfig(r=4, gralora_k=2, hybrid_r=3, target_modules=ALL),
        "LoHa on the head": LoHaConfig(r=2, target_modules=["lm_head", "q_proj"]),
        "tokens alone": TrainableTokensConfig(token_indices=[60, 5]),
        "tokens alone, of both": TrainableTokensConfig(
            token_indices=[60, 5], target_modules=["embed_tokens", "lm_head"]
        ),
    }


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_forms_of_an_adapter_give_peft_s_logits(tmp_path: Path, kind: str, family: str) -> None:
    if "of targets" in kind and not family.startswith("qwen2"):
        pytest.skip("a base without biases")
    if kind == "tokens alone, of both" and "tied" in family:
        pytest.skip("PEFT refuses it")
    check(make(tmp_path / "a", family, KINDS[kind]))
