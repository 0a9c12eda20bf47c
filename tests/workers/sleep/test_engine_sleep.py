"""An engine that sleeps gives its memory back, and answers as before when it has woken up."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from family_cases import CASES, make_case, make_case_adapter
from generic_cases import make_generic
from lorafleet.protocol.engine_control import (
    ALL_MEMORY,
    FlushPrefixes,
    MemoryTag,
    PauseEngine,
    ResumeEngine,
    SleepEngine,
    SleepLevel,
    WakeEngine,
)
from lorafleet.protocol.errors import ConfigError, InvalidRequest, Overloaded, QueueTimeout
from lorafleet.protocol.lora_config import LoRAConfig
from lorafleet.protocol.lora_request import LoRARequest
from lorafleet.workers.sleep import rank_memory
from lorafleet.workers.sleep.storages import SizedStorages
from stepped_engine import NUM_TOKENS, SteppedEngine
from tiny_models import make_adapter, make_model

Prompt = Callable[[int], list[int]]
SEEDED = {"temperature": 0.8, "seed": 3, "logprobs": 1}


@pytest.fixture(params=[False, True], ids=["one-step", "overlapping"])
def stepped(request: pytest.FixtureRequest, fleet: Callable[[str], Any]) -> Iterator[SteppedEngine]:
    made = SteppedEngine(fleet("llama3").base, async_scheduling=request.param)
    yield made
    made.engine.close()


@pytest.fixture(autouse=True)
def nearly_nothing_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights of tiny models are really read from the checkpoint again."""
    monkeypatch.setattr(rank_memory, "SMALL_BYTES", 256)


def held_bytes(stepped: SteppedEngine, tag: MemoryTag) -> int:
    steps = stepped.engine.runner.steps
    tensors = list(steps.model.parameters())
    if tag == "kv_cache":
        states = [] if steps.states is None else steps.states.tensors
        tensors = [tensor for cache in steps.caches for tensor in (cache.k_NPGD, cache.v_NPGD)] + states
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def answers(stepped: SteppedEngine, loras: list[LoRARequest], prompt: Prompt) -> list[Any]:
    """Returns tokens and logprobs of requests that run one after the other, so that no step depends on the timing."""
    found = []
    stepped.order(FlushPrefixes())
    for i, lora in enumerate([None, *loras]):
        for kind, params in (("greedy", {"logprobs": 1}), ("drawn", SEEDED)):
            stepped.ended.clear()
            name = f"{kind} {i}"
            stepped.add(name, prompt(130 + 7 * i), lora, params=params)
            stepped.until(lambda name=name: name in stepped.ended)  # type: ignore[misc]
            found.append((stepped.tokens.pop(name), stepped.logprobs.pop(name)))
    return found


def check_same_answers(stepped: SteppedEngine, loras: list[LoRARequest], prompt: Prompt, *levels: SleepLevel) -> None:
    """Compares answers before the first sleep with those after each, bit by bit."""
    expected = answers(stepped, loras, prompt)
    assert len({str(tokens) for tokens, _ in expected}) > len(loras), "adapters make no difference"
    before = {tag: held_bytes(stepped, tag) for tag in ALL_MEMORY}
    for level in levels:
        stepped.order(SleepEngine(level))
        assert held_bytes(stepped, "weights") == held_bytes(stepped, "kv_cache") == 0
        assert stepped.engine.stats().sleeping == 1
        assert stepped.engine.stats().memory_bytes["weights"] == 0
        stepped.order(WakeEngine())
        assert {tag: held_bytes(stepped, tag) for tag in before} == before
        assert stepped.engine.stats().sleeping == 0
        assert answers(stepped, loras, prompt) == expected


@pytest.mark.parametrize("family", ["llama3", "qwen3_moe"])
def test_answers_are_bit_identical_after_a_sleep(fleet: Callable[[str], Any], prompt: Prompt, family: str) -> None:
    made = fleet(family)
    stepped = SteppedEngine(made.base, lora=LoRAConfig(max_loras=2))
    loras = [stepped.load(name, path) for name, path in list(made.adapters.items())[:3]]
    check_same_answers(stepped, loras, prompt, 1, 1, 2, 1)  # The second sleep uses the first one's copy.
    stepped.engine.close()


