"""The engine against transformers + PEFT in float32: every family, every kind of plain LoRA, one by one and mixed."""

from __future__ import annotations

import random

import pytest

from lorafleet.offline.llm import LLM, LoRARequest, SamplingParams
from tests.workers.test_families_gpu import Changed, save_adapter
from tiny_models import FAMILIES, Reference, make_model

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0)
TOLERANCE = 1e-3


def assert_same(output, expected) -> None:
    [completion] = output.outputs
    assert len(completion.token_ids) == GREEDY.max_tokens
    assert completion.token_ids == expected.tokens
    assert [p.logprob for p in completion.logprobs] == pytest.approx(expected.logprobs, abs=TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES)
def test_base_model_answers_as_transformers_does(fleet, prompt, family):
    made = fleet(family)
    llm = LLM(str(made.base), max_num_batched_tokens=48, max_num_seqs=8, kv_cache_tokens=2048)
    # Short ones share steps, the longest is prefilled in chunks beside their decodes.
    prompts = [prompt(n) for n in (1, 3, 16, 17, 40, 70)]
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], GREEDY)
    for p, output in zip(prompts, outputs, strict=True):
        if family == "llama_dynamic":  # It rotates each key by the length at which it was computed.
            expected = made.reference.greedy(p, 12)
        else:
            expected = made.reference.greedy_along(p, output.outputs[0].token_ids)
        assert_same(output, expected)


def test_both_references_cap_scores_and_add_adapters_in_ways_of_their_own(tmp_path, prompt):
    base = make_model(tmp_path / "base", "gemma2")
    adapter, ids = save_adapter(tmp_path / "adapter", base), prompt(40)
    peft, changed = Reference(base), Changed(base)
    for reference in (peft, changed):
        assert reference.model(None).config._attn_implementation == "eager"
    assert hasattr(peft.model(adapter), "peft_config")
    assert not hasattr(changed.model(adapter), "peft_config")
    assert changed.logprobs(ids, adapter) == pytest.approx(peft.logprobs(ids, adapter), abs=1e-4)
    assert changed.logprobs(ids, adapter) != pytest.approx(changed.logprobs(ids), abs=1e-3)


@pytest.mark.parametrize(
    "family",
    ["llama3", "llama_bias", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "mixtral", "qwen3_moe"],
)
def test_mixed_adapters_answer_as_peft_does(fleet, prompt, family):
    made = fleet(family)
    llm = LLM(
        str(made.base), enable_lora=True, max_loras=3, max_num_batched_tokens=48, max_num_seqs=8, kv_cache_tokens=4096
    )
    jobs = [(prompt(n), kind) for n in (3, 17, 40) for kind in (None, *made.adapters)]
    random.Random(0).shuffle(jobs)
    requests = {kind: LoRARequest(kind, i + 1, str(path)) for i, (kind, path) in enumerate(made.adapters.items())}
    outputs = llm.generate(
        [{"prompt_token_ids": p} for p, _ in jobs],
        GREEDY,
        lora_request=[None if kind is None else requests[kind] for _, kind in jobs],
    )
    for (p, kind), output in zip(jobs, outputs, strict=True):
        adapter = made.adapters.get(kind)
        assert_same(output, made.reference.greedy_along(p, output.outputs[0].token_ids, adapter))


def test_prompt_logprobs_are_the_teacher_forced_ones(fleet, prompt):
    made = fleet("llama3")
    llm = LLM(str(made.base), enable_lora=True, max_num_batched_tokens=16, max_num_seqs=4, kv_cache_tokens=1024)
    ids, adapter = prompt(50), made.adapters["all"]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=2)
    for _ in range(2):  # the second time every block is cached, and yet each logprob is there
        [output] = llm.generate({"prompt_token_ids": ids}, params, LoRARequest("all", 1, str(adapter)))
        first, *rest = output.prompt_logprobs
        assert first is None
        assert [p.token_id for p in rest] == ids[1:]
        assert [p.logprob for p in rest] == pytest.approx(made.reference.logprobs(ids, adapter), abs=TOLERANCE)
        assert all(len(p.top_ids) == 2 for p in rest)


