"""Gemma 3 with a part for pictures: texts are answered as transformers does, from checkpoints of both layouts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import Gemma3Config, Gemma3ForCausalLM, Gemma3ForConditionalGeneration

from float_checkpoints import FP8, compressed, group, scaled, whole
from lorafleet.offline.llm import LLM, LoRARequest, SamplingParams
from lorafleet.workers.bases.checkpoint import read_model_config
from lorafleet.workers.bases.formats.compressed_tensors_format import KV_SCHEME
from lorafleet.workers.bases.weights import held_tensors, load_weights, read_kv_scales
from lorafleet.workers.models.decoder import DecoderModel
from lorafleet.workers.tp.group import TPGroup
from quantized_models import written
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


@pytest.mark.parametrize("spelling", ["model.language_model.", "language_model.model."])
@pytest.mark.parametrize("place", ["top", "text_config"])
def test_a_quantized_checkpoint_has_names_in_either_spelling(checkpoint, tmp_path, spelling, place):
    """down_proj has scales by channel and the others by tensor, so that targets matter. The pictures' part may be
    quantized too, and K and V of the cache have scales."""
    values: dict[str, torch.Tensor] = {}

    def entries(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        if not name.endswith("_proj.weight"):
            return {name: weight}
        block = (1, weight.shape[1]) if "down_proj" in name else whole(weight)
        stored, values[name] = scaled(weight, block, FP8)
        return {f"{name.removesuffix('weight')}{leaf}": tensor for leaf, tensor in stored.items()}

    layers = json.loads((checkpoint / "config.json").read_text())["text_config"]["num_hidden_layers"]
    down = [f"{spelling}layers.{i}.mlp.down_proj" for i in range(layers)]
    groups = {"down": group(8, "float", "channel"), "others": group(8, "float", "tensor")}
    groups["down"]["targets"] = down
    raw = json.loads((checkpoint / "config.json").read_text())
    ours = compressed(groups, ["re:.*multi_modal_projector.*"]) | {"kv_cache_scheme": KV_SCHEME}
    configs = {"quantization_config": ours if place == "top" else None}
    configs["text_config"] = raw["text_config"] | {"quantization_config": ours if place == "text_config" else None}
    folder = written(checkpoint, tmp_path / "quantized", entries, configs)
    tensors = load_file(folder / "model.safetensors")
    [prefix] = [name.partition("layers.0.mlp")[0] for name in values if name.endswith("layers.0.mlp.down_proj.weight")]
    scales = {f"{prefix}layers.{i}.self_attn.{kind}_scale": torch.tensor(0.5) for i in range(layers) for kind in "kv"}
    save_file(tensors | scales, folder / "model.safetensors")

    model = DecoderModel(read_model_config(folder), TPGroup(0, 1), torch.float32, torch.device("cpu"))
    load_weights(model, folder)
    held = held_tensors(model)
    own = {f"model.{name.removeprefix(prefix)}": want for name, want in values.items() if name.startswith(prefix)}
    assert len(own) == 7 * layers and len(values) > len(own), "pictures' linears are quantized too"
    assert all(torch.equal(held[name](), want) for name, want in own.items())
    assert read_kv_scales(folder, dict.fromkeys(range(layers), True)) == [(0.5, 0.5)] * layers


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


@pytest.mark.parametrize("targets", [["q_proj", "fc1"], "all-linear"])
def test_what_adapters_have_for_pictures_is_left_out(checkpoint, prompt, tmp_path, targets):
    config = LoraConfig(r=4, target_modules=targets, modules_to_save=["multi_modal_projector"])
    adapter = save(tmp_path / "a", checkpoint, config)
    assert any("mm_input_projection_weight" in name for name in load_file(adapter / "adapter_model.safetensors"))
    check(checkpoint, prompt(5), adapter)


@pytest.mark.parametrize("spelling", ["model.language_model.", "language_model.model."])
def test_an_adapter_of_the_whole_model_is_served_on_the_text_model_alone(checkpoint, prompt, tmp_path, spelling):
    """Its regular expressions name the modules of the whole model, also by the names of transformers 4."""
    text = Gemma3ForCausalLM(Gemma3Config.from_pretrained(checkpoint).text_config)
    parts = Gemma3ForConditionalGeneration.from_pretrained(checkpoint).state_dict()
    own = {name.replace("model.language_model.", "model."): value for name, value in parts.items()}
    text.load_state_dict(own, strict=False)
    text.tie_weights()
    text.save_pretrained(tmp_path / "text")
    tokenizer().save_pretrained(tmp_path / "text")
    root = re.escape(spelling)
    patterns = {"alpha_pattern": {rf"^{root}layers\.0\..*": 64}, "rank_pattern": {rf".*{root}layers\.1.*down_proj": 2}}
    new = {key: {k.replace(root, r"model\.language_model\."): v for k, v in p.items()} for key, p in patterns.items()}
    adapter = save(tmp_path / "a", checkpoint, LoraConfig(r=4, target_modules=TEXT_ALONE, **new))
    tokens = prompt(12)
    expected = reference(checkpoint, tokens, adapter)
    file, settings = adapter / "adapter_model.safetensors", adapter / "adapter_config.json"
    respelled = {name.replace("model.language_model.", spelling): value for name, value in load_file(file).items()}
    save_file(respelled, file)
    settings.write_text(json.dumps(json.loads(settings.read_text()) | patterns))
    for base in (tmp_path / "text", checkpoint):
        llm = LLM(str(base), enable_lora=True, kv_cache_tokens=1024)
        [output] = llm.generate({"prompt_token_ids": tokens}, PARAMS, LoRARequest("text", 1, str(adapter)))
        llm.close()
        assert [p.logprob for p in output.prompt_logprobs[1:]] == pytest.approx(expected, abs=1e-3)