def test_a_recurrent_model_forgets_its_states_and_answers_as_before(tmp_path: Path, prompt: Prompt) -> None:
    base = make_case(tmp_path / "base", CASES["qwen3_5"])
    adapter = make_case_adapter(tmp_path / "dora", base, CASES["qwen3_5"], use_dora=True)
    stepped = SteppedEngine(base)
    check_same_answers(stepped, [stepped.load("dora", adapter)], prompt, 1, 2)
    assert stepped.engine.stats().state_snapshots_used > 0
    stepped.order(SleepEngine())
    assert stepped.engine.stats().state_snapshots_used == 0
    stepped.engine.close()


@pytest.mark.parametrize("method", ["nf4", "fp8"])
def test_weights_that_the_engine_quantized_are_quantized_again(
    fleet: Callable[[str], Any], prompt: Prompt, method: str
) -> None:
    stepped = SteppedEngine(fleet("llama3").base, quantization=method)
    check_same_answers(stepped, [stepped.load("all", fleet("llama3").adapters["all"])], prompt, 2)
    stepped.engine.close()


def test_a_model_of_transformers_sleeps_at_level_1_only(tmp_path: Path, prompt: Prompt) -> None:
    stepped = SteppedEngine(make_generic(tmp_path, "olmo2"), lora=None, model_impl="transformers", kv_cache_tokens=512)
    expected = answers(stepped, [], lambda length: prompt(length - 100))
    stepped.order(SleepEngine(1))
    assert held_bytes(stepped, "kv_cache") == 0  # On a CPU the weights are in mapped files, which take no memory.
    with pytest.raises(InvalidRequest, match="use level 1"):
        stepped.engine.control(SleepEngine(2))
    stepped.order(WakeEngine())
    assert answers(stepped, [], lambda length: prompt(length - 100)) == expected
    stepped.engine.close()


@pytest.mark.parametrize("level", [1, 2])
def test_keep_loses_no_answer_that_has_begun(
    stepped: SteppedEngine, fleet: Callable[[str], Any], prompt: Prompt, level: SleepLevel
) -> None:
    made, ids = fleet("llama3"), prompt(9)
    lora = stepped.load("policy", made.adapters["all"])
    stepped.add("base", ids)
    stepped.add("adapted", ids, lora)
    stepped.until(lambda: all(len(stepped.tokens.get(name, ())) >= 4 for name in ("base", "adapted")))
    stepped.order(SleepEngine(level, "keep"))
    counts = {name: len(tokens) for name, tokens in stepped.tokens.items()}
    stepped.add("late", ids, lora)
    assert held_bytes(stepped, "weights") == 0 and not stepped.engine.has_work
    for _ in range(5):
        stepped.step()
    assert counts == {name: len(tokens) for name, tokens in stepped.tokens.items()}
    assert stepped.engine.stats().paused == "keep"
    stepped.order(WakeEngine())
    stepped.until(lambda: len(stepped.ended) == 3)
    assert stepped.tokens["base"] == made.reference.greedy(ids, NUM_TOKENS).tokens
    expected = made.reference.greedy(ids, NUM_TOKENS, made.adapters["all"]).tokens
    assert stepped.tokens["adapted"] == stepped.tokens["late"] == expected
    assert stepped.engine.stats().kv_blocks_free == stepped.engine.stats().kv_blocks_total


@pytest.mark.parametrize(("mode", "reason"), [("wait", "length"), ("abort", "abort")])
def test_the_other_modes_end_what_has_begun(stepped: SteppedEngine, prompt: Prompt, mode: Any, reason: str) -> None:
    stepped.add("a", prompt(9))
    stepped.until(lambda: "a" in stepped.tokens)
    sleeping = stepped.engine.control(SleepEngine(1, mode))
    stepped.add("b", prompt(9))
    stepped.until(sleeping.done)
    assert stepped.ended == {"a": reason} and "b" not in stepped.tokens
    stepped.order(WakeEngine())
    stepped.until(lambda: "b" in stepped.ended)
    assert stepped.ended["b"] == "length"