def test_answers_do_not_change_when_sequences_are_preempted(fleet, prompt):
    made = fleet("qwen3")
    prompts = [{"prompt_token_ids": prompt(n)} for n in (20, 21, 22, 23, 24, 25)]
    params = SamplingParams(temperature=0.9, seed=7, max_tokens=40, ignore_eos=True)
    roomy = LLM(str(made.base), kv_cache_tokens=4096).generate(prompts, params)
    tight = LLM(str(made.base), kv_cache_tokens=176, max_model_len=96)
    outputs = tight.generate(prompts, params)
    assert tight._engine.stats().preemptions_total > 0
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in roomy]


def test_a_seeded_request_is_the_same_alone_and_in_a_crowd(fleet, prompt):
    made = fleet("llama2")
    llm = LLM(str(made.base), kv_cache_tokens=8192)
    seeded = SamplingParams(temperature=1.0, top_p=0.95, top_k=50, seed=42, max_tokens=20, ignore_eos=True)
    crowd = [SamplingParams(temperature=1.3, max_tokens=n, ignore_eos=True) for n in range(5, 25)]
    [alone] = llm.generate({"prompt_token_ids": prompt(9)}, seeded)
    prompts = [{"prompt_token_ids": prompt(n)} for n in range(3, 23)]
    among = llm.generate([*prompts, {"prompt_token_ids": prompt(9)}], [*crowd, seeded])[-1]
    assert among.outputs[0].token_ids == alone.outputs[0].token_ids


def test_cached_prefixes_belong_to_one_adapter(fleet, prompt):
    made = fleet("llama3")
    llm = LLM(str(made.base), enable_lora=True, kv_cache_tokens=2048)
    ids = prompt(64)
    cached = {}
    for kind in (None, "all", "qv", None, "all"):
        lora = None if kind is None else LoRARequest(kind, len(kind), str(made.adapters[kind]))
        [output] = llm.generate({"prompt_token_ids": ids}, GREEDY, lora)
        assert_same(output, made.reference.greedy(ids, 12, made.adapters.get(kind)))
        assert output.num_cached_tokens == (48 if kind in cached else 0)
        cached[kind] = True


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision_stays_near_the_reference(fleet, prompt, dtype):
    made = fleet("llama3")
    llm = LLM(str(made.base), enable_lora=True, dtype=dtype, kv_cache_tokens=1024)
    ids, adapter = prompt(40), made.adapters["all"]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    [output] = llm.generate({"prompt_token_ids": ids}, params, LoRARequest("all", 1, str(adapter)))
    found = [p.logprob for p in output.prompt_logprobs[1:]]
    differences = [abs(a - b) for a, b in zip(found, made.reference.logprobs(ids, adapter), strict=True)]
    assert sum(differences) / len(differences) < 0.15


def test_lora_dtype_may_differ_from_the_base(fleet, prompt):
    made = fleet("llama3")
    llm = LLM(str(made.base), enable_lora=True, lora_dtype="bfloat16", kv_cache_tokens=1024)
    ids, adapter = prompt(40), made.adapters["linear"]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    [output] = llm.generate({"prompt_token_ids": ids}, params, LoRARequest("linear", 1, str(adapter)))
    found = [p.logprob for p in output.prompt_logprobs[1:]]
    assert found == pytest.approx(made.reference.logprobs(ids, adapter), abs=0.2)


@pytest.mark.parametrize("family", ["phi3_long", "phi3_partial"])
@pytest.mark.parametrize("overlap", [False, True])
def test_past_the_trained_length_longrope_turns_all_keys_anew(fleet, prompt, family, overlap):
    made = fleet(family)
    llm = LLM(str(made.base), kv_cache_tokens=2048, max_num_seqs=8, async_scheduling=overlap)
    prompts = [prompt(n) for n in (24, 31, 32, 33)]  # trained with 32
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], GREEDY)
    for p, output in zip(prompts, outputs, strict=True):
        assert_same(output, made.reference.greedy(p, 12))


def test_keys_of_short_sequences_are_not_taken_for_those_of_long_ones(fleet, prompt):
    made = fleet("phi3_long")
    llm = LLM(str(made.base), kv_cache_tokens=2048)
    whole = prompt(64)
    for length, cached in ((20, 0), (64, 0), (20, 16), (64, 48)):
        [output] = llm.generate({"prompt_token_ids": whole[:length]}, GREEDY)
        assert output.num_cached_tokens == cached
        assert_same(output, made.reference.greedy(whole[:length], 12))
