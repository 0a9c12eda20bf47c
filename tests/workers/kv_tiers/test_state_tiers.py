"""Models with recurrent layers and KV tiers: the same bits as when the engine computed a prompt itself, wherever its KV
blocks and the snapshot of its states have been.

Prompts have 201 tokens and are computed in chunks of 64. Their only snapshot is behind token 192, where they resume.
"""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from family_cases import CASES, make_case, make_case_adapter
from lorafleet.offline.llm import LLM, LoRARequest, RequestOutput
from lorafleet.protocol.engine_config import EngineConfig
from lorafleet.protocol.errors import ConfigError
from lorafleet.protocol.messages import EngineRequest
from lorafleet.protocol.sampling_params import SamplingParams
from lorafleet.workers.kv_tiers.disk_blocks import DiskBlocks
from lorafleet.workers.kv_tiers.kv_tiers import KVTiers
from lorafleet.workers.kv_tiers.state_tiers import StateTiers
from lorafleet.workers.startup import build_engine
from ranks import start_llm
from tests.workers.kv_tiers.test_engine_tiers import GIB, GREEDY, answer, bits, prompts, settle, stats
from tiny_models import Reference

# A gated delta rule, two kinds of Mamba-2 hybrids, and convolutions without a memory.
FAMILIES = ["qwen3_5", "nemotron_h", "falcon_h1", "lfm2"]
NUM_ON_GPU = 4  # snapshots
NUM_IN_HOST = 16  # snapshots, where there is a disk and KV blocks do not need more room
BLOCKS_IN_HOST = 32  # KV blocks at least, where there is a disk: those of a prompt that comes and of one that leaves
COUNT = NUM_IN_HOST + NUM_ON_GPU + 2  # prompts, so that the first ones are on disk alone


