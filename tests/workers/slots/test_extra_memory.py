"""The extras of adapters in slots: their budget, who must leave for whom, and that no queued step loses its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from adapter_forms import applied, make_forms, norms, plain, served_from
from engine_steps import step_until_done
from lorafleet.protocol.engine_config import EngineConfig
from lorafleet.protocol.errors import AdapterTooLarge, ConfigError
from lorafleet.protocol.lora_config import LoRAConfig
from lorafleet.protocol.lora_request import LoRARequest
from lorafleet.protocol.messages import EngineRequest
from lorafleet.protocol.sampling_params import SamplingParams
from lorafleet.workers.adapters.forms import AdapterForms
from lorafleet.workers.engine import Engine
from lorafleet.workers.slots.extra_block import ExtraBlock
from lorafleet.workers.slots.extra_memory import ExtraMemory
from lorafleet.workers.startup import build_engine

CPU = torch.device("cpu")
NUM_NORMS, NUM_ADAPTERS = 7, 4  # of the base with three layers, in 256 bytes each
ADAPTER_BYTES = NUM_NORMS * 256


class Event:
    """Stands for a CUDA event."""

    def __init__(self) -> None:
        self.happened = False

    def query(self) -> bool:
        return self.happened

    def synchronize(self) -> None:
        self.happened = True


def block(num_bytes: int) -> ExtraBlock:
    return ExtraBlock(torch.zeros(num_bytes, dtype=torch.uint8), {})


def test_tensors_are_found_again_by_name() -> None:
    tensors = {
        "a": torch.randn(3),
        "b": torch.randn(5, 2).bfloat16(),
        "c": torch.arange(4),
        "none": torch.zeros(0, 8),
    }
    extra = ExtraBlock.of(tensors, lambda size: torch.zeros(size, dtype=torch.uint8))
    assert extra.num_bytes == ExtraBlock.size_of(tensors) == 3 * 256
    for name, tensor in tensors.items():
        found = extra.get(name)
        assert found is not None and found.dtype == tensor.dtype and torch.equal(found, tensor)
    moved = extra.in_memory(extra.block.clone())
    assert torch.equal(moved.get("b"), tensors["b"]) and moved.address("b") == moved.block.data_ptr() + 256
    assert moved.get("d") is None and moved.address("d") == 0


def test_what_is_leaving_counts_until_the_steps_that_read_it_have_ended() -> None:
    memory, event = ExtraMemory(100, CPU), Event()
    first = memory.place(block(60))
    assert memory.missing(40) == 0 and memory.missing(60) == 20
    memory.give_back(first, event)
    assert memory.num_bytes == 0 and memory.missing(60) == 0 and not memory.is_free(60) and memory.is_free(40)
    event.happened = True
    assert memory.is_free(100)


def test_who_may_not_decide_waits_for_what_is_leaving() -> None:
    memory, event = ExtraMemory(100, CPU), Event()
    memory.give_back(memory.place(block(60)), event)
    memory.place(block(100))
    assert event.happened and memory.num_bytes == 100


@pytest.mark.parametrize("gib", [-1, float("inf"), True, "4"])
def test_a_budget_that_is_none_is_refused(gib: object) -> None:
    with pytest.raises(ConfigError, match="extra_memory_gib"):
        LoRAConfig(extra_memory_gib=gib)


@pytest.fixture(scope="module")
def forms(fleet) -> dict[str, AdapterForms]:
    return make_forms(fleet("llama3").base, {f"n{i}": norms for i in range(NUM_ADAPTERS)} | {"plain": plain})


@pytest.fixture
def start(fleet, forms, tmp_path, monkeypatch):
    engines: list[Engine] = []

    def make(room_for: float, max_loras: int = 3, **options: int) -> tuple[Engine, dict[str, LoRARequest]]:
        """An engine with a budget for so many adapters of norms, and all adapters in host memory."""
        paths = served_from(tmp_path, forms, monkeypatch)
        budget = room_for * ADAPTER_BYTES / 2**30
        lora = LoRAConfig(max_loras=max_loras, max_gpu_loras=max_loras, max_cpu_loras=8, extra_memory_gib=budget)
        config = EngineConfig(model=str(fleet("llama3").base), kv_cache_tokens=4096, lora=lora, **options)
        engines.append(build_engine(config))
        return engines[-1], {name: loaded(engines[-1], path) for name, path in paths.items()}

    yield make
    for made in engines:
        made.close()


def loaded(engine: Engine, path: Path) -> LoRARequest:
    future = engine.load_adapter(LoRARequest(path.name, 1, str(path)))
    step_until_done(engine, future)
    return LoRARequest(path.name, 1, str(path), future.result().digest)


def submit(engine: Engine, name: str, lora: LoRARequest | None, tokens: list[int], max_tokens: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    engine.add(EngineRequest(request_id=name, prompt_token_ids=tokens, params=params, lora=lora))


def run(engine: Engine) -> tuple[dict[str, list[int]], list[str]]:
    """Every request's tokens, and the order in which they ended. The budget is kept all the time."""
    answers: dict[str, list[int]] = {}
    ended: list[str] = []
    memory = engine.loras.slots.extra_memory
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            answers.setdefault(output.request_id, []).extend(output.token_ids)
            ended += [output.request_id] if output.finish_reason is not None else []
        assert memory.num_bytes <= memory.limit
        in_slots = [slot.extra.num_bytes for slot in engine.loras.slots.slots if slot.extra is not None]
        assert memory.num_bytes == sum(in_slots)
    return answers, ended


