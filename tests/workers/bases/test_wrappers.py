"""Mistral 3 and Qwen-VL: texts are answered as transformers does, with the names of tensors of transformers 4 and 5.
test_text_part.py has Gemma 3."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lorafleet.offline.llm import LLM, LoRARequest, SamplingParams
from lorafleet.protocol.adapter_formats.adapter_files import SAFETENSORS_NAME
from lorafleet.protocol.errors import AdapterMalformed
from lorafleet.workers.bases.checkpoint import read_model_config
from wrapper_cases import WRAPPERS, make_wrapper, make_wrapper_adapter

PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=0)
CASES = {name: WRAPPERS[name] for name in ("mistral", "mistral_tied", "ministral3", "qwen2", "qwen2.5", "qwen3")}


@pytest.fixture(scope="module", params=CASES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    return request.param, make_wrapper(tmp_path_factory.mktemp("wrapper") / request.param, CASES[request.param])


@torch.inference_mode()
def logprobs(model: Any, tokens: list[int]) -> list[float]:
    rows = model(input_ids=torch.tensor([tokens])).logits[0].log_softmax(-1)
    return [rows[i, token].item() for i, token in enumerate(tokens[1:])]


def as_transformers_4(base: Path, folder: Path) -> Path:
    """Rewrites what transformers 5 has saved with the names that its model uses, or with the older ones."""

    def other(name: str) -> str:
        if name.startswith("language_model.") or name.startswith(("vision_tower.", "multi_modal_projector.")):
            return re.sub(r"^model\.language_model\.model", "model.language_model", f"model.{name}").replace(
                "model.language_model.lm_head", "lm_head"
            )
        if name.startswith("model.language_model."):
            return name.replace("model.language_model.", "language_model.model.")
        return re.sub(
            r"^model\.(?!language_model|visual)", "model.language_model.", re.sub("^visual", "model.visual", name)
        )

    folder.mkdir()
    for file in base.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(base / "model.safetensors")
    renamed = {other(name): tensor for name, tensor in tensors.items()}
    assert not {name for name in renamed if "layers" in name} & tensors.keys()
    save_file(renamed, folder / "model.safetensors")
    config = json.loads((base / "config.json").read_text())
    text = config["text_config"]
    rope = text.pop("rope_parameters")
    text["rope_theta"] = rope.pop("rope_theta")
    if "mrope_section" in rope:
        rope = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    text["rope_scaling"] = rope
    if config["model_type"].startswith("qwen2"):  # these have no text_config on hubs
        config |= config.pop("text_config") | {"model_type": config["model_type"]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_texts_and_adapters_are_answered_as_transformers_and_peft_do(
    checkpoint: tuple[str, Path], prompt: Any, tmp_path: Path
) -> None:
    case, base = checkpoint
    alphas = {r"^model\.language_model\.layers\.0\..*q_proj": 64}
    adapted = make_wrapper_adapter(tmp_path / "new", base, CASES[case], alpha_pattern=alphas)
    file = tmp_path / "new" / "adapter_model.safetensors"
    assert all(".language_model." in name for name in load_file(file))
    (tmp_path / "old").mkdir()
    settings = json.loads((tmp_path / "new" / "adapter_config.json").read_text())
    settings["target_modules"] = ["q_proj", "o_proj", "down_proj"]
    (tmp_path / "old" / "adapter_config.json").write_text(json.dumps(settings))
    tensors = {name.replace(".language_model.", "."): tensor for name, tensor in load_file(file).items()}
    save_file(tensors, tmp_path / "old" / "adapter_model.safetensors")
    plain = CASES[case].model_class.from_pretrained(base, dtype=torch.float32).eval()
    references = {None: plain, "new": adapted, "old": adapted}
    other = as_transformers_4(base, tmp_path / "base4")
    assert read_model_config(other) == read_model_config(base)
    for folder in (base, other):
        llm = LLM(str(folder), enable_lora=True, max_loras=2, max_num_seqs=4, kv_cache_tokens=1024)
        ids = prompt(40)
        requests = [None, LoRARequest("new", 1, str(tmp_path / "new")), LoRARequest("old", 2, str(tmp_path / "old"))]
        outputs = llm.generate([{"prompt_token_ids": ids}] * 3, PARAMS, lora_request=requests)
        llm.close()
        for model, output in zip(references.values(), outputs, strict=True):
            [completion] = output.outputs
            expected = logprobs(model, ids + completion.token_ids)[len(ids) - 1 :]
            assert [p.logprob for p in completion.logprobs] == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("checkpoint", ["mistral", "mistral_tied"], indirect=True)
def test_a_head_in_the_file_counts_where_config_json_contradicts_itself(checkpoint: tuple[str, Path]) -> None:
    """transformers 5 writes tie_word_embeddings=true beside a false one in text_config for any Mistral 3."""
    case, base = checkpoint
    path = base / "config.json"
    original = path.read_text()
    path.write_text(json.dumps(json.loads(original) | {"tie_word_embeddings": True}))
    model = read_model_config(base)
    path.write_text(original)
    assert model.tie_word_embeddings == CASES[case].tied


def test_what_adapters_have_for_the_vision_part_is_left_out(
    checkpoint: tuple[str, Path], prompt: Any, tmp_path: Path
) -> None:
    case, base = checkpoint
    make_wrapper_adapter(tmp_path / "pictures", base, CASES[case], r".*(attn\.qkv|vision_tower.*q_proj)")
    adapted = make_wrapper_adapter(tmp_path / "all", base, CASES[case], "all-linear")
    assert any("vision_tower" in name or "visual" in name for name in load_file(tmp_path / "all" / SAFETENSORS_NAME))
    llm = LLM(str(base), enable_lora=True, kv_cache_tokens=512)
    with pytest.raises(AdapterMalformed, match=r"no tensors but those of .*(vision_tower|visual)"):
        llm.generate({"prompt_token_ids": [5, 6]}, PARAMS, LoRARequest("pictures", 1, str(tmp_path / "pictures")))
    ids = prompt(40)
    [output] = llm.generate({"prompt_token_ids": ids}, PARAMS, LoRARequest("all", 2, str(tmp_path / "all")))
    llm.close()
    [completion] = output.outputs
    expected = logprobs(adapted, ids + completion.token_ids)[len(ids) - 1 :]
    assert [p.logprob for p in completion.logprobs] == pytest.approx(expected, abs=1e-3)