def test_the_parts_wake_up_one_after_the_other(stepped: SteppedEngine, prompt: Prompt) -> None:
    stepped.add("a", prompt(9))
    stepped.until(lambda: "a" in stepped.tokens)
    stepped.order(SleepEngine(1, "keep", ("kv_cache",)))
    assert held_bytes(stepped, "kv_cache") == 0 < held_bytes(stepped, "weights")
    stepped.order(SleepEngine(1, "abort", ("weights", "kv_cache")))  # It sleeps already, so that nothing is aborted.
    assert held_bytes(stepped, "weights") == 0
    stepped.order(WakeEngine(("weights",)))
    assert held_bytes(stepped, "kv_cache") == 0 < held_bytes(stepped, "weights")
    assert stepped.engine.stats().sleeping == 1 and not stepped.engine.has_work
    stepped.order(WakeEngine(("kv_cache",)))
    stepped.until(lambda: "a" in stepped.ended)
    stepped.order(WakeEngine())  # Nothing is asleep.
    assert stepped.ended["a"] == "length"


def test_a_pause_outlasts_the_sleep_within_it(stepped: SteppedEngine, prompt: Prompt) -> None:
    stepped.add("a", prompt(9))
    stepped.until(lambda: "a" in stepped.tokens)
    stepped.order(PauseEngine("keep"))
    stepped.order(SleepEngine(1, "wait"))  # It lets the request end, whatever pause is in force.
    assert stepped.ended["a"] == "length"
    stepped.add("b", prompt(9))
    stepped.order(WakeEngine())
    assert stepped.engine.stats().paused == "keep" and not stepped.engine.has_work
    stepped.order(ResumeEngine())
    stepped.until(lambda: "b" in stepped.ended)
    stepped.order(SleepEngine())
    stepped.order(PauseEngine("wait"))
    stepped.order(ResumeEngine())
    assert stepped.engine.stats().paused == "keep", "a resume does not wake up"


def test_orders_are_carried_out_one_after_the_other(stepped: SteppedEngine, prompt: Prompt) -> None:
    stepped.add("a", prompt(9))
    orders = [stepped.engine.control(order) for order in (SleepEngine(1, "wait"), WakeEngine(), SleepEngine(2))]
    stepped.until(orders[-1].done)
    assert all(order.done() for order in orders) and held_bytes(stepped, "weights") == 0
    assert stepped.ended == {"a": "abort"} or stepped.ended == {"a": "length"}


def test_a_sleep_forgets_prefixes_and_empties_slots(
    stepped: SteppedEngine, fleet: Callable[[str], Any], prompt: Prompt
) -> None:
    lora = stepped.load("policy", fleet("llama3").adapters["all"])
    pinned = stepped.engine.pin_adapter(lora)
    stepped.until(pinned.done)
    for name in ("one", "again"):
        stepped.add(name, prompt(40), lora)
        stepped.until(lambda name=name: name in stepped.ended)  # type: ignore[misc]
    hits = stepped.engine.stats().prefix_cache_hits_total
    assert hits > 0 and stepped.engine.stats().lora_slots_pinned == 1
    stepped.order(SleepEngine())
    stats = stepped.engine.stats()
    assert not any(stats.resident_slots) and stats.resident_cpu == [lora.digest] and stats.lora_slots_pinned == 0
    new = stepped.load("other", fleet("llama3").adapters["qv"])  # It comes into host memory while the engine sleeps.
    stepped.order(WakeEngine())
    stepped.add("last", prompt(40), new)
    stepped.add("pinned", prompt(40), lora)
    stepped.until(lambda: {"last", "pinned"} <= stepped.ended.keys())
    stats = stepped.engine.stats()
    assert stats.prefix_cache_hits_total == hits
    assert {lora.digest, new.digest} <= set(stats.resident_slots) and stats.lora_slots_pinned == 1
    assert (
        stepped.tokens["last"]
        == fleet("llama3").reference.greedy(prompt(40), NUM_TOKENS, fleet("llama3").adapters["qv"]).tokens
    )