@torch.inference_mode()
def greedy(model, tokens: list[int], count: int) -> list[int]:
    whole = list(tokens)
    for _ in range(count):
        whole.append(int(model(input_ids=torch.tensor([whole])).logits[0, -1].argmax()))
    return whole[len(tokens) :]


@pytest.mark.parametrize("room_for", [1, 2.5])
def test_adapters_with_more_extras_than_the_budget_holds_all_get_their_own_answers(
    start, fleet, forms, prompt, room_for
) -> None:
    engine, loras = start(room_for)
    for turn in range(3):
        for i, (name, lora) in enumerate(loras.items()):
            submit(engine, f"{name}-{turn}", lora, prompt(8 + i), 5)
    answers, _ = run(engine)
    for i, (name, form) in enumerate(forms.items()):
        expected = greedy(applied(fleet("llama3").base, form), prompt(8 + i), 5)
        assert all(answers[f"{name}-{turn}"] == expected for turn in range(3))


def test_an_adapter_that_could_never_be_placed_is_refused_with_bytes_bound_and_remedy(start) -> None:
    with pytest.raises(
        AdapterTooLarge, match=rf"{ADAPTER_BYTES} bytes.* allows {ADAPTER_BYTES // 2} .*extra_memory_gib"
    ):
        start(0.5)


def test_only_adapters_with_extras_leave_for_want_of_room(start, prompt) -> None:
    engine, loras = start(1)
    for i, name in enumerate(("plain", "n0", "n1")):
        submit(engine, f"{i}", loras[name], prompt(5), 2)
        run(engine)
    slots = engine.loras.slots
    assert slots.find(loras["plain"].digest) is not None and slots.find(loras["n1"].digest) is not None
    assert slots.find(loras["n0"].digest) is None and slots.num_evictions == 1


def test_a_slot_that_is_overwritten_gives_its_extras_back(start, prompt) -> None:
    engine, loras = start(4, max_loras=1)
    for i, name in enumerate(("n0", "plain", "n1")):
        submit(engine, f"{i}", loras[name], prompt(5), 2)
        run(engine)
        assert engine.loras.slots.extra_memory.num_bytes == (0 if name == "plain" else ADAPTER_BYTES)
    assert engine.loras.slots.slots[0].generation == 2


def test_a_busy_adapter_does_not_keep_the_room_from_others(start, prompt) -> None:
    """It and the plain one hold their slots all the time, and a third slot is empty."""
    engine, loras = start(1, max_num_seqs=4, max_num_batched_tokens=64)
    for i in range(3):  # they never end all at once
        submit(engine, f"early{i}", loras["n0"], prompt(5), 6 + 4 * i)
    submit(engine, "plain", loras["plain"], prompt(5), 40)
    engine.step()
    engine.step()
    submit(engine, "cold", loras["n1"], prompt(5), 2)
    for i in range(30):
        submit(engine, f"late{i}", loras["n0"], prompt(5), 12)
    _, ended = run(engine)
    assert ended.index("cold") < 8


def test_an_adapter_for_which_pinned_ones_leave_no_room_is_refused_and_does_not_wait(start, prompt) -> None:
    engine, loras = start(1)
    pinned = engine.pin_adapter(loras["n0"])
    while not pinned.done() or engine.loras.slots.find(loras["n0"].digest) is None:
        engine.step()
    submit(engine, "kept out", loras["n1"], prompt(5), 2)
    submit(engine, "pinned", loras["n0"], prompt(5), 2)
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    errors = {output.request_id: output.error for output in outputs if output.error is not None}
    assert list(errors) == ["kept out"] and "Unpin one" in str(errors["kept out"])
    engine.loras.unpin(loras["n0"].digest)
    submit(engine, "later", loras["n1"], prompt(5), 2)
    answers, _ = run(engine)
    assert len(answers["later"]) == 2


def test_an_adapter_that_is_dropped_gives_its_room_back(start, prompt) -> None:
    engine, loras = start(1)
    submit(engine, "held", loras["n0"], prompt(5), 6)
    engine.step()
    engine.step()
    engine.loras.drop(loras["n0"].digest)
    assert engine.loras.slots.extra_memory.num_bytes == ADAPTER_BYTES
    run(engine)
    engine.step()
    assert engine.loras.slots.extra_memory.num_bytes == 0
