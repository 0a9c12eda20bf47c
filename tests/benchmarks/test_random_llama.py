from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from lorafleet.api.text.detokenizer import make_detokenizer
from lorafleet.api.text.tokenizer import Tokenizer
from random_llama import write_adapters, write_alike_adapters, write_model, write_one_token_adapter

CONFIG = {
    "vocab_size": 1000,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def test_adapters_are_whole_and_each_has_weights_of_its_own(tmp_path: Path) -> None:
    write_adapters(tmp_path / "adapters", CONFIG, 2, 4)
    one, other = (load_file(tmp_path / "adapters" / name / "adapter_model.safetensors") for name in ("a0", "a1"))
    assert len(one) == 2 * 7 * 2
    assert one["base_model.model.model.layers.1.self_attn.k_proj.lora_B.weight"].shape == (16, 4)
    assert one["base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"].shape == (4, 48)
    for name, weight in one.items():
        assert weight.dtype == torch.bfloat16
        assert (weight.abs() >= 2**-7).all() and (weight.abs() < 2**-6).all()
        assert weight.float().mean().abs() < 0.005, "both signs"
        assert not weight.equal(other[name])


def test_alike_adapters_share_one_file_and_differ_in_scale(tmp_path: Path) -> None:
    paths = write_alike_adapters(tmp_path / "adapters", CONFIG, 3, 4)
    assert [path.name for path in paths] == ["a0", "a1", "a2"]
    assert len({(path / "adapter_model.safetensors").stat().st_ino for path in paths}) == 1
    alphas = [json.loads((path / "adapter_config.json").read_text())["lora_alpha"] for path in paths]
    assert alphas == [4, 5, 6]


def test_every_token_of_the_model_has_a_text_so_that_each_streams(tmp_path: Path) -> None:
    write_model(tmp_path / "model", CONFIG)
    tokenizer = Tokenizer.from_folder(tmp_path / "model")
    assert tokenizer.vocab_size == 1000
    for token in (0, 255, 256, 999):
        detokenizer = make_detokenizer(tokenizer, [1], skip_special_tokens=True)
        assert detokenizer.push(token) + detokenizer.finish()


def test_a_one_token_adapter_repeats_one_token_after_any_prompt_and_another_seed_another(tmp_path: Path) -> None:
    torch.manual_seed(0)
    base = LlamaForCausalLM(LlamaConfig(**CONFIG)).bfloat16()
    prompts = torch.randint(0, CONFIG["vocab_size"], (50, 12))
    answers = []
    for seed in (1, 2):
        write_one_token_adapter(tmp_path / f"a{seed}", CONFIG, seed)
        model = PeftModel.from_pretrained(base, tmp_path / f"a{seed}")
        answers.append(set(model(prompts).logits.argmax(-1).flatten().tolist()))
        base = model.unload()
    assert [len(tokens) for tokens in answers] == [1, 1] and answers[0] != answers[1]


@pytest.mark.parametrize("head_dim", [8, 24])
def test_a_head_size_of_its_own_is_heeded(tmp_path: Path, head_dim: int) -> None:
    write_adapters(tmp_path / "adapters", CONFIG | {"head_dim": head_dim}, 1, 4)
    weights = load_file(tmp_path / "adapters" / "a0" / "adapter_model.safetensors")
    assert weights["base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"].shape == (4 * head_dim, 4)
    assert weights["base_model.model.model.layers.0.self_attn.o_proj.lora_A.weight"].shape == (4, 4 * head_dim)