@pytest.mark.parametrize("family", ["llama3", "qwen3_5"])
def test_lower_tiers_keep_prefixes_while_the_gpu_forgets_them(
    fleet: Callable[[str], Any], prompt: Prompt, tmp_path: Path, family: str
) -> None:
    base = make_case(tmp_path / "base", CASES[family]) if family in CASES else fleet(family).base
    tiered = SteppedEngine(base, kv_host_gib=0.05)
    tiered.add("before", prompt(200), params={"logprobs": 1})
    tiered.until(lambda: "before" in tiered.ended)
    levels: tuple[SleepLevel, ...] = (1, 2)
    for level in levels:
        tiered.order(SleepEngine(level))
        tiered.order(WakeEngine())
        name = f"after {level}"
        tiered.add(name, prompt(200), params={"logprobs": 1})
        tiered.until(lambda name=name: name in tiered.ended)  # type: ignore[misc]
        assert tiered.tokens[name] == tiered.tokens["before"]
    assert tiered.engine.stats().kv_tiers.hit_tokens_total["host"] >= 2 * 192
    tiered.add("kept", prompt(200))
    tiered.step()  # Its blocks arrive while the engine falls asleep.
    tiered.order(SleepEngine(1, "keep"))
    tiered.order(WakeEngine())
    tiered.until(lambda: "kept" in tiered.ended)
    assert tiered.tokens["kept"] == tiered.tokens["before"]
    tiered.engine.close()


def test_an_adapter_that_needs_the_weights_is_not_loaded_while_they_sleep(tmp_path: Path, prompt: Prompt) -> None:
    base = make_case(tmp_path / "base", CASES["qwen3_5"])
    adapter = make_case_adapter(tmp_path / "dora", base, CASES["qwen3_5"], use_dora=True)
    stepped = SteppedEngine(base)
    stepped.order(SleepEngine())
    with pytest.raises(Overloaded, match="computed from the base's weights, which are asleep"):
        stepped.load("dora", adapter)
    stepped.order(WakeEngine(("weights",)))
    lora = stepped.load("dora", adapter)
    stepped.order(WakeEngine())
    stepped.add("a", prompt(9), lora)
    stepped.until(lambda: "a" in stepped.ended)
    stepped.engine.close()


def test_requests_time_out_while_the_engine_sleeps(stepped: SteppedEngine, prompt: Prompt) -> None:
    stepped.order(SleepEngine())
    stepped.add("a", prompt(9), queue_timeout_s=0.01)
    with pytest.raises(QueueTimeout):
        stepped.until(lambda: "a" in stepped.ended)
    stepped.order(FlushPrefixes())
    stepped.order(WakeEngine())


def test_a_checkpoint_that_is_gone_leaves_the_engine_asleep(
    tmp_path: Path, fleet: Callable[[str], Any], prompt: Prompt
) -> None:
    base = tmp_path / "base"
    shutil.copytree(fleet("llama3").base, base)
    stepped = SteppedEngine(base)
    stepped.order(SleepEngine(2))
    away = base / "model.safetensors"
    away.rename(tmp_path / "away")
    with pytest.raises(ConfigError, match="cannot be read again, and stay asleep"):
        stepped.order(WakeEngine())
    assert held_bytes(stepped, "weights") == held_bytes(stepped, "kv_cache") == 0
    (tmp_path / "away").rename(away)
    stepped.order(WakeEngine())
    stepped.add("a", prompt(9))
    stepped.until(lambda: "a" in stepped.ended)
    assert stepped.tokens["a"] == fleet("llama3").reference.greedy(prompt(9), NUM_TOKENS).tokens
    stepped.engine.close()


