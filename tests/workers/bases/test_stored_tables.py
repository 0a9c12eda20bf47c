"""The tensors decide whether the head is the embedding, whatever the flags of config.json say."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from lorafleet.offline.llm import LLM, LoRARequest, SamplingParams
from lorafleet.protocol.engine_config import EngineConfig
from lorafleet.protocol.errors import ConfigError
from lorafleet.tools.quantized.quantized_checkpoint import quantize_checkpoint
from lorafleet.workers.base_startup import load_base
from lorafleet.workers.bases import stored_tables
from lorafleet.workers.bases.checkpoint import read_model_config
from lorafleet.workers.bases.stored_tensors import StoredTensors
from ranks import start_llm
from tests.workers.conftest import peft_warnings_ignored
from tiny_models import make_model
from wrapper_cases import WRAPPERS, make_wrapper

Tensors = dict[str, Tensor]
HEAD = "lm_head.weight"
PARAMS = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, prompt_logprobs=0)
TOKENS = [5, 70, 33, 12, 90, 7, 9, 30]
ADAPTERS: dict[str, dict[str, Any]] = {
    "linears": {"target_modules": ["q_proj", "down_proj"]},
    "head": {"target_modules": ["lm_head"]},
    "tables": {"target_modules": ["embed_tokens", "lm_head"]},
    "saved embedding": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    "saved and tied": {
        "target_modules": ["q_proj"],
        "modules_to_save": ["embed_tokens"],
        "ensure_weight_tying": True,
    },
    "tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [5, 7, 9]},
}


def embedding_of(tensors: Tensors) -> str:
    return next(name for name in tensors if name.endswith("embed_tokens.weight"))


def two_that_differ(tensors: Tensors) -> Tensors:
    table = tensors[embedding_of(tensors)]
    return tensors | {HEAD: table + 0.05 * torch.randn(table.shape, generator=torch.Generator().manual_seed(0))}


def a_copy(tensors: Tensors) -> Tensors:
    return tensors | {HEAD: tensors[embedding_of(tensors)].clone()}


def the_head_alone(tensors: Tensors) -> Tensors:
    own = embedding_of(tensors)
    return {HEAD if name == own else name: tensor for name, tensor in tensors.items()}


def nothing_else(tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name != HEAD}


def rewrite(folder: Path, change: Callable[[Tensors], Tensors], **config: Any) -> Path:
    """Changes the tensors of a checkpoint in one file, and values of its config.json. None removes a value."""
    file, described = folder / "model.safetensors", folder / "config.json"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})
    values = json.loads(described.read_text()) | config
    described.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
    return folder


def in_two_files(folder: Path) -> Path:
    """Moves the head to a file of its own."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = {name: "b.safetensors" if name == HEAD else "a.safetensors" for name in tensors}
    for file in ("a.safetensors", "b.safetensors"):
        save_file({n: t for n, t in tensors.items() if names[n] == file}, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return folder


@torch.inference_mode()
def logprobs(model: Any) -> list[float]:
    rows = model(input_ids=torch.tensor([TOKENS])).logits[0].float().log_softmax(-1)
    return [rows[i, token].item() for i, token in enumerate(TOKENS[1:])]


def make_adapter(folder: Path, base: Path, **options: Any) -> None:
    with peft_warnings_ignored(), torch.no_grad():
        torch.manual_seed(1)
        loaded = AutoModelForCausalLM.from_pretrained(base)
        wrapped = peft.get_peft_model(loaded, peft.LoraConfig(r=4, lora_alpha=8, **options))
        for name, parameter in wrapped.named_parameters():
            if any(part in name for part in ("lora_", "modules_to_save", "trainable_tokens")):
                parameter.normal_(std=0.15)
        wrapped.save_pretrained(folder)


def expected(base: Path, adapter: Path | None = None, model_class: Any = AutoModelForCausalLM) -> list[float]:
    with peft_warnings_ignored():
        model = model_class.from_pretrained(base, dtype=torch.float32, attn_implementation="eager").eval()
        return logprobs(model if adapter is None else peft.PeftModel.from_pretrained(model, adapter).eval())


def answers(llm: Any, adapters: dict[str, Path]) -> list[list[float]]:
    loras = [None, *(LoRARequest(name, i + 1, str(path)) for i, (name, path) in enumerate(adapters.items()))]
    try:
        outputs = llm.generate([{"prompt_token_ids": TOKENS}] * len(loras), PARAMS, loras)
    finally:
        llm.close()
    return [[p.logprob for p in output.prompt_logprobs[1:]] for output in outputs]


@pytest.mark.parametrize(
    ("change", "implementation"),
    [
        (two_that_differ, "lorafleet"),
        (a_copy, "lorafleet"),
        (the_head_alone, "lorafleet"),
        (two_that_differ, "transformers"),
    ],
)
def test_base_and_adapters_answer_as_transformers_and_peft_do(
    tmp_path: Path, change: Callable[[Tensors], Tensors], implementation: str
) -> None:
    base = rewrite(make_model(tmp_path / "base", "llama3", num_hidden_layers=1), change)
    adapters = {name: tmp_path / name for name in ADAPTERS}
    for name, folder in adapters.items():
        make_adapter(folder, base, **ADAPTERS[name])
    llm = LLM(str(base), enable_lora=True, max_loras=8, kv_cache_tokens=1024, model_impl=implementation)
    for found, adapter in zip(answers(llm, adapters), (None, *adapters.values()), strict=True):
        assert found == pytest.approx(expected(base, adapter), abs=1e-3), adapter


@pytest.mark.parametrize("change", [two_that_differ, the_head_alone])
def test_two_ranks_answer_as_one(tmp_path: Path, change: Callable[[Tensors], Tensors]) -> None:
    """An adapter that is computed from the head reads it from the files there."""
    base = in_two_files(rewrite(make_model(tmp_path / "base", "qwen2", num_hidden_layers=1), change))
    make_adapter(tmp_path / "dora", base, target_modules=["q_proj", "lm_head"], use_dora=True)
    llm = start_llm(str(base), 2, enable_lora=True)
    found, with_dora = answers(llm, {"dora": tmp_path / "dora"})
    assert found == pytest.approx(expected(base), abs=1e-3)
    assert with_dora == pytest.approx(expected(base, tmp_path / "dora"), abs=1e-3)


WRAPPER_FLAGS: dict[str, tuple[bool | None, bool | None]] = {
    "both say so": (True, True),
    "the text's alone": (None, True),
    "the whole's alone": (True, None),
    "they contradict": (True, False),
    "neither": (None, None),
}


@pytest.mark.parametrize("flags", WRAPPER_FLAGS)
@pytest.mark.parametrize("family", ["gemma3", "mistral_tied"])
def test_a_head_beside_a_part_for_pictures_is_found_under_any_flags(tmp_path: Path, family: str, flags: str) -> None:
    base = make_wrapper(tmp_path / "base", WRAPPERS[family])
    whole, text = WRAPPER_FLAGS[flags]
    config = json.loads((base / "config.json").read_text())["text_config"]
    config.pop("tie_word_embeddings", None)
    config |= {} if text is None else {"tie_word_embeddings": text}
    rewrite(base, nothing_else, tie_word_embeddings=whole, text_config=config)
    assert read_model_config(base).tie_word_embeddings
    rewrite(base, a_copy)
    assert read_model_config(base).tie_word_embeddings
    rewrite(base, the_head_alone)
    assert read_model_config(base).tie_word_embeddings
    assert read_model_config(base).stored_names.embedding.endswith("language_model.embed_tokens.weight")
    rewrite(
        base, lambda tensors: two_that_differ({"model.language_model.embed_tokens.weight": tensors.pop(HEAD)} | tensors)
    )
    assert not read_model_config(base).tie_word_embeddings
    if flags == "both say so":
        llm = LLM(str(base), kv_cache_tokens=1024)
        assert answers(llm, {}) == [pytest.approx(expected(base, None, WRAPPERS[family].model_class), abs=1e-3)]


@pytest.mark.parametrize("family", ["gemma2", "phi3_long", "qwen3", "gemma3"])
def test_a_head_that_differs_is_used_in_every_family(tmp_path: Path, family: str) -> None:
    """Gemma's configs have no flag, since their class is tied by default."""
    base = make_model(tmp_path / "base", family, num_hidden_layers=1, tie_word_embeddings=True)
    rewrite(base, two_that_differ, tie_word_embeddings=None if "gemma" in family else True)
    assert answers(LLM(str(base), kv_cache_tokens=1024), {}) == [pytest.approx(expected(base), abs=1e-3)]


def test_a_quantized_copy_keeps_the_head_and_says_so(tmp_path: Path) -> None:
    base = rewrite(make_model(tmp_path / "base", "llama3", num_hidden_layers=1), two_that_differ)
    quantize_checkpoint(base, "int4", tmp_path / "out")
    assert torch.equal(
        load_file(tmp_path / "out" / "model.safetensors")[HEAD], load_file(base / "model.safetensors")[HEAD]
    )
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False
    found = answers(LLM(str(tmp_path / "out"), kv_cache_tokens=1024), {})
    assert found == answers(LLM(str(base), kv_cache_tokens=1024, quantization="int4"), {})


def test_a_quantized_copy_of_a_lone_head_has_the_embeddings_name(tmp_path: Path) -> None:
    base = rewrite(make_model(tmp_path / "base", "llama3", num_hidden_layers=1), the_head_alone)
    quantize_checkpoint(base, "int4", tmp_path / "out")
    assert "model.embed_tokens.weight" in load_file(tmp_path / "out" / "model.safetensors")
    found = answers(LLM(str(tmp_path / "out"), kv_cache_tokens=1024), {})
    assert found == answers(LLM(str(base), kv_cache_tokens=1024, quantization="int4"), {})


def test_a_checkpoint_that_is_tied_otherwise_is_not_loaded_into_the_running_model(tmp_path: Path) -> None:
    """A trainer may write the checkpoint anew while the weights are given back."""
    base = make_model(tmp_path / "base", "llama3", num_hidden_layers=1)
    loaded = load_base(EngineConfig(str(base), device="cpu"), 0, None, None, lambda: None)
    rewrite(base, two_that_differ)
    assert loaded.reload is not None
    with pytest.raises(ConfigError, match="other tie_word_embeddings by its tensors than when the server started"):
        loaded.reload()


def test_tables_are_compared_in_parts_and_only_if_config_json_ties_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = rewrite(make_model(tmp_path / "base", "llama3", num_hidden_layers=1), a_copy)
    monkeypatch.setattr(stored_tables, "CHUNK_VALUES", 64 * 7)
    assert read_model_config(base).tie_word_embeddings
    with StoredTensors(base) as tensors:
        assert stored_tables.equal_tables(tensors, HEAD, "model.embed_tokens.weight")
    table = load_file(base / "model.safetensors")[HEAD]
    table[-1, -1] += 1.0
    rewrite(base, lambda tensors: tensors | {HEAD: table})
    assert not read_model_config(base).tie_word_embeddings

    def never(*_: object) -> bool:
        raise AssertionError("the tables were compared")

    monkeypatch.setattr(stored_tables, "equal_tables", never)
    assert not read_model_config(rewrite(base, a_copy, tie_word_embeddings=False)).tie_word_embeddings
    assert read_model_config(rewrite(base, nothing_else, tie_word_embeddings=True)).tie_word_embeddings


def test_without_weights_the_flag_counts(tmp_path: Path) -> None:
    base = rewrite(make_model(tmp_path / "base", "llama3", num_hidden_layers=1), two_that_differ)
    alone = tmp_path / "config alone"
    alone.mkdir()
    shutil.copy(base / "config.json", alone)
    assert read_model_config(alone).tie_word_embeddings
    assert replace(read_model_config(base), tie_word_embeddings=True, is_only_called_tied=False) == read_model_config(
        alone
    )
