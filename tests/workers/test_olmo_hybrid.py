"""OLMo Hybrid as it is released: queries and keys have fewer channels than values, and separate convolutions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from family_cases import CASES, FamilyCase, make_case, make_case_adapter
from lorafleet.offline.llm import LLM, SamplingParams
from lorafleet.protocol.errors import ConfigError, UnsupportedModel
from lorafleet.workers.bases.checkpoint import read_model_config
from lorafleet.workers.bases.layer_config import AttentionConfig, DeltaNetConfig
from quantized_models import written
from tests.workers.test_recurrent_models import check_aborts, check_answers
from tiny_models import Reference

PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0)


def test_convolutions_of_unequal_sizes(tmp_path: Path, prompt) -> None:
    case = CASES["olmo_hybrid"]
    saved = make_case(tmp_path / "saved", FamilyCase(case.name, case.options | {"linear_key_head_dim": 8}))
    with pytest.raises(ConfigError, match=r"_conv1d\.weight has shape"):  # transformers saves them in equal parts
        LLM(str(saved), device="cpu", kv_cache_tokens=256)
    tensors = load_file(saved / "model.safetensors")

    def entries(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        prefix, found, _ = name.partition("q_conv1d")
        if not found:
            return {} if "_conv1d" in name else {name: tensor}
        names = [f"{prefix}{part}_conv1d.weight" for part in "qkv"]
        return dict(zip(names, torch.cat([tensors[own] for own in names]).split((16, 16, 64)), strict=True))

    released, ids = written(saved, tmp_path / "released", entries, {}), prompt(90)
    llm = LLM(str(released), device="cpu", kv_cache_tokens=512, max_num_batched_tokens=32, max_num_seqs=2)
    [output] = llm.generate({"prompt_token_ids": ids}, PARAMS)
    expected = Reference(released).greedy(ids, PARAMS.max_tokens)
    assert output.outputs[0].token_ids == expected.tokens
    assert [p.logprob for p in output.outputs[0].logprobs] == pytest.approx(expected.logprobs, abs=1e-3)


def test_states_survive_chunks_preemptions_and_aborts(tmp_path: Path, prompt) -> None:
    base = make_case(tmp_path / "base", CASES["olmo_hybrid"])
    reference = Reference(base)
    check_aborts(base, reference, prompt)
    options = {"lora": {}, "dora": {"use_dora": True, "r": 3}}
    case = CASES["olmo_hybrid"]
    adapters = {name: make_case_adapter(tmp_path / name, base, case, **given) for name, given in options.items()}
    check_answers((base, adapters), reference, prompt, max_num_batched_tokens=37)


def test_settings_that_config_json_lacks_are_those_of_the_released_model(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    config = {"architectures": ["OlmoHybridForCausalLM"], "rope_parameters": {"rope_theta": None}}
    path.write_text(json.dumps(config))
    model = read_model_config(tmp_path)
    assert model.attention_layers == tuple(range(3, 32, 4))
    attention, delta_net = model.layers[3].mixer, model.layers[0].mixer
    assert isinstance(attention, AttentionConfig) and isinstance(delta_net, DeltaNetConfig)
    assert (attention.num_kv_heads, attention.head_dim, attention.rope) == (30, 128, None)
    assert (delta_net.num_k_heads, delta_net.num_v_heads, delta_net.k_dim, delta_net.v_dim) == (30, 30, 96, 192)
    path.write_text(json.dumps(config | {"rope_parameters": None}))
    rotating = read_model_config(tmp_path).layers[3].mixer
    assert isinstance(rotating, AttentionConfig) and rotating.rope is not None
    for wrong in ({"layer_types": ["linear_attention"] * 32}, {"hidden_act": "gelu"}):
        path.write_text(json.dumps(config | wrong))
        with pytest.raises(UnsupportedModel):
            read_model_config(tmp_path)
