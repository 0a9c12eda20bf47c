"""Adapters of several ranks and modules share the memory for A and B, through the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine_steps import step_until_done
from lorafleet.protocol.engine_config import EngineConfig
from lorafleet.protocol.errors import AdapterTooLarge, ConfigError
from lorafleet.protocol.lora_config import LoRAConfig
from lorafleet.protocol.lora_request import LoRARequest
from lorafleet.protocol.messages import EngineRequest
from lorafleet.protocol.sampling_params import SamplingParams
from lorafleet.workers.engine import Engine
from lorafleet.workers.startup import build_engine
from tiny_models import ALL_TARGETS, make_adapter

RANKS = 8, 16, 32, 8, 16, 8, 4, 8
TARGETS = [ALL_TARGETS, ["q_proj", "v_proj"], ALL_TARGETS, ["q_proj", "k_proj", "v_proj", "o_proj"]] * 2

Start = Callable[..., tuple[Engine, list[LoRARequest]]]


@pytest.fixture(scope="module")
def adapters(fleet, tmp_path_factory) -> list[Path]:
    root, base = tmp_path_factory.mktemp("mixed"), fleet("llama3").base
    return [
        make_adapter(root / f"a{i}", base, seed=70 + i, r=rank, target_modules=targets)
        for i, (rank, targets) in enumerate(zip(RANKS, TARGETS, strict=True))
    ]


@pytest.fixture(scope="module")
def largest(fleet, adapters: list[Path]) -> int:
    """Bytes of A and B of the adapter of rank 32 on every module."""
    engine = build_engine(
        EngineConfig(str(fleet("llama3").base), kv_cache_tokens=512, lora=LoRAConfig(max_lora_rank=32))
    )
    num_bytes = engine.stats().lora_memory_total_bytes // 8
    load(engine, adapters[2])
    assert engine.loras.info(load(engine, adapters[2]).digest).num_bytes <= num_bytes
    engine.close()
    return num_bytes


@pytest.fixture
def start(fleet, adapters: list[Path]) -> Iterator[Start]:
    engines: list[Engine] = []

    def make(**lora: Any) -> tuple[Engine, list[LoRARequest]]:
        """An engine, and the adapters, which are all in host memory."""
        config = LoRAConfig(**{"max_loras": 2, "max_lora_rank": 32, "max_cpu_loras": len(RANKS)} | lora)
        base, limits = str(fleet("llama3").base), {"max_num_seqs": 4, "max_num_batched_tokens": 64}
        engines.append(build_engine(EngineConfig(base, kv_cache_tokens=4096, lora=config, **limits)))
        return engines[-1], [load(engines[-1], path) for path in adapters]

    yield make
    for made in engines:
        made.close()


def load(engine: Engine, path: Path) -> LoRARequest:
    future = engine.load_adapter(LoRARequest(path.name, 1, str(path)))
    step_until_done(engine, future)
    return LoRARequest(path.name, 1, str(path), future.result().digest)


def submit(engine: Engine, name: str, lora: LoRARequest, tokens: list[int], max_tokens: int, tenant: str = "") -> None:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    engine.add(EngineRequest(request_id=name, prompt_token_ids=tokens, params=params, lora=lora, tenant=tenant))


def run(engine: Engine) -> tuple[dict[str, list[int]], list[str]]:
    """Returns every request's tokens, and the order in which they ended. No limit is ever exceeded."""
    answers: dict[str, list[int]] = {}
    ended: list[str] = []
    slots = engine.loras.slots
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            answers.setdefault(output.request_id, []).extend(output.token_ids)
            ended += [output.request_id] if output.finish_reason is not None else []
        assert slots.num_in_use == sum(slot.holders > 0 for slot in slots.slots) <= slots.max_in_use
        taken = sum(extent.num_bytes for slot in slots.slots for extent in slot.extents)
        assert slots.memory.num_used == taken <= slots.memory.num_bytes
        assert taken == sum(slot.adapter.cuts[-1] for slot in slots.slots if slot.adapter is not None)
    return answers, ended


def test_far_more_small_adapters_stay_in_slots_than_of_the_largest_rank(start: Start, largest: int, prompt) -> None:
    engine, loras = start()
    assert engine.stats().lora_memory_total_bytes == 2 * largest
    for turn in range(2):
        for i, lora in enumerate(loras):
            if RANKS[i] <= 16:
                submit(engine, f"{turn}-{i}", lora, prompt(6 + i), 3)
        run(engine)
    stats = engine.stats()
    assert stats.lora_slots_used == stats.lora_activations_total == 7, "they are copied once and stay"
    assert stats.lora_in_use_limit == 2 and stats.lora_slots_total == 8
    assert stats.lora_memory_used_bytes <= 2 * largest