@pytest.fixture(scope="module")
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of the family that the test names, or else Qwen3.5."""
    return make_case(tmp_path_factory.mktemp("states") / "base", CASES[getattr(request, "param", "qwen3_5")])


def options(**others: Any) -> dict[str, Any]:
    sizes = {"kv_cache_tokens": 512, "max_num_batched_tokens": 64, "max_num_seqs": 4, "state_snapshots": NUM_ON_GPU}
    return {"device": "cpu", "kv_host_gib": 0.05, **sizes, **others}


def with_disk(base: Path, folder: Path, **others: Any) -> dict[str, Any]:
    """Adds a disk tier behind a host tier of NUM_IN_HOST snapshots, or of more if they are no larger than KV blocks."""
    llm = LLM(str(base), **options(**others))
    block_bytes, state_bytes = (slot_bytes for _, _, slot_bytes in tiers_of(llm)._contents())
    llm.close()
    host = (2 * max(NUM_IN_HOST * state_bytes, BLOCKS_IN_HOST * block_bytes) + 2) / GIB
    return options(kv_host_gib=host, kv_disk_dir=str(folder), kv_disk_gib=0.05, **others)


def tiers_of(llm: LLM) -> KVTiers:
    tiers = llm._engine.scheduler.memory.tiers
    assert tiers is not None
    return tiers


def num_prompts(llm: LLM, tier: str) -> int:
    """Returns how many prompts it takes until the states of the first ones are in this tier alone."""
    return 8 if tier == "host" else states_of(llm).stored.host_slots + NUM_ON_GPU + 2


def states_of(llm: LLM) -> StateTiers:
    states = tiers_of(llm).states
    assert states is not None
    return states


def settle_states(llm: LLM) -> None:
    settle(llm._engine)
    while states_of(llm).disk.num_jobs:
        tiers_of(llm).poll()


def answers(llm: LLM, requests: list[tuple[list[int], LoRARequest | None]]) -> list[RequestOutput]:
    found = []
    for tokens, lora in requests:
        found.append(answer(llm, tokens, lora))
        settle_states(llm)
    return found


def check_bits(llm: LLM, prompt, loras: tuple[LoRARequest | None, ...] = (None,), count: int = 8) -> None:
    """Compares the answers to prompts that have left the GPU with their first answers."""
    requests = [(tokens, lora) for tokens in prompts(prompt, count) for lora in loras]
    first = answers(llm, requests)
    for (tokens, lora), expected in zip(requests, first, strict=True):
        again = answer(llm, tokens, lora)
        settle_states(llm)
        assert bits(again) == bits(expected)
        assert (expected.num_cached_tokens, again.num_cached_tokens) == (0, 192)
    assert len({str(bits(output)) for output in first}) == len(first)
    assert states_of(llm).counts.moved_blocks["host_to_gpu"] >= len(requests) - NUM_ON_GPU
    assert not stats(llm).lost_blocks_total
    check_bounds(llm)


def check_bounds(llm: LLM) -> None:
    found = llm._engine.stats()
    tiers, states = tiers_of(llm), states_of(llm)
    assert 0 < states.stored.num_host <= states.stored.host_slots
    assert 0 < tiers.stored.num_host <= tiers.stored.host_slots
    assert found.kv_tiers.num_bytes["host"] <= found.memory_bytes["kv_host"]
    assert all(not block.users for stored in (tiers.stored, states.stored) for block in stored)
    assert found.kv_blocks_free == found.kv_blocks_total
    assert found.state_snapshots_used <= NUM_ON_GPU


@pytest.mark.parametrize(
    ("base", "tier"),
    [*((family, "host") for family in FAMILIES), ("qwen3_5", "disk"), ("nemotron_h", "disk")],
    indirect=["base"],
)
def test_states_from_each_tier_have_the_bits_that_were_computed(base, prompt, tmp_path: Path, tier: str) -> None:
    llm = LLM(str(base), **(options() if tier == "host" else with_disk(base, tmp_path)))
    check_bits(llm, prompt, count=num_prompts(llm, tier))
    assert stats(llm).hit_tokens_total[tier] > 0
    assert (states_of(llm).counts.moved_blocks["disk_to_host"] > 0) == (tier == "disk")
    assert llm._engine.stats().memory_bytes["kv_host"] <= 0.05 * GIB


@pytest.mark.parametrize(("base", "tier"), [("qwen3_5", "host"), ("nemotron_h", "disk")], indirect=["base"])
def test_states_of_a_bfloat16_model_come_back(base, prompt, tmp_path: Path, tier: str) -> None:
    sizes = {"dtype": "bfloat16"}
    llm = LLM(str(base), **(options(**sizes) if tier == "host" else with_disk(base, tmp_path, **sizes)))
    check_bits(llm, prompt, count=num_prompts(llm, tier))


def test_a_state_comes_back_to_blocks_that_have_stayed_on_the_gpu(base, prompt) -> None:
    llm = LLM(str(base), **options(kv_cache_tokens=8192, state_snapshots=2))
    check = prompts(prompt, 6)
    first = [answer(llm, tokens) for tokens in check]
    again = [answer(llm, tokens) for tokens in check]
    assert [bits(output) for output in again] == [bits(output) for output in first]
    assert {output.num_cached_tokens for output in again} == {192}
    assert not stats(llm).hit_tokens_total, "no block has left the GPU"
    assert states_of(llm).counts.moved_blocks["host_to_gpu"] == 6


def test_samples_of_one_prompt_bring_its_state_once(base, prompt) -> None:
    llm = LLM(str(base), **options())
    talks = prompts(prompt, 8)
    first = [answer(llm, tokens) for tokens in talks]
    before = states_of(llm).counts.moved_blocks["host_to_gpu"]
    [output] = llm.generate(
        [{"prompt_token_ids": talks[0]}],
        SamplingParams(n=3, temperature=0, max_tokens=6, ignore_eos=True, logprobs=2),
    )
    assert [sample.token_ids for sample in output.outputs] == [first[0].outputs[0].token_ids] * 3
    assert states_of(llm).counts.moved_blocks["host_to_gpu"] - before == 1


def test_adapters_get_their_own_states_and_nobody_elses(base, prompt, tmp_path: Path) -> None:
    adapter = make_case_adapter(tmp_path / "lora", base, CASES["qwen3_5"])
    llm = LLM(str(base), **options(enable_lora=True, max_loras=2))
    check_bits(llm, prompt, (None, LoRARequest("lora", 1, str(adapter))), count=4)


@pytest.mark.parametrize("base", ["qwen3_5", "falcon_h1"], indirect=True)
def test_both_ranks_bring_their_parts(base, prompt, tmp_path: Path) -> None:
    sizes = with_disk(base, tmp_path)
    names = ("state_snapshots", "kv_host_gib", "kv_disk_dir", "kv_disk_gib")
    llm = start_llm(str(base), 2, **{name: sizes[name] for name in names})
    check_bits(llm, prompt, count=14)  # whose blocks leave the GPU, which holds 128
    assert states_of(llm).counts.moved_blocks["host_to_disk"] > 0
    llm.close()


@pytest.mark.parametrize("overlap", [False, True])
def test_answers_are_right_under_eviction_preemption_and_aborts(base, prompt, tmp_path: Path, overlap: bool) -> None:
    draw, reference = random.Random(1), Reference(base)
    sizes = {"kv_cache_tokens": 400, "max_model_len": 300, "max_num_seqs": 3, "max_num_batched_tokens": 50}
    engine = build_engine(
        EngineConfig(str(base), **with_disk(base, tmp_path, **sizes), async_scheduling=overlap),
    )
    params = SamplingParams(temperature=0, max_tokens=70, ignore_eos=True)
    talks = {f"{i}": prompt(100)[: draw.choice([0, 70, 100])] + prompt(draw.randrange(70, 110)) for i in range(6)}
    talks |= {f"again {name}": tokens for name, tokens in talks.items()}
    answers: dict[str, list[int]] = {name: [] for name in talks}
    aborted: set[str] = set()
    for name, tokens in talks.items():
        engine.add(EngineRequest(request_id=name, prompt_token_ids=tokens, params=params))
    while engine.has_work:
        for output in engine.step():
            answers[output.request_id] += output.token_ids
        arriving = [s.request_id for s in engine.scheduler.running if s.arrival is not None]
        if draw.random() < 0.2 and len(aborted) < 3 and arriving:
            aborted.add(name := draw.choice(arriving))
            engine.abort(name)
    tiers = engine.scheduler.memory.tiers
    assert tiers is not None and tiers.states is not None
    settle(engine)
    while tiers.states.disk.num_jobs:
        tiers.poll()
    found, moved = engine.stats(), tiers.states.counts.moved_blocks
    engine.close()
    assert moved["host_to_gpu"] > 0 and found.kv_blocks_free == found.kv_blocks_total
    for name, tokens in answers.items():
        if name not in aborted:
            assert tokens == reference.greedy(talks[name], params.max_tokens, likely=tokens).tokens, name


def gated(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Holds all reads of the disk back until the event is set."""
    gate, read = threading.Event(), DiskBlocks.read

    def wait(disk: DiskBlocks, slot: int, target: memoryview) -> None:
        assert gate.wait(60)
        read(disk, slot, target)

    monkeypatch.setattr(DiskBlocks, "read", wait)
    return gate


