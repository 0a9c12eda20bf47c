"""The prefix cache of models with recurrent layers: the same answers and logprobs as without it, bit for bit.

Sums of floats depend on how tokens are divided into chunks. So bits are compared where both engines compute the same
chunks: steps of one token, or a prompt that comes again.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from family_cases import CASES, make_case, make_case_adapter
from lorafleet.offline.llm import LLM, LoRARequest, RequestOutput, SamplingParams
from lorafleet.protocol.engine_config import EngineConfig
from lorafleet.protocol.errors import ConfigError
from lorafleet.protocol.messages import EngineRequest, TokenLogprobs
from lorafleet.workers.startup import build_engine
from ranks import start_llm
from tiny_models import Reference

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=2)
LONG = SamplingParams(temperature=0, max_tokens=70, ignore_eos=True, logprobs=2)


# Two state spaces with attention in other layers, one with attention beside it, and convolutions without a memory.
OTHERS = ["nemotron_h", "granite4_hybrid", "falcon_h1", "lfm2"]


@pytest.fixture(scope="module")
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of the family that the test names, or else Qwen3.5."""
    case = CASES[getattr(request, "param", "qwen3_5")]
    return make_case(tmp_path_factory.mktemp("snapshots") / "base", case)


@pytest.fixture(scope="module")
def reference(base: Path) -> Reference:
    return Reference(base)


def start(base: Path, **options: Any) -> LLM:
    return LLM(str(base), device="cpu", **{"kv_cache_tokens": 4096, "max_num_seqs": 4, "enable_lora": False, **options})


def answer(llm: LLM, tokens: list[int], params: SamplingParams = GREEDY, lora: LoRARequest | None = None):
    [output] = llm.generate([{"prompt_token_ids": tokens}], params, lora)
    return output


def bits(output: RequestOutput) -> list[tuple[list[int], list[TokenLogprobs]]]:
    """Returns the tokens of each sample and all their logprobs, for exact comparison."""
    return [(sample.token_ids, sample.logprobs) for sample in output.outputs]


@pytest.mark.parametrize(
    ("base", "most_tokens"),
    [*(("qwen3_5", count) for count in (16, 23, 100, 1000)), *((name, 23) for name in OTHERS)],
    indirect=["base"],
)
def test_a_prompt_that_comes_again_has_the_same_bits(base: Path, reference, prompt, most_tokens: int) -> None:
    llm = start(base, max_num_batched_tokens=most_tokens)
    for length in (1, 2, 15, 64, 65, 80, 81, 130, 300):
        first, second = (answer(llm, prompt(length)) for _ in range(2))
        boundary = (length - 1) // 16 * 16
        assert (first.num_cached_tokens, second.num_cached_tokens) == (0, boundary if boundary >= 64 else 0)
        assert bits(first) == bits(second)
        tokens = first.outputs[0].token_ids
        assert tokens == reference.greedy(prompt(length), GREEDY.max_tokens, likely=tokens).tokens


@pytest.mark.parametrize(
    ("base", "overlap", "num_talks"),
    [("qwen3_5", False, 1), ("qwen3_5", True, 3), *((name, True, 1) for name in OTHERS)],
    indirect=["base"],
)
def test_turns_and_system_prompts_have_the_bits_of_an_engine_without_the_cache(
    base: Path, prompt, overlap: bool, num_talks: int
) -> None:
    """Steps of one token compute the same sums, whatever was cached."""
    sizes = {"max_num_seqs": 1, "max_num_batched_tokens": 1, "async_scheduling": overlap}
    cached, plain = start(base, **sizes), start(base, enable_prefix_caching=False, **sizes)
    system, found = prompt(100), []
    for index in range(num_talks):
        talk = system + prompt(20 + index)
        for params in (LONG, GREEDY):
            output, expected = answer(cached, talk, params), answer(plain, talk, params)
            assert bits(output) == bits(expected)
            found.append(output.num_cached_tokens)
            talk = talk + output.outputs[0].token_ids + prompt(9)
    # The third talk begins behind the system prompt's last block, and second turns begin within the answers.
    assert found[::2] == [0, 0, 96][:num_talks]
    assert all(count >= 96 + 64 for count in found[1::2])
    assert cached._engine.stats().state_snapshots_used > 0
    assert cached._engine.stats().memory_bytes["state_snapshots"] > 0