@pytest.mark.parametrize("room", [1.0, 1.7])
def test_adapters_of_all_sizes_take_turns_in_little_memory_with_answers_of_their_own(
    start: Start, fleet, adapters: list[Path], largest: int, prompt, room: float
) -> None:
    engine, loras = start(lora_memory_gib=room * largest / 2**30)
    for turn in range(3):
        for i, lora in enumerate(loras):
            submit(engine, f"{i}-{turn}", lora, prompt(8 + i), 5)
    answers, _ = run(engine)
    for i, path in enumerate(adapters):
        expected = fleet("llama3").reference.greedy(prompt(8 + i), 5, path).tokens
        assert all(answers[f"{i}-{turn}"] == expected for turn in range(3))
    assert engine.stats().lora_evictions_total > 0


def test_small_busy_adapters_do_not_keep_the_memory_from_a_large_one(start: Start, largest: int, prompt) -> None:
    """It needs what all of them take."""
    engine, loras = start(max_loras=4, lora_memory_gib=largest / 2**30)
    small = [loras[i] for i in (0, 1, 3)]
    for i in range(6):
        submit(engine, f"early{i}", small[i % 3], prompt(5), 6 + 3 * i)
    engine.step()
    engine.step()
    submit(engine, "large", loras[2], prompt(5), 2)
    for i in range(40):
        submit(engine, f"late{i}", small[i % 3], prompt(5), 12)
    _, ended = run(engine)
    assert ended.index("large") < 12


def test_a_large_adapter_that_waits_does_not_delay_a_tenant_that_holds_less(start: Start, largest: int, prompt) -> None:
    engine, loras = start(max_loras=4, lora_memory_gib=largest / 2**30)
    for i in (0, 3):
        submit(engine, f"busy{i}", loras[i], prompt(5), 12, "noisy")
    engine.step()
    engine.step()
    submit(engine, "large", loras[2], prompt(5), 2, "noisy")
    submit(engine, "behind", loras[6], prompt(5), 2, "noisy")
    submit(engine, "other", loras[1], prompt(5), 2, "quiet")
    _, ended = run(engine)
    assert ended[0] == "other"
    assert ended.index("large") < ended.index("behind")


def test_a_resident_adapter_gets_its_turn_while_others_use_all_that_may_run(start: Start, prompt) -> None:
    engine, loras = start(max_loras=1)
    for i in (0, 1):
        submit(engine, f"first{i}", loras[i], prompt(5), 2)
    run(engine)
    assert all(engine.loras.slots.find(loras[i].digest) for i in (0, 1))
    for i in range(4):
        submit(engine, f"early{i}", loras[0], prompt(5), 6 + 3 * i)
    engine.step()
    submit(engine, "other", loras[1], prompt(5), 2)
    for i in range(20):
        submit(engine, f"late{i}", loras[0], prompt(5), 12)
    _, ended = run(engine)
    assert ended.index("other") < 6


def test_an_adapter_that_could_never_be_placed_is_refused(start: Start, largest: int) -> None:
    with pytest.raises(AdapterTooLarge, match=rf"allows {largest // 2} .*Raise lora.lora_memory_gib"):
        start(lora_memory_gib=largest / 2 / 2**30)


def test_an_adapter_for_which_pinned_ones_leave_no_memory_is_refused_and_does_not_wait(
    start: Start, largest: int, prompt
) -> None:
    engine, loras = start(lora_memory_gib=largest / 2**30)
    pinned = engine.pin_adapter(loras[0])
    while not pinned.done() or engine.loras.slots.find(loras[0].digest) is None:
        engine.step()
    submit(engine, "kept out", loras[2], prompt(5), 2)
    submit(engine, "fits", loras[1], prompt(5), 2)
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    errors = {output.request_id: str(output.error) for output in outputs if output.error is not None}
    assert list(errors) == ["kept out"]
    assert "Unpin one, or raise lora.lora_memory_gib" in errors["kept out"]


@pytest.mark.parametrize("slots", [1, 9])
def test_slots_are_no_fewer_than_may_run_and_no_more_than_host_memory_holds(slots: int) -> None:
    assert LoRAConfig(max_loras=2).gpu_loras == 4
    assert LoRAConfig(max_loras=2, max_gpu_loras=3).gpu_loras == 3
    with pytest.raises(ConfigError, match=r"max_gpu_loras is .*from lora.max_loras=2 to lora.max_cpu_loras=8"):
        LoRAConfig(max_loras=2, max_cpu_loras=8, max_gpu_loras=slots)


@pytest.mark.parametrize("gib", [-1, float("inf"), True, "4"])
def test_memory_that_is_no_number_of_gib_is_refused(gib: object) -> None:
    with pytest.raises(ConfigError, match="lora_memory_gib"):
        LoRAConfig(lora_memory_gib=gib)  # type: ignore[arg-type]  # It is what the test is about.