def test_without_enough_memory_the_engine_stays_asleep(
    stepped: SteppedEngine, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    stepped.order(SleepEngine())
    allocate, failures = SizedStorages.allocate, [torch.OutOfMemoryError("out of memory")]

    def allocate_later(storages: SizedStorages) -> None:
        allocate(storages)
        if failures:
            raise failures.pop()

    monkeypatch.setattr(SizedStorages, "allocate", allocate_later)
    with pytest.raises(Overloaded, match="GiB are needed to wake up"):
        stepped.order(WakeEngine())
    assert held_bytes(stepped, "weights") == held_bytes(stepped, "kv_cache") == 0
    assert stepped.engine.stats().sleeping == 1
    stepped.order(WakeEngine())
    stepped.add("a", prompt(9))
    stepped.until(lambda: "a" in stepped.ended)


def test_an_idle_engine_captures_nothing_while_it_sleeps(stepped: SteppedEngine) -> None:
    late = stepped.engine.runner.steps.late
    stepped.order(SleepEngine())
    assert late.is_suspended
    stepped.order(WakeEngine())
    assert not late.is_suspended


def train(base: Path) -> None:
    """Changes the weights of a checkpoint as a trainer may, with the same sizes and times of the files."""
    for path in base.glob("*.safetensors"):
        times, generator = path.stat(), torch.Generator().manual_seed(1)
        weights = {
            name: tensor * (1 + 0.3 * torch.randn(tensor.shape, generator=generator).to(tensor.dtype))
            for name, tensor in load_file(path).items()
        }
        save_file(weights, path, {"format": "pt"})
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


# Options of an adapter and of the engine, by family.
CHANGED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # An adapter's bias replaces the base's, which is subtracted from it.
    "qwen2": ({"use_dora": True, "bias": "all"}, {}),
    "llama3": ({"init_lora_weights": "pissa"}, {"quantization": "nf4"}),
    "qwen3_moe": ({}, {}),
    "deepseek_v3": ({"use_dora": True}, {}),
    "qwen3_5": ({"use_dora": True}, {}),
    "nemotron_h": ({}, {}),
}


@pytest.mark.parametrize("family", CHANGED)
def test_nothing_of_the_former_weights_is_left_after_the_checkpoint_has_changed(
    tmp_path: Path, prompt: Prompt, family: str, caplog: pytest.LogCaptureFixture
) -> None:
    base, case = tmp_path / "base", CASES.get(family)
    adapter_options, options = CHANGED[family]
    if case is None:
        make_model(base, family)
        adapter = make_adapter(tmp_path / "adapter", base, **adapter_options)
    else:
        make_case(base, case)
        adapter = make_case_adapter(tmp_path / "adapter", base, case, **adapter_options)
    stepped = SteppedEngine(base, kv_host_gib=0.05, **options)
    former = answers(stepped, [stepped.load("a", adapter)], prompt)
    with caplog.at_level("WARNING"):
        stepped.order(SleepEngine(2))
        stepped.order(WakeEngine())
        assert "other weights" not in caplog.text
        stepped.order(SleepEngine(2, tags=("weights",)))
        train(base)
        stepped.order(WakeEngine())
    assert caplog.text.count("the base has other weights now") == 1
    hits = stepped.engine.stats().kv_tiers.hit_tokens_total
    later = [
        found
        for i in range(2)  # The second time from the caches.
        for found in answers(stepped, [stepped.load("a", adapter)], prompt)
    ]
    assert stepped.engine.stats().kv_tiers.hit_tokens_total == hits
    fresh = SteppedEngine(base, kv_host_gib=0.05, **options)
    expected = answers(fresh, [fresh.load("a", adapter)], prompt)
    assert later == 2 * expected and all(old != new for old, new in zip(former, expected, strict=True))
    assert stepped.engine.runner.memory.base.digest == fresh.engine.runner.memory.base.digest
    stepped.engine.close()
    fresh.engine.close()
