"""Gemma 3 with a part for pictures: texts are answered as transformers does, from checkpoints of both layouts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from lorafleet.offline.llm import LLM, LoRARequest, SamplingParams
from lorafleet.protocol.errors import AdapterUnsupported
from tests.workers.conftest import peft_warnings_ignored
from tiny_models import COMMON, FAMILIES, tokenizer

PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0, prompt_logprobs=0)
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
TEXT_ALONE = r".*language_model.*\.(q_proj|down_proj)"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text_part") / "base"
    config = Gemma3Config(
        text_config=COMMON | FAMILIES["gemma3"][1],
        vision_config=VISION | {"image_size": 28, "patch_size": 14, "vision_use_head": False},
        mm_tokens_per_image=4,
        boi_token_index=2,
        eoi_token_index=3,
        image_token_index=4,
    )
    torch.manual_seed(0)
    Gemma3ForConditionalGeneration(config).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def reference(folder: Path, tokens: list[int], adapter: Path | None = None) -> list[float]:
    model = Gemma3ForConditionalGeneration.from_pretrained(folder).eval()
    if adapter is not None:
        with peft_warnings_ignored():
            model = PeftModel.from_pretrained(model, adapter).eval()
    with torch.inference_mode():
        rows = model(input_ids=torch.tensor([tokens])).logits[0].float().log_softmax(-1)
    return [rows[i, token].item() for i, token in enumerate(tokens[1:])]


def check(folder: Path, tokens: list[int], adapter: Path | None = None) -> None:
    llm = LLM(str(folder), enable_lora=True, kv_cache_tokens=1024)
    lora = None if adapter is None else LoRARequest("text", 1, str(adapter))
    [output] = llm.generate({"prompt_token_ids": tokens}, PARAMS, lora)
    llm.close()
    [completion] = output.outputs
    found = [p.logprob for p in output.prompt_logprobs[1:]] + [p.logprob for p in completion.logprobs]
    assert found == pytest.approx(reference(folder, tokens + completion.token_ids, adapter), abs=1e-3)


def test_texts_are_answered_as_transformers_does(checkpoint, prompt):
    check(checkpoint, prompt(40))


def test_the_names_of_transformers_4_mean_the_same(checkpoint, prompt, tmp_path):
    def old(name: str) -> str:
        name = re.sub(r"^model\.language_model\.", "language_model.model.", name)
        return re.sub(r"^lm_head", "language_model.lm_head", name.removeprefix("model."))

    for file in checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = {old(name): tensor for name, tensor in load_file(checkpoint / "model.safetensors").items()}
    assert any(name.startswith("language_model.model.layers.") for name in tensors)
    assert any(name.startswith("vision_tower.") for name in tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    llm = LLM(str(tmp_path), kv_cache_tokens=1024)
    [output] = llm.generate({"prompt_token_ids": prompt(40)}, PARAMS)
    llm.close()
    found = [p.logprob for p in output.prompt_logprobs[1:]]
    assert found == pytest.approx(reference(checkpoint, prompt(40)), abs=1e-3)


def save(folder: Path, base: Path, config: LoraConfig) -> Path:
    with peft_warnings_ignored():
        wrapped = get_peft_model(Gemma3ForConditionalGeneration.from_pretrained(base), config)
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.2)
        wrapped.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("dora", [False, True])
def test_adapters_on_the_language_model_answer_as_peft_does(checkpoint, prompt, tmp_path, dora):
    config = LoraConfig(r=4, target_modules=TEXT_ALONE, use_dora=dora)
    check(checkpoint, prompt(30), save(tmp_path / "a", checkpoint, config))


def test_adapters_on_what_is_for_pictures_are_refused_by_name(checkpoint, prompt, tmp_path):
    adapter = save(tmp_path / "a", checkpoint, LoraConfig(r=4, target_modules=["q_proj"]))
    with pytest.raises(AdapterUnsupported, match=r"vision_tower.*only text is supported"):
        check(checkpoint, prompt(5), adapter)
