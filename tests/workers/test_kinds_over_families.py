"""PEFT's own adapters of many kinds over Gemma 2, Gemma 3 and Phi-3, in one batch each, against PEFT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AdaLoraConfig, IA3Config, LoHaConfig, LoKrConfig, LoraConfig, PeftConfig, VeraConfig, get_peft_model

from lorafleet.offline.llm import LLM, LoRARequest, SamplingParams
from tests.workers.conftest import peft_warnings_ignored
from tiny_models import ALL_TARGETS, Reference, fused_names, load_base, make_model

TOLERANCE = 1e-3
PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=0, prompt_logprobs=0)


def lora(**fields: Any) -> LoraConfig:
    return LoraConfig(**({"r": 4, "lora_alpha": 8, "target_modules": ALL_TARGETS, "task_type": "CAUSAL_LM"} | fields))


def configs(norms: list[str]) -> dict[str, PeftConfig]:
    return {
        "dora": lora(use_dora=True),
        "bias": lora(lora_bias=True),
        "pissa": lora(init_lora_weights="pissa"),
        "norms": lora(modules_to_save=[*norms, "norm"]),
        "tables": lora(target_modules=["embed_tokens", "lm_head", "o_proj"]),
        "tokens": lora(trainable_token_indices=[7, 11]),
        "adalora": AdaLoraConfig(init_r=6, lora_alpha=5, target_modules=ALL_TARGETS, total_step=10),
        "loha": LoHaConfig(r=3, alpha=5, target_modules=ALL_TARGETS),
        "lokr": LoKrConfig(r=2, alpha=3, target_modules=ALL_TARGETS),
        "ia3": IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]),
        "vera": VeraConfig(r=8, target_modules=ALL_TARGETS),
    }


def save(folder: Path, base: Path, config: PeftConfig) -> Path:
    model = load_base(base)
    if model.config.model_type == "phi3":
        for field in ("target_modules", "feedforward_modules"):
            if hasattr(config, field):
                setattr(config, field, fused_names(list(getattr(config, field))))
    with peft_warnings_ignored():
        wrapped = get_peft_model(model, config)
        torch.manual_seed(len(folder.name))
        with torch.no_grad():
            for parameter in wrapped.parameters():
                if parameter.requires_grad:
                    parameter.uniform_(0.3, 1.2) if parameter.dim() == 1 else parameter.normal_(std=0.15)
        wrapped.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "phi3_partial"])
def test_adapters_of_all_kinds_answer_in_one_batch_as_peft_does(tmp_path, prompt, family):
    base = make_model(tmp_path / "base", family, num_hidden_layers=2, initializer_range=0.1)
    norms = ["post_attention_layernorm"] + (["pre_feedforward_layernorm", "q_norm"] if family == "gemma3" else [])
    paths = {kind: save(tmp_path / kind, base, config) for kind, config in configs(norms).items()}
    llm = LLM(str(base), enable_lora=True, max_loras=16, max_num_batched_tokens=64, max_num_seqs=32)
    loras = [LoRARequest(kind, i + 1, str(path)) for i, (kind, path) in enumerate(paths.items())]
    prompts = [prompt(12 + i) for i in range(len(loras) + 1)]  # Phi-3's trained length is 32
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], PARAMS, [None, *loras])
    reference = Reference(base)
    with peft_warnings_ignored():
        for tokens, output, path in zip(prompts, outputs, [None, *paths.values()], strict=True):
            [completion] = output.outputs
            found = [p.logprob for p in output.prompt_logprobs[1:]] + [p.logprob for p in completion.logprobs]
            whole = tokens + completion.token_ids
            assert found == pytest.approx(reference.logprobs(whole, path), abs=TOLERANCE), path
            if path is not None:
                assert found != pytest.approx(reference.logprobs(whole), abs=10 * TOLERANCE), path
    llm.close()
