"""The engine with KV tiers: the same bits as when it computed a prompt itself, wherever its blocks have been.

Prompts are computed in chunks of 64 tokens, and all but the last 9 of 201 tokens come back. So the same sums are
computed the second time.
"""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoHaConfig, LoKrConfig, VeraConfig

from family_cases import CASES, make_case
from lorafleet.offline.llm import LLM, LoRARequest, RequestOutput, SamplingParams
from lorafleet.protocol.engine_config import EngineConfig
from lorafleet.protocol.errors import ConfigError
from lorafleet.protocol.messages import EngineRequest, KVTierStats
from lorafleet.workers.engine import Engine
from lorafleet.workers.kv_tiers.disk_blocks import DiskBlocks
from lorafleet.workers.startup import build_engine
from ranks import start_llm
from tests.workers.test_kinds_over_families import lora as lora_config
from tests.workers.test_kinds_over_families import save
from tiny_models import ALL_TARGETS, make_model

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=2)
GIB = 2**30


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tiers") / "base", "llama3")


def start(base: Path, **options: Any) -> LLM:
    sizes = {"kv_cache_tokens": 512, "max_num_batched_tokens": 64, "max_num_seqs": 4, "kv_host_gib": 0.05}
    return LLM(str(base), **{"device": "cpu", **sizes, **options})


def with_disk(llm_options: dict[str, Any], folder: Path, slot_bytes: int = 12288) -> dict[str, Any]:
    """Adds a disk tier behind a host tier of 64 blocks, all of which are written at once."""
    host = (64 * slot_bytes + 1) / GIB
    return llm_options | {"kv_host_gib": host, "kv_disk_dir": str(folder), "kv_disk_gib": 0.05}


def prompts(prompt: Callable[[int], list[int]], count: int = 10) -> list[list[int]]:
    """Returns prompts of 13 blocks. The GPU holds 32 blocks, and the host tier 64 if there is a disk. So the first of
    ten is on disk alone."""
    tokens = prompt(201)
    return [[5 + (token + 17 * i * at) % 290 for at, token in enumerate(tokens)] for i in range(count)]


def answer(llm: LLM, tokens: list[int], lora: LoRARequest | None = None) -> RequestOutput:
    [output] = llm.generate([{"prompt_token_ids": tokens}], GREEDY, lora)
    settle(llm._engine)
    return output


def stats(llm: LLM) -> KVTierStats:
    return llm._engine.stats().kv_tiers


def settle(engine: Engine) -> None:
    """Waits until the jobs of the disk have ended."""
    tiers = engine.scheduler.memory.tiers
    assert tiers is not None
    tiers.poll()
    while tiers.disk.num_jobs:
        tiers.poll()


def bits(output: RequestOutput) -> list[tuple[list[int], Any]]:
    return [(sample.token_ids, sample.logprobs) for sample in output.outputs]


def check_bits(
    llm: LLM, prompt: Callable[[int], list[int]], loras: tuple[LoRARequest | None, ...] = (None,), count: int = 8
) -> None:
    """Compares the answers to prompts that have left the GPU with their first answers."""
    requests = [(tokens, lora) for tokens in prompts(prompt, count) for lora in loras]
    first = [answer(llm, tokens, lora) for tokens, lora in requests]
    for (tokens, lora), expected in zip(requests, first, strict=True):
        again = answer(llm, tokens, lora)
        assert bits(again) == bits(expected)
        assert (expected.num_cached_tokens, again.num_cached_tokens) == (0, 192)
    assert len({str(bits(output)) for output in first}) == len(first)
    hits = stats(llm).hit_tokens_total
    assert sum(hits.values()) > 192 * len(requests) // 2
    assert not stats(llm).lost_blocks_total


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_blocks_from_each_tier_have_the_bits_that_were_computed(base, prompt, tmp_path, dtype: str, tier: str) -> None:
    options: dict[str, Any] = {"dtype": dtype}
    if tier == "disk":
        options = with_disk(options, tmp_path, 12288 if dtype == "float32" else 8192)
    llm = start(base, **options)
    check_bits(llm, prompt)
    assert stats(llm).hit_tokens_total[tier] > 0
    assert stats(llm).num_bytes["host"] <= llm._engine.stats().memory_bytes["kv_host"]


FAMILIES = ["mistral", "gemma2", "gpt_oss", "deepseek_v3", "gemma3n"]  # windows, sinks, latent, shared caches


@pytest.mark.parametrize("family", FAMILIES)
def test_caches_of_every_layout_come_back(prompt, tmp_path: Path, family: str) -> None:
    made = make_case(tmp_path / "base", CASES[family]) if family in CASES else make_model(tmp_path / "base", family)
    check_bits(start(made), prompt)


def test_fp8_caches_come_back(base, prompt, tmp_path: Path) -> None:
    check_bits(start(base, kv_cache_dtype="fp8", **with_disk({}, tmp_path, 4096)), prompt)


