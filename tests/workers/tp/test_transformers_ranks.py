"""transformers' own modules on several ranks: base and adapters have the logits of one rank."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

from generic_cases import GENERIC_CASES, GENERIC_SMALL, GenericJob, make_generic
from lorafleet.offline.llm import LoRARequest, SamplingParams
from lorafleet.protocol.engine_config import EngineConfig
from lorafleet.protocol.errors import ConfigError
from lorafleet.workers.adapters.kinds.kind import Base
from lorafleet.workers.models.generic.generic_loading import find_shard, load_generic
from lorafleet.workers.slots.base_weights import FileWeights
from lorafleet.workers.tp.group import TPGroup
from rank_logits import CPU, step_logits
from ranks import on_ranks, start_llm
from tiny_models import Reference, make_adapter

pytestmark = pytest.mark.filterwarnings("ignore:.*(save_embedding_layers|tied):UserWarning")  # PEFT's own

WITH_PLAN = [name for name in GENERIC_CASES if name != "stablelm"]
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
CHOSEN = {2: WITH_PLAN, 4: ["granite", "phi", "olmoe"]}  # four ranks share two KV heads


def all_logits(group: TPGroup, jobs: dict[str, GenericJob]) -> dict[str, Tensor]:
    found = {}
    for name, job in jobs.items():
        options = EngineConfig(
            str(job.base),
            model_impl="transformers",
            tensor_parallel_size=group.size,
            dtype="float32",
            quantization=job.quantization,
        )
        shard = find_shard(options, group.rank)
        model = load_generic(options, shard, group, CPU)
        weights = FileWeights(
            job.base, torch.float32, shard.whole.tie_word_embeddings, quantization=shard.whole.quantization
        )
        described = Base(shard.whole.layout(), weights)
        found[name] = step_logits(model, job.base, described, job.adapter, job.fully_sharded)
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, GenericJob]:
    found = {}
    for name in WITH_PLAN:
        folder = tmp_path_factory.mktemp(name)
        base, targets = make_generic(folder / "base", name), ATTENTION if name == "olmoe" else "all-linear"
        use_dora = name not in ("gpt_neox", "starcoder2")  # one of them has windows, and both have biases
        adapter = make_adapter(folder / "lora", base, r=3, target_modules=targets, std=0.2, use_dora=use_dora)
        found[name] = GenericJob(base, adapter)
    return found


@pytest.mark.parametrize("size", CHOSEN)
def test_ranks_answer_as_one_does(folders, size) -> None:
    chosen = {name: folders[name] for name in CHOSEN[size]}
    for name in ("granite", "olmoe"):
        chosen[f"{name}, fully sharded"] = replace(folders[name], fully_sharded=True)
    chosen["phi, quantized"] = replace(folders["phi"], quantization="int4")
    alone = all_logits(TPGroup(), chosen)
    for of_rank in on_ranks(size, all_logits, chosen):
        for name, expected in alone.items():
            torch.testing.assert_close(of_rank[name], expected, atol=1e-4, rtol=0, msg=name)


def test_an_engine_of_two_ranks_answers_as_transformers_and_peft_do(tmp_path: Path) -> None:
    """GPT-NeoX has names of its own, by which DoRA's ranks find the base's weights, and no decoder of ours."""
    base = make_generic(tmp_path / "base", "gpt_neox")
    adapter = make_adapter(tmp_path / "dora", base, r=4, target_modules="all-linear", std=0.2, use_dora=True)
    prompts = [{"prompt_token_ids": list(range(5, 25))}] * 2
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0)
    llm = start_llm(str(base), 2, enable_lora=True)
    outputs = llm.generate(prompts, params, lora_request=[None, LoRARequest("dora", 1, str(adapter))])
    llm.close()
    reference = Reference(base)
    for output, path in zip(outputs, (None, adapter), strict=True):
        expected = reference.greedy(list(range(5, 25)), 6, path)
        [completion] = output.outputs
        assert completion.token_ids == expected.tokens
        assert [p.logprob for p in completion.logprobs] == pytest.approx(expected.logprobs, abs=1e-3)


@pytest.mark.parametrize(
    ("architecture", "size", "changes", "named"),
    [
        ("StableLmForCausalLM", 2, {}, "no tensor-parallel plan"),
        ("GraniteForCausalLM", 3, {}, r"does not divide GraniteForCausalLM's layers\.0\.self_attn\.q_proj \(4\)"),
        ("GraniteForCausalLM", 4, {"num_attention_heads": 12, "num_key_value_heads": 3}, r"k_proj \(3\)"),
        ("OlmoeForCausalLM", 16, {"intermediate_size": 24, "num_experts": 8}, r"experts' intermediate size \(24\)"),
        ("CohereForCausalLM", 2, {"use_qk_norm": True}, "CohereForCausalLM with tensor_parallel_size=2"),
        ("DogeForCausalLM", 2, {}, "DogeForCausalLM"),
    ],
)
def test_models_that_cannot_be_divided_are_refused_by_name(tmp_path, architecture, size, changes, named) -> None:
    kind = {"model_type": getattr(transformers, architecture).config_class.model_type}
    raw = GENERIC_SMALL | {"hidden_size": 96, "architectures": [architecture]} | kind | changes
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match=named):
        find_shard(EngineConfig(str(tmp_path), model_impl="transformers", tensor_parallel_size=size), 0)
