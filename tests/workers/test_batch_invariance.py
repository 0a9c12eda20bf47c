"""With batch_invariant, the bits of a request's logprobs do not depend on what is computed with it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lorafleet.offline.llm import LLM, LoRARequest, SamplingParams
from lorafleet.protocol.engine_config import EngineConfig
from lorafleet.protocol.errors import AdapterUnsupported, ConfigError
from lorafleet.workers.bases.checkpoint import read_model_config
from lorafleet.workers.models.decoder import DecoderModel
from lorafleet.workers.models.fixed_order import check_fixed_order, fix_order
from lorafleet.workers.tp.group import TPGroup
from tiny_models import make_adapter

WATCHED = SamplingParams(
    temperature=1.0, seed=3, max_tokens=5, ignore_eos=True, logprobs=5, prompt_logprobs=2, repetition_penalty=1.1
)
CACHED = SamplingParams(temperature=1.0, seed=3, max_tokens=5, ignore_eos=True, logprobs=5, repetition_penalty=1.1)
LENGTHS = (21, 3, 5, 2, 11, 4)  # of the other prompts, in turn
LENGTH = 37  # of the watched prompt


def make_llm(base: Any, **options: Any) -> LLM:
    return LLM(
        str(base),
        enable_lora=True,
        max_loras=8,
        max_lora_rank=64,
        max_num_seqs=40,
        batch_invariant=True,
        **{"kv_cache_tokens": 8192, "max_num_batched_tokens": 64} | options,
    )


def seen(output: Any) -> list[Any]:
    """Returns everything that is computed for a request, in exact numbers."""
    [completion] = output.outputs
    entries = [*(output.prompt_logprobs or [None])[1:], *completion.logprobs]
    return [(entry.token_id, entry.logprob, entry.rank, entry.top_ids, entry.top_logprobs) for entry in entries]


class Watch:
    """Runs one request in several companies."""

    def __init__(self, made: Any, prompt: Any, kind: str | None) -> None:
        self._prompt = prompt
        self.adapters = {
            name: LoRARequest(name, i + 1, str(path)) for i, (name, path) in enumerate(made.adapters.items())
        }
        self.adapter = self.adapters.get(kind or "")

    def run(self, llm: LLM, num_others: int, params: SamplingParams = WATCHED) -> list[Any]:
        kinds = [None, *self.adapters.values()]
        others = [(self._prompt(LENGTHS[i % len(LENGTHS)] + i % 3), kinds[i % len(kinds)]) for i in range(num_others)]
        place = num_others // 2
        jobs = [*others[:place], (self._prompt(LENGTH), self.adapter), *others[place:]]
        fields = [SamplingParams(temperature=0.5, seed=i, max_tokens=1 + i % 5, logprobs=1) for i in range(len(jobs))]
        fields[place] = params
        outputs = llm.generate(
            [{"prompt_token_ids": ids} for ids, _ in jobs], fields, lora_request=[adapter for _, adapter in jobs]
        )
        return seen(outputs[place])


@pytest.fixture(scope="module")
def llm(fleet: Any) -> Iterator[LLM]:
    engine = make_llm(fleet("llama3").base)
    yield engine
    engine.close()


@pytest.mark.parametrize(("kind", "companies"), [(None, [2, 7]), ("all", [2, 7, 33]), ("large", [7])])
def test_alone_and_among_others(llm: LLM, fleet: Any, prompt: Any, kind: str | None, companies: list[int]) -> None:
    watch = Watch(fleet("llama3"), prompt, kind)
    alone = watch.run(llm, 0)
    assert len(alone) == LENGTH - 1 + 5
    for num_others in companies:
        assert watch.run(llm, num_others) == alone
    # Its prompt is in the prefix cache, since its blocks are kept when it ends.
    [output] = llm.generate({"prompt_token_ids": prompt(LENGTH)}, CACHED, watch.adapter)
    assert output.num_cached_tokens > 0
    assert seen(output) == alone[LENGTH - 1 :]


def test_in_other_chunks_and_overlapped(llm: LLM, fleet: Any, prompt: Any) -> None:
    made = fleet("llama3")
    watch = Watch(made, prompt, "all")
    other = make_llm(made.base, max_num_batched_tokens=512, async_scheduling=True)
    assert watch.run(other, 4) == watch.run(llm, 0)
    other.close()


def test_preempted(fleet: Any, prompt: Any) -> None:
    made = fleet("llama3")
    llm = make_llm(made.base, block_size=4, kv_cache_tokens=60, max_num_batched_tokens=41)
    lora = LoRARequest("all", 1, str(made.adapters["all"]))
    jobs = [({"prompt_token_ids": prompt(n)}, adapter) for n, adapter in ((11, None), (9, lora), (21, lora), (5, None))]
    params = SamplingParams(seed=3, max_tokens=20, ignore_eos=True, logprobs=5)
    together = llm.generate([text for text, _ in jobs], params, lora_request=[adapter for _, adapter in jobs])
    assert llm._engine.stats().preemptions_total > 0
    for (text, adapter), output in zip(jobs, together, strict=True):
        [alone] = llm.generate(text, params, adapter)
        assert seen(output) == seen(alone)
    llm.close()


def test_an_adapter_with_a_vocabulary_of_its_own_is_refused(llm: LLM, fleet: Any, tmp_path: Any) -> None:
    adapter = make_adapter(
        tmp_path / "head", fleet("llama3").base, modules_to_save=["lm_head"], ensure_weight_tying=True
    )
    with pytest.raises(AdapterUnsupported, match="changes the vocabulary's table"):
        llm.generate({"prompt_token_ids": [5, 6]}, CACHED, LoRARequest("head", 99, str(adapter)))


@pytest.mark.parametrize(
    ("options", "device"),
    [
        ({"tensor_parallel_size": 2}, "cpu"),
        ({"attention_backend": "flashinfer"}, "cuda"),
        ({"model_impl": "transformers"}, "cuda"),
    ],
    ids=["ranks", "attention", "implementation"],
)
def test_options_without_fixed_bits_are_refused(options: dict[str, Any], device: str) -> None:
    with pytest.raises(ConfigError, match="batch_invariant"):
        check_fixed_order(EngineConfig("base", batch_invariant=True, **options), torch.device(device))
    check_fixed_order(EngineConfig("base", **options), torch.device(device))


def test_a_base_without_fixed_bits_on_a_gpu_is_refused(fleet: Any) -> None:
    def model(family: str) -> DecoderModel:
        config = read_model_config(fleet(family).base)
        return DecoderModel(config, TPGroup(), torch.float32, torch.device("meta"))

    fix_order(model("llama3"))
    with pytest.raises(ConfigError, match="has a mixture of experts"):
        fix_order(model("mixtral"))


class TestOnGPU:
    pytestmark = pytest.mark.gpu

    @pytest.mark.parametrize("kind", [None, "all", "large"])
    @pytest.mark.parametrize("enforce_eager", [False, True])
    def test_bfloat16(self, fleet: Any, prompt: Any, enforce_eager: bool, kind: str | None) -> None:
        made = fleet("llama3")
        watch = Watch(made, prompt, kind)
        alone = None
        for options in ({}, {"max_num_batched_tokens": 41}, {"kv_cache_tokens": 160}):
            llm = make_llm(made.base, device="cuda", dtype="bfloat16", enforce_eager=enforce_eager, **options)
            alone = alone or watch.run(llm, 0)
            for num_others in (0, 2, 7, 33):
                assert watch.run(llm, num_others) == alone
            llm.close()