def test_turns_answer_as_without_the_cache_where_chunks_differ(base, reference, prompt) -> None:
    llm = start(base, max_num_batched_tokens=23)
    talk = prompt(150)
    for turn in range(2):
        output = answer(llm, talk, LONG)
        expected = reference.greedy(talk, LONG.max_tokens, likely=output.outputs[0].token_ids)
        assert output.outputs[0].token_ids == expected.tokens
        assert [p.logprob for p in output.outputs[0].logprobs] == pytest.approx(expected.logprobs, abs=1e-3)
        assert output.num_cached_tokens >= 200 * turn
        talk = talk + output.outputs[0].token_ids + prompt(9)


def test_samples_of_one_prompt_share_its_computation(base, prompt) -> None:
    llm = start(base)
    samples = SamplingParams(n=3, temperature=0, max_tokens=8, ignore_eos=True, logprobs=2)
    output = answer(llm, prompt(200), samples)
    first, *others = bits(output)
    assert others == [first, first]
    assert llm._engine.stats().prefix_cache_hits_total == 2 * 192
    seeded = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=8, ignore_eos=True, logprobs=2)
    assert bits(answer(llm, prompt(200), seeded)) == bits(answer(llm, prompt(200), seeded))


def test_adapters_and_salts_share_no_states(base, prompt, tmp_path: Path) -> None:
    adapter = make_case_adapter(tmp_path / "lora", base, CASES["qwen3_5"])
    llm, reference = start(base, enable_lora=True, max_loras=2), Reference(base)
    lora = LoRARequest("lora", 1, str(adapter))
    for _ in range(2):
        for request in (None, lora):
            output = answer(llm, prompt(130), GREEDY, request)
            path = None if request is None else adapter
            tokens = output.outputs[0].token_ids
            assert tokens == reference.greedy(prompt(130), GREEDY.max_tokens, path, likely=tokens).tokens
    assert llm._engine.stats().prefix_cache_hits_total == 2 * 128


@pytest.mark.parametrize(
    ("base", "overlap"),
    [("qwen3_5", False), ("qwen3_5", True), ("falcon_h1", True), ("lfm2", True)],
    indirect=["base"],
)
def test_answers_are_right_under_eviction_preemption_and_aborts(base, reference, prompt, overlap: bool) -> None:
    draw = random.Random(1)
    config = EngineConfig(
        str(base),
        device="cpu",
        kv_cache_tokens=400,
        max_model_len=300,
        max_num_seqs=3,
        max_num_batched_tokens=50,
        state_snapshots=4,
        async_scheduling=overlap,
    )
    engine = build_engine(config)
    params = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True)
    prompts = {f"{i}": prompt(100)[: draw.choice([0, 70, 100])] + prompt(draw.randrange(1, 110)) for i in range(6)}
    prompts |= {f"again {name}": tokens for name, tokens in prompts.items()}
    answers: dict[str, list[int]] = {name: [] for name in prompts}
    aborted: set[str] = set()
    for name in prompts:
        engine.add(EngineRequest(request_id=name, prompt_token_ids=prompts[name], params=params))
    while engine.has_work:
        for output in engine.step():
            answers[output.request_id] += output.token_ids
        if draw.random() < 0.01 and len(aborted) < 4:
            aborted.add(name := draw.choice([s.request_id for s in engine.scheduler.running]))
            engine.abort(name)
    stats = engine.stats()
    engine.close()
    assert stats.preemptions_total > 0 and stats.prefix_cache_hits_total > 0 and aborted
    for name, tokens in answers.items():
        if name not in aborted:
            assert tokens == reference.greedy(prompts[name], params.max_tokens, likely=tokens).tokens, name


@pytest.mark.parametrize("base", ["qwen3_5", *OTHERS[1:]], indirect=True)
def test_both_ranks_resume_from_their_parts_of_a_snapshot(base, prompt) -> None:
    llm = start_llm(str(base), 2)
    first, second = (answer(llm, prompt(130)) for _ in range(2))
    llm.close()
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 128)
    assert bits(first) == bits(second)


def test_the_number_of_snapshots_is_honored_or_refused(base, prompt, tmp_path: Path) -> None:
    for options in ({"state_snapshots": 0}, {"enable_prefix_caching": False}):
        llm = start(base, **options)
        assert [answer(llm, prompt(130)).num_cached_tokens for _ in range(2)] == [0, 0]
        assert llm._engine.stats().state_snapshots_total == 0
    assert start(base, state_snapshots=3)._engine.stats().state_snapshots_total == 3
    assert start(base)._engine.stats().state_snapshots_total == 16
    with pytest.raises(ConfigError, match="state_snapshots=3 has no use with enable_prefix_caching=False"):
        EngineConfig(str(base), state_snapshots=3, enable_prefix_caching=False)
    other = make_case(tmp_path, CASES["olmo"])
    with pytest.raises(ConfigError, match="this one has none"):
        build_engine(EngineConfig(str(other), state_snapshots=3, device="cpu"))