def test_an_abort_while_a_state_comes_in_leaves_nothing_behind(base, prompt, tmp_path: Path, monkeypatch) -> None:
    gate = gated(monkeypatch)
    llm = LLM(str(base), **with_disk(base, tmp_path))
    talks = prompts(prompt, COUNT)
    first = answers(llm, [(tokens, None) for tokens in talks])
    engine = llm._engine
    engine.add(EngineRequest(request_id="returned", prompt_token_ids=talks[0], params=GREEDY))
    for _ in range(5):
        engine.step()
    [returned] = engine.scheduler.running
    assert returned.arrival is not None and returned.arrival.state is not None
    used = engine.stats().state_snapshots_used
    engine.abort("returned")
    assert not engine.has_work and engine.stats().state_snapshots_used == used - 1
    gate.set()
    settle_states(llm)
    check_bounds(llm)
    assert bits(answer(llm, talks[0])) == bits(first[0])


def test_a_slow_disk_lets_the_request_start_again_without_the_tiers(base, prompt, tmp_path: Path, monkeypatch) -> None:
    gate = gated(monkeypatch)
    monkeypatch.setattr("lorafleet.workers.kv_tiers.arrivals.PATIENCE_S", 0.0)
    llm = LLM(str(base), **with_disk(base, tmp_path))
    talks = prompts(prompt, COUNT)
    first = answers(llm, [(tokens, None) for tokens in talks])
    [again] = llm.generate([{"prompt_token_ids": talks[0]}], GREEDY)
    assert bits(again) == bits(first[0]) and again.num_cached_tokens == 0
    assert stats(llm).lost_blocks_total["late"] > 0 and llm._engine.stats().preemptions_total == 1
    gate.set()
    settle_states(llm)
    check_bounds(llm)


