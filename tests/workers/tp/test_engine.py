"""A whole engine over several ranks, processes of their own, against the same engine on one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace

import pytest
from safetensors.torch import load_file, save_file

from lorafleet.offline.llm import LLM, LoRARequest, RequestOutput, SamplingParams
from lorafleet.protocol.errors import AdapterUnsupported
from lorafleet.protocol.lora_config import LoRAConfig
from lorafleet.workers.schedule.sequence import Sequence
from ranks import start_llm
from tests.workers.speculation.drafting import Guesses, speculate
from tiny_models import make_adapter

CASES = [
    ("llama_dynamic", 2, False),
    ("qwen3", 4, True),
    ("mixtral", 2, True),
]  # family, ranks, fully_sharded_loras
# Fewer slots and less host memory than adapters: they come and go on all ranks.
LORA = LoRAConfig(max_loras=3, max_lora_rank=64, max_cpu_loras=4)


@pytest.fixture(scope="module", params=CASES, ids=str)
def pair(request, fleet) -> Iterator[tuple[LLM, LLM]]:
    family, size, fully = request.param
    config = replace(LORA, fully_sharded_loras=fully)
    alone, shared = (start_llm(str(fleet(family).base), n, enable_lora=True, lora_config=config) for n in (1, size))
    yield alone, shared
    alone.close()
    shared.close()


def test_all_ranks_put_adapters_of_mixed_ranks_into_the_same_places_of_little_memory(fleet, prompt, tmp_path):
    """Ranks that two do not divide: the second has less of each adapter, and the memory is as large as on the first."""
    base = fleet("qwen3").base
    paths = [make_adapter(tmp_path / f"a{i}", base, seed=i, r=rank) for i, rank in enumerate((3, 16, 5, 31, 8, 1, 15))]
    lora = LoRAConfig(max_loras=3, max_lora_rank=32, max_cpu_loras=len(paths), fully_sharded_loras=True)
    lora = replace(lora, lora_memory_gib=448 * 1024 / 2**30)
    loras = [LoRARequest(path.name, i, str(path)) for i, path in enumerate(paths, 1)] * 3
    prompts = [{"prompt_token_ids": prompt(3 + i)} for i in range(len(loras))]
    params, found = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True), []
    for size in (1, 2):
        llm = start_llm(str(base), size, enable_lora=True, lora_config=lora)
        found.append(tokens(llm.generate(prompts, params, lora_request=loras)))
        stats = llm._engine.stats()
        assert stats.lora_memory_total_bytes == size * 448 * 1024 and stats.lora_evictions_total > 0
        llm.close()
    assert found[0] == found[1]


def test_drafts_are_verified_on_all_ranks_and_answers_are_those_of_one_rank_without_drafts(fleet, prompt):
    made = fleet("qwen3")
    lora = LoRARequest("all", 1, str(made.adapters["all"]))
    jobs = [{"prompt_token_ids": prompt(n)} for n in (5, 40, 17, 23)]
    params = [
        SamplingParams(max_tokens=20, temperature=0, ignore_eos=True),
        SamplingParams(max_tokens=20, temperature=1.0, seed=3, ignore_eos=True, frequency_penalty=0.5),
    ] * 2
    alone = start_llm(str(made.base), 1, enable_lora=True)
    expected = tokens(alone.generate(jobs, params, lora_request=[None, None, lora, lora]))
    alone.close()
    shared = start_llm(str(made.base), 2, enable_lora=True, speculative_config={"method": "ngram"})
    answers = {f"{i}-0": answer for i, [answer] in enumerate(expected)}
    speculation = speculate(shared._engine, Guesses(answers))
    counts = [0, 0]
    verified = speculation.verified

    def counted(sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        counts[0] += num_drafted
        counts[1] += num_accepted
        verified(sequence, num_drafted, num_accepted)

    speculation.verified = counted  # type: ignore[method-assign]
    assert tokens(shared.generate(jobs, params, lora_request=[None, None, lora, lora])) == expected
    shared.close()
    assert 20 < counts[1] < counts[0]


def test_the_draft_model_of_rank_0_drafts_for_all_ranks(fleet, prompt, tmp_path):
    """The draft model is the base, and the adapter is its own draft LoRA, so nearly all drafts are right."""
    made = fleet("qwen3")
    for folder in (tmp_path / "all", tmp_path / "all" / "draft"):
        shutil.copytree(made.adapters["all"], folder)
    lora = LoRARequest("all", 1, str(tmp_path / "all"))
    jobs = [{"prompt_token_ids": prompt(n)} for n in (5, 40, 17)]
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    config = {"method": "draft_model", "model": str(made.base)}
    found = []
    for size, given in ((1, None), (2, config)):
        llm = start_llm(str(made.base), size, enable_lora=True, lora_config=LORA, speculative_config=given)
        if given is not None:
            drafter = llm._engine.scheduler.speculation.drafter
            speculation = speculate(llm._engine, drafter)
        found.append(tokens(llm.generate(jobs, params, lora_request=[lora, lora, None])))
        llm.close()
    assert found[0] == found[1]
    accepted = [acceptance.probability for _, acceptance in speculation._acceptances._by_adapter.items()]
    assert len(accepted) == 2 and min(accepted) > 0.9


def test_a_change_of_what_the_second_rank_alone_holds_is_a_change_of_the_base(fleet, prompt, tmp_path):
    base = tmp_path / "base"
    shutil.copytree(fleet("qwen3").base, base)
    adapter = make_adapter(tmp_path / "dora", base, use_dora=True)
    lora = [None, LoRARequest("dora", 1, str(adapter))]
    prompts = [{"prompt_token_ids": prompt(130)} for _ in lora]
    params = SamplingParams(max_tokens=8, temperature=0, logprobs=1, ignore_eos=True)
    shared = start_llm(str(base), 2, enable_lora=True, lora_config=LORA, kv_host_gib=0.01)
    former = shared.generate(prompts, params, lora_request=lora)
    path = base / "model.safetensors"
    weights = load_file(path)
    for name, tensor in weights.items():
        if name.endswith("o_proj.weight"):
            tensor[:, tensor.shape[1] // 2 :] *= 3.0
    save_file(weights, path, {"format": "pt"})
    later_lora = LoRARequest("late", 2, str(make_adapter(tmp_path / "late", fleet("qwen3").base, use_dora=True, r=4)))
    with pytest.raises(AdapterUnsupported, match="has changed since the server read it"):
        shared.generate(prompts[:1], params, lora_request=[later_lora])
    shared.sleep(2)
    assert shared.wake_up()
    alone = start_llm(str(base), 1, enable_lora=True, lora_config=LORA)
    lora.append(later_lora)
    prompts.append(prompts[0])
    found, expected = (llm.generate(prompts, params, lora_request=lora) for llm in (shared, alone))
    alone.close()
    shared.close()
    assert tokens(found) == tokens(expected) and tokens(former) != tokens(found)
    for mine, theirs, old in zip(found[:2], expected, former, strict=False):
        assert logprobs(mine) == pytest.approx(logprobs(theirs), abs=1e-3)
        assert logprobs(mine) != pytest.approx(logprobs(old), abs=1e-3)


def tokens(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[list(answer.token_ids) for answer in output.outputs] for output in outputs]


def test_greedy_answers_are_the_same(pair, prompt):
    prompts = [{"prompt_token_ids": prompt(n)} for n in (5, 100, 17, 1)]
    alone, shared = (
        tokens(llm.generate(prompts, SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))) for llm in pair
    )
    assert alone == shared


def test_adapters_of_every_kind_in_one_batch(pair, fleet, prompt, request):
    family = request.node.callspec.params["pair"][0]
    adapters = [*fleet(family).adapters.items()] * 2
    loras = [None, *(LoRARequest(name, i, str(path)) for i, (name, path) in enumerate(adapters, 1))]
    prompts = [{"prompt_token_ids": prompt(3 + 11 * i % 90)} for i in range(len(loras))]
    params = SamplingParams(max_tokens=8, temperature=0, logprobs=1, ignore_eos=True)
    alone, shared = (llm.generate(prompts, params, lora_request=loras) for llm in pair)
    assert tokens(alone) == tokens(shared)
    assert len({str(answer) for answer in tokens(alone)}) > 8, "adapters make no difference"
    for mine, theirs in zip(alone, shared, strict=True):
        assert logprobs(mine) == pytest.approx(logprobs(theirs), abs=1e-3)


@pytest.mark.parametrize("level", [1, 2])
def test_all_ranks_sleep_and_answer_as_before_when_they_wake_up(pair, fleet, prompt, request, level):
    family = request.node.callspec.params["pair"][0]
    loras = [None, *(LoRARequest(*named) for named in _some_adapters(fleet(family)))]
    prompts = [{"prompt_token_ids": prompt(30)} for _ in loras]
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    alone, shared = pair
    expected = tokens(alone.generate(prompts, params, lora_request=loras))
    assert tokens(shared.generate(prompts, params, lora_request=loras)) == expected
    shared.sleep(level)
    assert shared._engine.stats().sleeping and not any(shared._engine.stats().resident_slots)
    shared.wake_up(["weights"])
    shared.wake_up(["kv_cache"])
    assert tokens(shared.generate(prompts, params, lora_request=loras)) == expected


def _some_adapters(made):
    return [(name, i, str(path)) for i, (name, path) in enumerate(list(made.adapters.items())[:2], 1)]


def test_drawn_answers_and_logprobs_are_the_same(pair, prompt):
    """Rank 0 draws, and the other ranks go on from its tokens."""
    params = [
        SamplingParams(max_tokens=10, temperature=0.9, seed=7, n=2, logprobs=3, ignore_eos=True),
        SamplingParams(max_tokens=10, temperature=1.2, top_p=0.8, seed=3, prompt_logprobs=2, ignore_eos=True),
        SamplingParams(max_tokens=10, temperature=0, frequency_penalty=0.7, ignore_eos=True),
        SamplingParams(max_tokens=10, temperature=0, ignore_eos=True),
    ]
    prompts = [{"prompt_token_ids": prompt(n)} for n in (30, 90, 4, 8)]
    alone, shared = (llm.generate(prompts, params) for llm in pair)
    assert tokens(alone) == tokens(shared)
    for mine, theirs in zip(alone, shared, strict=True):
        for a, b in zip(logprobs(mine), logprobs(theirs), strict=True):
            assert a == pytest.approx(b, abs=1e-3)


def logprobs(output: RequestOutput) -> list[float]:
    of_answers = [one for answer in output.outputs for one in answer.logprobs or []]
    return [one.logprob for one in (*of_answers, *(output.prompt_logprobs or [])) if one is not None]
