"""Gemma 4 with parts for pictures, spellings of its and Gemma 3n's config.json, and tensors that have no effect."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from family_cases import CASES, make_case, make_case_adapter
from lorafleet.offline.llm import LLM, LoRARequest, SamplingParams
from lorafleet.protocol.errors import AdapterUnsupported, ConfigError, UnsupportedModel
from lorafleet.workers.bases.checkpoint import read_model_config
from tests.workers.conftest import peft_warnings_ignored
from tiny_models import COMMON, Reference, tokenizer

PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=0, prompt_logprobs=0)
TEXT: dict[str, Any] = COMMON | {
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "intermediate_size": 48,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 8,
    "head_dim": 8,
    "global_head_dim": 16,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 6,
    "vocab_size_per_layer_input": 320,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "patch_size": 4,
    "position_embedding_size": 16,
}
TEXT_ALONE = r".*language_model.*\.(q_proj|k_proj|per_layer_input_gate|per_layer_model_projection)"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint as published: with keys and values of layers that do not use them."""
    folder = tmp_path_factory.mktemp("gemma4") / "base"
    config = transformers.Gemma4Config(text_config=TEXT, vision_config=VISION, audio_config=None)
    torch.manual_seed(0)
    transformers.Gemma4ForConditionalGeneration(config).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    assert any(name.startswith("model.vision_tower.") for name in tensors)
    attention = "model.language_model.layers.{}.self_attn."
    assert attention.format(3) + "k_proj.weight" not in tensors
    for name in ("k_proj", "v_proj", "k_norm"):
        tensors[f"{attention.format(3)}{name}.weight"] = tensors[f"{attention.format(1)}{name}.weight"].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def save(folder: Path, base: Path, targets: Any) -> Path:
    with peft_warnings_ignored():
        model = transformers.Gemma4ForConditionalGeneration.from_pretrained(base)
        wrapped = get_peft_model(model, LoraConfig(r=4, target_modules=targets))
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.2)
        wrapped.save_pretrained(folder)
    return folder


def change(adapter: Path, edit: Callable[[dict[str, Tensor]], dict[str, Tensor]], **config: Any) -> None:
    file = adapter / "adapter_model.safetensors"
    save_file(edit(load_file(file)), file)
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))


def answer(llm: LLM, tokens: list[int], adapter: Path | None = None) -> tuple[list[int], list[float]]:
    lora = None if adapter is None else LoRARequest(adapter.name, 1, str(adapter))
    [output] = llm.generate({"prompt_token_ids": tokens}, PARAMS, lora)
    [completion] = output.outputs
    found = [p.logprob for p in output.prompt_logprobs[1:]] + [p.logprob for p in completion.logprobs]
    return tokens + completion.token_ids, found


def expected(folder: Path, tokens: list[int], adapter: Path | None = None) -> Any:
    with peft_warnings_ignored():
        model = transformers.Gemma4ForConditionalGeneration.from_pretrained(folder).eval()
        if adapter is not None:
            model = PeftModel.from_pretrained(model, adapter).eval()
    with torch.inference_mode():
        rows = model(input_ids=torch.tensor([tokens])).logits[0].float().log_softmax(-1)
    return pytest.approx([rows[i, token].item() for i, token in enumerate(tokens[1:])], abs=1e-3)