def test_adapters_get_their_own_blocks_and_nobody_elses(fleet, prompt) -> None:
    adapters = fleet("llama3").adapters
    loras = tuple(LoRARequest(name, i + 1, str(adapters[name])) for i, name in enumerate(list(adapters)[:2]))
    check_bits(start(fleet("llama3").base, enable_lora=True, max_loras=2), prompt, (None, *loras), count=3)


@pytest.mark.parametrize(("dtype", "ranks"), [("float32", 1), ("bfloat16", 1), ("float32", 2)])
def test_blocks_of_adapters_of_every_kind_come_back_from_both_tiers(base, prompt, tmp_path, dtype, ranks) -> None:
    kinds = {
        "dora": lora_config(use_dora=True),
        "pissa": lora_config(init_lora_weights="pissa"),
        "tokens": lora_config(trainable_token_indices=[7, 11]),
        "norms": lora_config(modules_to_save=["post_attention_layernorm"]),
        "loha": LoHaConfig(r=3, alpha=5, target_modules=ALL_TARGETS),
        "lokr": LoKrConfig(r=2, alpha=3, target_modules=ALL_TARGETS),
        "ia3": IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]),
        "vera": VeraConfig(r=8, target_modules=ALL_TARGETS),
    }
    if ranks > 1:  # which take longer
        kinds = {kind: kinds[kind] for kind in ("dora", "norms", "loha", "ia3")}
    paths = {kind: save(tmp_path / kind, base, config) for kind, config in kinds.items()}
    loras = [None, *(LoRARequest(kind, i + 1, str(path)) for i, (kind, path) in enumerate(paths.items()))]
    slot_bytes = (12288 if dtype == "float32" else 8192) // (1 if ranks == 1 else 2)
    options = with_disk({"enable_lora": True, "max_loras": 8}, tmp_path, slot_bytes)
    llm = start(base, dtype=dtype, **options) if ranks == 1 else start_llm(str(base), ranks, **options)
    tokens = prompt(201)  # the same for all, so that only the adapters tell their blocks apart
    first = [answer(llm, tokens, lora) for lora in loras]
    # The ranks' GPUs hold more.
    for other in prompts(prompt, 12 if ranks == 1 else 16)[1:]:  # all blocks leave the GPU, and the oldest the host
        answer(llm, other)
    second = [answer(llm, tokens, lora) for lora in loras]
    assert [bits(output) for output in second] == [bits(output) for output in first]
    assert {output.num_cached_tokens for output in second} == {192}
    assert len({str(bits(output)) for output in first}) == len(loras)
    assert stats(llm).hit_tokens_total["disk"] > 0 and not stats(llm).lost_blocks_total
    llm.close()


def test_both_ranks_bring_their_parts(base, prompt, tmp_path: Path) -> None:
    # Each rank has one of two KV heads. Its GPU holds 128 blocks.
    llm = start_llm(str(base), 2, **with_disk({}, tmp_path, 8192))
    talks = prompts(prompt, 16)
    first = [answer(llm, tokens) for tokens in talks]
    second = [answer(llm, tokens) for tokens in talks]
    assert [bits(output) for output in second] == [bits(output) for output in first]
    assert {output.num_cached_tokens for output in second} == {192}
    assert stats(llm).hit_tokens_total["disk"] > 0 and stats(llm).hit_tokens_total["host"] > 0
    llm.close()


def test_answers_are_right_under_preemption_and_aborts(fleet, prompt, tmp_path: Path) -> None:
    draw, reference = random.Random(1), fleet("llama3").reference
    config = EngineConfig(
        str(fleet("llama3").base),
        device="cpu",
        kv_cache_tokens=400,
        max_model_len=300,
        max_num_seqs=3,
        max_num_batched_tokens=50,
        async_scheduling=True,
        **with_disk({}, tmp_path),
    )
    engine = build_engine(config)
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    talks = {f"{i}": prompt(100)[: draw.choice([0, 70, 100])] + prompt(draw.randrange(60, 110)) for i in range(6)}
    talks |= {f"again {name}": tokens for name, tokens in talks.items()}
    answers: dict[str, list[int]] = {name: [] for name in talks}
    aborted: set[str] = set()
    for name, tokens in talks.items():
        engine.add(EngineRequest(request_id=name, prompt_token_ids=tokens, params=params))
    while engine.has_work:
        for output in engine.step():
            answers[output.request_id] += output.token_ids
        if draw.random() < 0.01 and len(aborted) < 3 and engine.scheduler.running:
            aborted.add(name := draw.choice([s.request_id for s in engine.scheduler.running]))
            engine.abort(name)
    settle(engine)
    found = engine.stats()
    engine.close()
    assert found.preemptions_total > 0 and found.kv_tiers.hit_tokens_total and aborted
    for name, tokens in answers.items():
        if name not in aborted:
            assert tokens == reference.greedy(talks[name], params.max_tokens, likely=tokens).tokens, name