def test_a_damaged_state_is_computed_again(base, prompt, tmp_path: Path, monkeypatch) -> None:
    read = DiskBlocks.read

    def damaged(disk: DiskBlocks, slot: int, target: memoryview) -> None:
        if len(target) == state_bytes:
            target[:] = bytes(len(target))
            disk._sums[slot] = disk._sums.get(slot, 0) ^ 1
        read(disk, slot, target)

    monkeypatch.setattr(DiskBlocks, "read", damaged)
    llm = LLM(str(base), **with_disk(base, tmp_path))
    state_bytes = states_of(llm).orders.slot_bytes
    assert state_bytes != tiers_of(llm)._orders.slot_bytes
    talks = prompts(prompt, COUNT)
    first = answers(llm, [(tokens, None) for tokens in talks])
    again = answer(llm, talks[0])
    assert bits(again) == bits(first[0]) and again.num_cached_tokens == 0
    assert stats(llm).lost_blocks_total["damaged"] == 1
    settle_states(llm)
    check_bounds(llm)


def test_a_flush_forgets_states_too(base, prompt) -> None:
    llm = LLM(str(base), **options())
    for tokens in prompts(prompt, 8):
        answer(llm, tokens)
    assert states_of(llm).stored.num_host > 0
    llm._engine.scheduler.memory.flush()
    assert states_of(llm).stored.num_host == 0
    assert answer(llm, prompts(prompt, 8)[0]).num_cached_tokens == 0


def test_tiers_without_room_or_without_snapshots_are_refused(base) -> None:
    with pytest.raises(ConfigError, match="half of it each"):
        LLM(str(base), **options(kv_host_gib=1.5 * 8192 / GIB))
    with pytest.raises(ConfigError, match="no use with state_snapshots=0"):
        LLM(str(base), **options(state_snapshots=0))


class TestOnAGPU:
    pytestmark = pytest.mark.gpu

    @pytest.mark.filterwarnings("ignore")  # FlashInfer and its compiler warn as they please
    @pytest.mark.parametrize("base", ["qwen3_5", "nemotron_h"], indirect=True)
    @pytest.mark.parametrize("tier", ["host", "disk"])
    @pytest.mark.parametrize("eager", [True, False])
    def test_states_from_each_tier_have_the_bits_that_were_computed(
        self, base, prompt, tmp_path: Path, tier: str, eager: bool
    ) -> None:
        on_gpu = {"device": "cuda", "dtype": "bfloat16", "enforce_eager": eager, "attention_backend": "triton"}
        chosen = options(**on_gpu) if tier == "host" else with_disk(base, tmp_path, **on_gpu)
        llm = LLM(str(base), **chosen)
        check_bits(llm, prompt, count=num_prompts(llm, tier))
        assert (states_of(llm).counts.moved_blocks["disk_to_host"] > 0) == (tier == "disk")
        torch.cuda.synchronize()
        llm.close()