def test_texts_and_adapters_of_either_spelling_answer_as_peft_does(checkpoint, prompt, tmp_path):
    adapter = save(tmp_path / "a", checkpoint, TEXT_ALONE)
    llm = LLM(str(checkpoint), enable_lora=True, max_loras=1, kv_cache_tokens=1024)
    tokens, found = answer(llm, prompt(30))
    assert found == expected(checkpoint, tokens)
    tokens, found = answer(llm, prompt(30), adapter)
    assert found == expected(checkpoint, tokens, adapter)

    def of_text_alone(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        name = "base_model.model.model.language_model.layers.3.self_attn.q_proj.lora_A.weight"
        absent = {name.replace("q_proj", part): torch.ones(4, 32) for part in ("k_proj", "v_proj")}
        return {name.replace("language_model.", ""): tensor for name, tensor in (tensors | absent).items()}

    old = save(tmp_path / "old", checkpoint, TEXT_ALONE)
    with peft_warnings_ignored():
        tensors = of_text_alone(load_file(adapter / "adapter_model.safetensors"))
        change(old, lambda _: tensors, target_modules=TEXT_ALONE.replace(".*language_model", "model"))
    assert answer(llm, prompt(30), old) == (tokens, found)
    llm.close()


def test_what_an_adapter_has_for_pictures_is_left_out_and_other_tables_are_refused_by_name(
    checkpoint, prompt, tmp_path
):
    llm = LLM(str(checkpoint), enable_lora=True, kv_cache_tokens=1024)
    adapter = save(tmp_path / "all", checkpoint, "all-linear")
    tokens, found = answer(llm, prompt(5), adapter)
    assert found == expected(checkpoint, tokens, adapter)

    def with_table(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        name = "base_model.model.model.language_model.embed_tokens_per_layer.lora_embedding_{}"
        return tensors | {name.format("A"): torch.ones(4, 320), name.format("B"): torch.ones(24, 4)}

    adapter = save(tmp_path / "table", checkpoint, TEXT_ALONE)
    change(adapter, with_table)
    with pytest.raises(AdapterUnsupported, match="embed_tokens_per_layer, which is not supported"):
        answer(llm, prompt(5), adapter)
    llm.close()


def test_only_layers_with_a_cache_of_their_own_need_scales_and_memory(checkpoint, tmp_path):
    for file in checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    name = "model.language_model.layers.{}.self_attn.{}_scale"
    scales = {name.format(i, kind): torch.tensor(0.5 + i) for i in range(2) for kind in "kv"}
    save_file(load_file(checkpoint / "model.safetensors") | scales, tmp_path / "model.safetensors")
    llm = LLM(str(tmp_path), kv_cache_dtype="fp8", kv_cache_tokens=1024)
    caches = llm._engine.runner.steps.caches
    llm.close()
    assert [cache.k_scale for cache in caches] == [0.5, 1.5, 0.5, 1.5]
    assert caches[2] is caches[0] and caches[3] is caches[1]


SAVED_NORMS = ["post_feedforward_layernorm_1", "pre_feedforward_layernorm_2"]


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("gemma4_experts", {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}),
        ("gemma4_experts", {"modules_to_save": SAVED_NORMS}),
        ("gemma4_small", {"modules_to_save": ["per_layer_projection_norm", "post_per_layer_input_norm"]}),
        ("gemma3n", {"modules_to_save": ["router_norm", "post_laurel_norm"]}),
    ],
)
def test_experts_and_norms_of_an_adapter_answer_as_peft_does(prompt, tmp_path, name, targets):
    case = replace(CASES[name], targets=["q_proj"])
    base = make_case(tmp_path / "base", case)
    adapter = make_case_adapter(tmp_path / "a", base, case, **targets)
    change(
        adapter,
        lambda tensors: {
            n: t + 0.2 * torch.sin(torch.arange(len(t))) if t.ndim == 1 else t for n, t in tensors.items()
        },
    )
    llm = LLM(str(base), enable_lora=True, max_loras=1, kv_cache_tokens=1024)
    tokens, found = answer(llm, prompt(30), adapter)
    llm.close()
    assert found == pytest.approx(Reference(base).logprobs(tokens, adapter), abs=1e-3)


def write(folder: Path, **settings: Any) -> Path:
    folder.mkdir(exist_ok=True)
    named = {"architectures": settings.get("architectures") or ["Gemma4ForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(settings | named))
    return folder


def test_published_configs_mean_what_transformers_saves(tmp_path):
    published = {
        "num_hidden_layers": 12,
        "global_head_dim": 128,
        "num_global_key_value_heads": 2,
        "attention_k_eq_v": True,
        "num_kv_shared_layers": 4,
        "use_bidirectional_attention": "vision",
        "hidden_size_per_layer_input": 0,
    }
    saved = transformers.Gemma4TextConfig(**published).to_dict()
    assert "05" in saved["per_layer_config"]
    found = read_model_config(write(tmp_path / "a", **published))
    again = read_model_config(write(tmp_path / "b", **saved))
    assert found.layers == again.layers
    attentions = found.attentions
    assert [(a.num_kv_heads, a.head_dim, a.row_heads) for a in attentions[5:8]] == [
        (2, 128, "qk"),
        (4, 256, "qkv"),
        (4, 256, "qkv"),
    ]
    assert [a.cache_layer for a in attentions[7:]] == [None, 7, 7, 7, 5]


def test_gemma_3n_as_transformers_4_wrote_it_means_the_same(tmp_path):
    saved = transformers.Gemma3nTextConfig(num_hidden_layers=20, num_kv_shared_layers=10).to_dict()
    old = {key: value for key, value in saved.items() if key != "rope_parameters"}
    old |= {"rope_theta": 1000000.0, "rope_local_base_freq": 10000.0, "rope_scaling": None}
    names = {"architectures": ["Gemma3nForCausalLM"]}
    found = [read_model_config(write(tmp_path / "a", **config | names)) for config in (saved, old)]
    assert found[0] == found[1]
    assert [layer.mlp.sparsity for layer in found[0].layers] == [0.95] * 10 + [0.0] * 10
    assert [attention.rope.theta for attention in found[0].attentions[3:5]] == [10000.0, 1000000.0]


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"num_kv_shared_layers": 26}, ConfigError, "leaves no layer of full_attention"),
        ({"rope_parameters": {"full_attention": {}}}, ConfigError, "no entry for layers of sliding_attention"),
        ({"per_layer_config": {"0": {"sliding_window": 3}}}, UnsupportedModel, "per_layer_config of sliding_window"),
        ({"use_bidirectional_attention": "all"}, UnsupportedModel, "use_bidirectional_attention"),
    ],
)
def test_other_options_are_refused_by_name(tmp_path, settings, error, message):
    with pytest.raises(error, match=re.escape(message)):
        read_model_config(write(tmp_path / "a", **settings))
