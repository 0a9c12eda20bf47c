"""Adapters on every matrix of a mixture, named as in the checkpoint, against a checkpoint with W + s * B * A.

PEFT on transformers 5 is no reference for these: it drops LoRA on dense layers and shared experts of some families.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from family_cases import CASES, make_adapter_of_matrices, make_case, make_case_adapter
from lorafleet.offline.llm import LLM, LoRARequest, SamplingParams
from lorafleet.tools.base_checkpoint import BaseModel
from lorafleet.tools.merging import merge
from lorafleet.workers.adapters.reader import read_adapter
from tiny_models import Reference

NEW_TOKENS = 4
PARAMS = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0)
MIXTURES = (
    "gpt_oss",
    "glm4_moe",
    "llama4",
    "qwen2_moe",
    "granite_moe",
    "olmoe",
    "ernie_moe",
    "hunyuan_moe",
    "minimax_m2",
    "nemotron_h_latent",
    "granite4_hybrid_experts",
    "lfm2_moe",
)


def merged(base: Path, adapter: Path, folder: Path) -> Path:
    with BaseModel.opened(base) as model:
        reader = model.for_reader(torch.float32)
        forms = read_adapter(adapter, base=reader, max_rank=64, dtype=torch.float32, name="a").forms
        merge(model, adapter, forms, folder)
    return folder


@pytest.mark.parametrize("name", MIXTURES)
def test_every_matrix_may_have_an_adapter(tmp_path: Path, prompt, name: str) -> None:
    base, changed = make_case(tmp_path / "base", CASES[name]), tmp_path / "changed"
    adapter = make_adapter_of_matrices(tmp_path / "adapter", base, changed)
    llm = LLM(str(base), enable_lora=True, max_num_batched_tokens=32, max_num_seqs=2, kv_cache_tokens=256)
    ids = prompt(40)
    [output] = llm.generate({"prompt_token_ids": ids}, PARAMS, lora_request=LoRARequest("a", 1, str(adapter)))
    expected = Reference(changed).greedy(ids, NEW_TOKENS)
    assert output.outputs[0].token_ids == expected.tokens
    assert [p.logprob for p in output.outputs[0].logprobs] == pytest.approx(expected.logprobs, abs=1e-3)
    own = load_file(changed / "model.safetensors")
    written = load_file(merged(base, adapter, tmp_path / "merged") / "model.safetensors")
    assert own.keys() == written.keys()
    assert all(torch.allclose(written[key], tensor, atol=1e-5) for key, tensor in own.items())


@pytest.mark.parametrize("name", ["gpt_oss", "llama4", "granite_moe", "ernie_moe"])
def test_adapters_on_parameters_merge(tmp_path: Path, prompt, name: str) -> None:
    base = make_case(tmp_path / "base", CASES[name])
    adapter = make_case_adapter(tmp_path / "adapter", base, CASES[name])
    ids = prompt(40)
    expected = Reference(base).greedy(ids, NEW_TOKENS, adapter)
    found = Reference(merged(base, adapter, tmp_path / "merged")).greedy(ids, NEW_TOKENS)
    assert found.tokens == expected.tokens
    assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-3)