def test_an_abort_while_blocks_come_in_leaves_nothing_behind(base, prompt, tmp_path: Path, monkeypatch) -> None:
    gate, read = threading.Event(), DiskBlocks.read

    def gated(disk: DiskBlocks, slot: int, target: memoryview) -> None:
        assert gate.wait(60)
        read(disk, slot, target)

    monkeypatch.setattr(DiskBlocks, "read", gated)
    llm = start(base, **with_disk({}, tmp_path))
    first = [answer(llm, tokens) for tokens in prompts(prompt)]
    engine = llm._engine
    engine.add(EngineRequest(request_id="returned", prompt_token_ids=prompts(prompt)[0], params=GREEDY))
    other = EngineRequest(request_id="other", prompt_token_ids=prompt(40), params=GREEDY)
    engine.add(other)
    tokens: list[int] = []
    while len(tokens) < 6:  # the other request runs meanwhile
        for output in engine.step():
            assert output.request_id == "other"
            tokens += output.token_ids
    assert engine.stats().num_running == 1
    engine.abort("returned")
    assert not engine.has_work
    gate.set()
    settle(engine)
    assert engine.stats().kv_blocks_free == engine.stats().kv_blocks_total
    assert bits(answer(llm, prompts(prompt)[0])) == bits(first[0])


def test_a_damaged_block_is_computed_again(base, prompt, tmp_path: Path, monkeypatch) -> None:
    read = DiskBlocks.read

    def damaged(disk: DiskBlocks, slot: int, target: memoryview) -> None:
        os.pwrite(disk.descriptor, b"damage", slot * len(target) + 1000)
        read(disk, slot, target)

    monkeypatch.setattr(DiskBlocks, "read", damaged)
    llm = start(base, **with_disk({}, tmp_path))
    first = [answer(llm, tokens) for tokens in prompts(prompt)]
    again = answer(llm, prompts(prompt)[0])
    assert bits(again) == bits(first[0])
    assert again.num_cached_tokens == 0
    assert stats(llm).lost_blocks_total["damaged"] > 0


def test_a_full_disk_turns_writing_off_once_and_requests_go_on(base, prompt, tmp_path, monkeypatch, caplog) -> None:
    def full(_disk: DiskBlocks, _slot: int, _source: memoryview) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(DiskBlocks, "write", full)
    llm = start(base, **with_disk({}, tmp_path))
    assert stats(llm).disk_takes_blocks == 1
    talks = prompts(prompt)
    first = [answer(llm, tokens) for tokens in talks]
    again = [answer(llm, tokens) for tokens in talks]  # from the host tier in part, so in other chunks
    assert [output.outputs[0].token_ids for output in again] == [output.outputs[0].token_ids for output in first]
    assert stats(llm).disk_takes_blocks == 0 and stats(llm).num_bytes["disk"] == 0
    assert caplog.text.count("takes no more blocks until a restart, since a write failed: No space left") == 1


def test_without_tiers_there_is_nothing_of_them(base) -> None:
    llm = start(base, kv_host_gib=0)
    assert llm._engine.scheduler.memory.tiers is None
    assert stats(llm) == KVTierStats() and "kv_host" not in llm._engine.stats().memory_bytes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_host_gib": -1}, "kv_host_gib=-1 must be a number of GiB"),
        ({"kv_host_gib": 1e300}, r"kv_host_gib=1e\+300 must be a number of GiB in \[0, 1048576\]"),
        ({"kv_host_gib": 1, "enable_prefix_caching": False}, "no use with enable_prefix_caching=False"),
        ({"kv_host_gib": 1, "kv_disk_gib": 1}, "kv_disk_gib has no use without kv_disk_dir"),
        ({"kv_host_gib": 1, "kv_disk_dir": "/tmp"}, "kv_disk_dir has no use without kv_disk_gib"),
        ({"kv_disk_gib": 1, "kv_disk_dir": "/tmp"}, "kv_disk_dir has no use without kv_host_gib"),
    ],
)
def test_options_without_use_are_refused(base, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(str(base), **options)


def test_tiers_that_cannot_be_had_are_refused(base, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="less than one KV block"):
        start(base, kv_host_gib=1e-6)
    with pytest.raises(ConfigError, match="No such file"):
        start(base, **with_disk({}, tmp_path / "missing"))


class TestOnAGPU:
    pytestmark = pytest.mark.gpu

    @pytest.mark.filterwarnings("ignore")  # FlashInfer and its compiler warn as they please
    @pytest.mark.parametrize("tier", ["host", "disk"])
    @pytest.mark.parametrize("eager", [True, False])
    @pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
    def test_blocks_from_each_tier_have_the_bits_that_were_computed(
        self, prompt, tmp_path: Path, tier: str, eager: bool, kv_cache_dtype: str
    ) -> None:
        shape = {"hidden_size": 512, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 128}
        base = make_model(tmp_path / "wide", "llama3", dtype="bfloat16", **shape)
        options: dict[str, Any] = {"device": "cuda", "enforce_eager": eager, "kv_cache_dtype": kv_cache_dtype}
        if tier == "disk":  # 3 layers x (keys, values) x 16 tokens x 128 numbers
            options = with_disk(options, tmp_path, 24576 if kv_cache_dtype == "auto" else 12288)
        llm = start(base, attention_backend="triton", max_num_batched_tokens=64, **options)
        check_bits(llm, prompt)
        assert stats(llm).hit_tokens_total[tier] > 0
        torch.cuda.synchronize()
        llm.close()
