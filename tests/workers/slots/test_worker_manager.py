"""Tiers and slots under pressure, through the engine: more adapters than slots, failing loads, pins, drops."""

from __future__ import annotations

import os
import shutil
import threading
from concurrent.futures import Future
from pathlib import Path

import pytest

from engine_steps import step_until_done
from lorafleet.protocol.engine_config import EngineConfig
from lorafleet.protocol.errors import AdapterChanged, AdapterError, AdapterMissing, LorafleetError
from lorafleet.protocol.lora_config import LoRAConfig
from lorafleet.protocol.lora_request import AdapterInfo, LoRARequest
from lorafleet.protocol.messages import EngineRequest, TokenOutput
from lorafleet.protocol.sampling_params import SamplingParams
from lorafleet.protocol.sources import SourcesConfig
from lorafleet.resolvers.store import AdapterStore
from lorafleet.workers.adapters.base_layout import BaseLayout
from lorafleet.workers.adapters.kinds.kind import Base
from lorafleet.workers.adapters.parallel_reading import MIN_THREADS_FOR_PIECES, ParallelReader
from lorafleet.workers.bases.checkpoint import read_model_config
from lorafleet.workers.engine import Engine
from lorafleet.workers.slots import loader
from lorafleet.workers.slots.loader import AdapterLoader
from lorafleet.workers.slots.worker_manager import WorkerLoRAManager
from lorafleet.workers.startup import build_engine
from tiny_models import make_adapter

MANY = 6


@pytest.fixture(scope="module")
def adapters(fleet, tmp_path_factory) -> list[Path]:
    root = tmp_path_factory.mktemp("many")
    base = fleet("llama3").base
    return [make_adapter(root / f"a{i}", base, seed=50 + i, r=2 + i) for i in range(MANY)]


@pytest.fixture
def engine(fleet):
    engines: list[Engine] = []

    def make(**options) -> Engine:
        chosen = {"max_loras": 2, "max_cpu_loras": 3} | options.pop("lora", {})
        lora = LoRAConfig(**{"max_gpu_loras": chosen["max_loras"]} | chosen)
        config = EngineConfig(model=str(fleet("llama3").base), kv_cache_tokens=4096, lora=lora, **options)
        engines.append(build_engine(config))
        return engines[-1]

    yield make
    for made in engines:
        made.close()


def loaded(engine: Engine, path: Path, number: int = 1) -> LoRARequest:
    future = engine.load_adapter(LoRARequest(path.name, number, str(path)))
    step_until_done(engine, future)
    return LoRARequest(path.name, number, str(path), future.result().digest)


def submit(
    engine: Engine, name: str, lora: LoRARequest | None, tokens: list[int], max_tokens: int, tenant: str = ""
) -> None:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    engine.add(EngineRequest(request_id=name, prompt_token_ids=tokens, params=params, lora=lora, tenant=tenant))


def run(engine: Engine) -> list[TokenOutput]:
    outputs: list[TokenOutput] = []
    while engine.has_work:
        outputs += engine.step()
    return outputs


def finished(outputs: list[TokenOutput]) -> list[str]:
    return [o.request_id for o in outputs if o.finish_reason is not None]


def test_more_adapters_than_slots_all_get_their_own_answers(engine, adapters, fleet, prompt):
    small = engine()
    loras = [loaded(small, path, i) for i, path in enumerate(adapters)]
    for round_number in range(3):
        for i, lora in enumerate(loras):
            submit(small, f"{i}-{round_number}", lora, prompt(8 + i), 6)
    answers: dict[str, list[int]] = {}
    for output in run(small):
        answers.setdefault(output.request_id, []).extend(output.token_ids)
    for i, path in enumerate(adapters):
        expected = fleet("llama3").reference.greedy(prompt(8 + i), 6, path).tokens
        assert all(answers[f"{i}-{r}"] == expected for r in range(3))
    assert small.stats().lora_cpu_adapters <= 3


def test_a_busy_adapter_does_not_starve_a_cold_one(engine, adapters, prompt):
    small = engine(max_num_seqs=4, max_num_batched_tokens=64)
    hot = [loaded(small, path, i) for i, path in enumerate(adapters[:2])]
    cold = loaded(small, adapters[2], 2)
    outputs: list[TokenOutput] = []
    for i in range(4):
        submit(small, f"early{i}", hot[i % 2], prompt(5), 10)
    outputs += small.step()
    submit(small, "cold", cold, prompt(5), 2)
    for i in range(40):  # an unbroken stream of requests for the two adapters that hold the slots
        submit(small, f"late{i}", hot[i % 2], prompt(5), 10)
    ended = finished(run(small))
    # It waits for the early ones of one slot at most, then goes before nearly all that came later.
    assert ended.index("cold") < 12


def test_a_cold_adapter_does_not_delay_resident_ones(engine, adapters, prompt):
    small = engine()
    warm = loaded(small, adapters[0])
    cold = loaded(small, adapters[1], 2)
    small.loras.drop(cold.digest)
    submit(small, "cold", cold, prompt(5), 2)
    submit(small, "base", None, prompt(5), 3)
    submit(small, "warm", warm, prompt(5), 3)
    first_step = small.step()
    assert {o.request_id for o in first_step} == {"base", "warm"}
    assert sorted(finished(run(small))) == ["base", "cold", "warm"]


def test_an_adapter_that_is_asked_for_often_keeps_its_slot_when_others_come_once(engine, adapters, prompt):
    small = engine(lora={"max_loras": 2, "max_cpu_loras": 4})
    hot, *cold = (loaded(small, path, i) for i, path in enumerate(adapters[:4]))

    def ask(name: str, lora: LoRARequest) -> None:
        submit(small, name, lora, prompt(5), 2)
        run(small)

    for i in range(16):
        ask(f"hot{i}", hot)
    for lora in cold:
        ask(lora.lora_name, lora)
    filled = small.stats().lora_activations_total
    ask("hot again", hot)
    assert small.stats().lora_activations_total == filled


def test_a_slot_in_use_is_never_given_away(engine, adapters, prompt):
    small = engine(lora={"max_loras": 1, "max_cpu_loras": 2})
    first, second = (loaded(small, path, i) for i, path in enumerate(adapters[:2]))
    submit(small, "first", first, prompt(5), 30)
    small.step()
    submit(small, "second", second, prompt(5), 2)
    slot = small.loras.slots.slots[0]
    while small.has_work:
        small.step()
        if any(s.request_id == "first" for s in small.scheduler.running):
            assert (slot.digest, slot.generation) == (first.digest, 0)
    assert (slot.digest, slot.generation) == (second.digest, 1)


def test_slots_are_filled_while_their_requests_cannot_be_admitted_yet(engine, adapters, prompt):
    small = engine(max_num_seqs=1)
    first, second = (loaded(small, path, i) for i, path in enumerate(adapters[:2]))
    submit(small, "running", None, prompt(5), 10)
    small.step()
    submit(small, "first", first, prompt(5), 2)
    submit(small, "second", second, prompt(5), 2)
    small.step()
    assert [s.request_id for s in small.scheduler.running] == ["running"]
    assert {slot.digest for slot in small.loras.slots.slots} == {first.digest, second.digest}
    run(small)


def test_a_slot_that_waits_for_its_request_is_not_taken_by_later_ones_but_by_earlier_ones(engine, adapters):
    small = engine(max_num_seqs=1)
    loras = [loaded(small, path, i) for i, path in enumerate(adapters[:3])]
    manager = small.loras
    manager.prefetch(loras[:2])
    manager.prefetch(loras)
    assert {slot.digest for slot in manager.slots.slots} == {loras[0].digest, loras[1].digest}
    manager.prefetch([loras[2], loras[0], loras[1]])
    assert {slot.digest for slot in manager.slots.slots} == {loras[2].digest, loras[0].digest}


def test_an_adapter_that_nobody_waits_for_any_more_may_leave_cpu_memory(engine, adapters, prompt):
    small = engine(lora={"max_loras": 1, "max_cpu_loras": 3})
    held, aborted = (loaded(small, path, i) for i, path in enumerate(adapters[:2]))
    submit(small, "held", held, prompt(5), 20)
    small.step()
    submit(small, "aborted", aborted, prompt(5), 2)
    small.step()
    small.abort("aborted")
    others = [loaded(small, path, i) for i, path in enumerate(adapters[2:4])]
    assert set(small.loras.resident_cpu()) == {held.digest, *(lora.digest for lora in others)}
    run(small)


def test_an_adapter_still_being_read_does_not_keep_a_free_slot_from_later_ones(engine, adapters, prompt):
    small = engine(lora={"max_loras": 1, "max_cpu_loras": 2})
    cold, warm = (loaded(small, path, i) for i, path in enumerate(adapters[:2]))
    small.loras.drop(cold.digest)
    submit(small, "cold", cold, prompt(5), 2)
    submit(small, "warm", warm, prompt(5), 2)
    assert {o.request_id for o in small.step()} == {"warm"}
    run(small)


def test_a_pinned_adapter_keeps_its_slot(engine, adapters, prompt):
    small = engine()
    pinned, *others = [loaded(small, path, i) for i, path in enumerate(adapters[:4])]
    pinning = small.loras.pin(pinned)
    step_until_done(small, pinning)
    small.step()  # nobody asks for it, and it gets its slot
    assert small.loras.slots.find(pinned.digest).pinned
    for i, lora in enumerate(others):
        submit(small, str(i), lora, prompt(5), 2)
    run(small)
    assert small.loras.slots.find(pinned.digest) is not None
    with pytest.raises(AdapterError, match="would pin all 2 slots"):
        small.loras.pin(others[-1])
    small.loras.unpin(pinned.digest)
    for i, lora in enumerate(others):
        submit(small, str(i), lora, prompt(5), 2)
    run(small)
    assert small.loras.slots.find(pinned.digest) is None


def test_a_dropped_adapter_leaves_every_tier_when_its_last_request_ends(engine, adapters, prompt):
    small = engine()
    lora = loaded(small, adapters[0])
    submit(small, "r", lora, prompt(5), 5)
    small.step()
    small.loras.drop(lora.digest)
    assert small.loras.slots.find(lora.digest) is not None
    run(small)
    small.step()
    assert small.loras.slots.find(lora.digest) is None
    assert lora.digest not in small.loras.resident_cpu()


def broken_later(engine: Engine, source: Path, folder: Path) -> LoRARequest:
    """An adapter that was fine when it was registered; since then its files are gone from memory and disk."""
    shutil.copytree(source, folder)
    lora = loaded(engine, folder)
    engine.loras.drop(lora.digest)
    shutil.rmtree(folder)
    return lora


def test_stats_tell_what_steps_were_made_of_how_adapters_moved_and_whose_tokens_used_one(
    engine, adapters, prompt, tmp_path
):
    made = engine(max_num_mixed_tokens=64)
    lora = loaded(made, adapters[1])
    made.loras.take_moves()
    submit(made, "base", None, prompt(10), 4)
    submit(made, "own", lora, prompt(20), 6)
    first = {one.request_id: one for one in reversed(run(made))}  # of each the first output
    assert (first["base"].lora_rank, first["own"].lora_rank) == (0, 3)
    stats = made.stats()
    steps = stats.steps
    assert (steps.base_tokens, steps.adapter_tokens) == (10 + 3, 20 + 5), "all but each one's last token"
    assert steps.tokens.total == 38 and sum(steps.tokens.counts) == stats.steps_total
    assert sum(map(sum, (one.counts for one in steps.seconds.values()))) == stats.steps_total
    assert sum(steps.seconds["decode"].counts) >= 3 and steps.seconds["decode"].total > 0
    assert steps.on_gpu == []
    assert stats.memory_bytes["weights"] == sum(p.nbytes for p in made.runner.steps.model.parameters())
    cache = made.runner.steps.caches[0]
    assert stats.memory_bytes["kv_cache"] == 2 * cache.k_NPGD.nbytes * len(made.runner.steps.caches)
    assert stats.memory_bytes["lora_cpu"] == stats.lora_cpu_bytes > 0
    made.loras.drop(lora.digest)
    missing = made.load_adapter(LoRARequest("gone", 9, str(tmp_path / "nowhere")))
    step_until_done(made, missing)
    moves = {(one.lora_name, one.source, one.target, one.error) for one in made.loras.take_moves()}
    assert moves == {
        ("a1", "cpu", "gpu", ""),
        ("", "gpu", "none", ""),
        ("gone", "disk", "cpu", "AdapterMissing"),
    }


def test_an_adapter_that_fails_to_load_is_an_error_for_its_requests_only(engine, adapters, prompt, tmp_path):
    small = engine()
    gone = broken_later(small, adapters[0], tmp_path / "gone")
    submit(small, "gone", gone, prompt(5), 3)
    submit(small, "base", None, prompt(5), 3)
    last = {o.request_id: o for o in run(small) if o.finish_reason}
    assert last["base"].finish_reason == "length"
    assert last["gone"].finish_reason == "error"
    assert "gone" in last["gone"].error.message
    assert small.stats().lora_load_failures_total == 1


def test_the_base_answers_for_a_failed_adapter_only_where_asked_and_says_so(engine, adapters, prompt, tmp_path, fleet):
    small = engine(on_lora_load_failure="base")
    gone = broken_later(small, adapters[0], tmp_path / "gone")
    submit(small, "gone", gone, prompt(5), 3)
    outputs = run(small)
    assert outputs[0].fallback_reason
    tokens = [t for o in outputs for t in o.token_ids]
    assert tokens == fleet("llama3").reference.greedy(prompt(5), 3).tokens


def test_other_bytes_under_a_registered_path_are_refused(engine, adapters, prompt, tmp_path):
    small = engine()
    shutil.copytree(adapters[0], tmp_path / "a")
    lora = loaded(small, tmp_path / "a")
    small.loras.drop(lora.digest)
    shutil.rmtree(tmp_path / "a")
    shutil.copytree(adapters[1], tmp_path / "a")
    submit(small, "r", lora, prompt(5), 3)
    [output] = run(small)
    assert output.error.kind == AdapterChanged.__name__


@pytest.mark.parametrize("num_threads", [1, MIN_THREADS_FOR_PIECES])
def test_bytes_whose_digest_is_not_the_registered_one_reach_no_tier(engine, fleet, adapters, tmp_path, num_threads):
    """Their digest is computed while they are checked and packed."""
    slots, folder, config = engine().loras.model_manager, tmp_path / "a", LoRAConfig()
    layout = BaseLayout.of(read_model_config(fleet("llama3").base))
    store, reader = AdapterStore(SourcesConfig()), ParallelReader(num_threads, piece_bytes=512)
    loader = AdapterLoader(Base(layout), config, slots, slots.dtype, slots.device, store, reader)
    manager = WorkerLoRAManager(config, slots, loader, None)

    def load(digest: str) -> Future[AdapterInfo]:
        future = manager.load(LoRARequest("a", 1, str(folder), digest))
        while not future.done():
            manager.poll()
        return future

    shutil.copytree(adapters[0], folder)
    digest = load("").result().digest
    manager.drop(digest)
    assert load(digest).result().digest == digest
    manager.drop(digest)
    with (folder / "adapter_model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\0")
    assert isinstance(load(digest).exception(), AdapterChanged)
    assert manager.resident_cpu() == [] and manager.slot_for(LoRARequest("a", 1, str(folder), digest)) is None
    manager.close()


def test_a_failed_load_leaves_nothing_behind_and_the_next_one_succeeds(engine, adapters, prompt, tmp_path):
    small = engine()
    gone = broken_later(small, adapters[0], tmp_path / "a")
    submit(small, "r", gone, prompt(5), 3)
    asked = small.load_adapter(LoRARequest("a", 1, str(tmp_path / "a")))
    run(small)
    step_until_done(small, asked)
    assert isinstance(asked.exception(), AdapterMissing)
    assert not small.loras.loading and small.loras.resident_cpu() == []
    assert all(slot.digest is None for slot in small.loras.slots.slots)
    shutil.copytree(adapters[0], tmp_path / "a")
    assert loaded(small, tmp_path / "a").digest == gone.digest


def test_a_fault_of_our_own_while_loading_is_not_called_the_adapters(engine, adapters, monkeypatch, caplog):
    small = engine()
    monkeypatch.setattr(loader, "pack", lambda *_: 1 / 0)
    asked = small.load_adapter(LoRARequest("a", 1, str(adapters[0])))
    step_until_done(small, asked)
    assert type(asked.exception()) is LorafleetError
    assert "ZeroDivisionError" in str(asked.exception()) and "loading failed" in caplog.text


def test_a_closed_engine_leaves_no_threads(engine, adapters):
    small = engine()
    before = {t for t in threading.enumerate() if t.name.startswith("lora-load")}
    loaded(small, adapters[0])
    mine = {t for t in threading.enumerate() if t.name.startswith("lora-load")} - before
    assert mine
    small.close()
    assert not any(t.is_alive() for t in mine)


def test_a_tenant_keeps_its_slot_while_another_cycles_through_many_adapters(engine, adapters, prompt):
    small = engine(lora={"max_loras": 3, "max_cpu_loras": MANY})
    hot, *others = [loaded(small, path, i) for i, path in enumerate(adapters)]
    for i in range(20):
        submit(small, f"noisy {i}", others[i % len(others)], prompt(5), 2, "noisy")
        if i % 5 == 0:
            submit(small, f"quiet {i}", hot, prompt(5), 2, "quiet")
        run(small)
        slot = small.loras.slots.find(hot.digest)
        assert slot is not None and slot.generation == 0
    assert small.loras.slots.num_activations >= 20 - 2, "the noisy tenant goes on in its own slots"


def test_a_tenant_that_holds_every_slot_gives_one_to_another(engine, adapters, prompt):
    small = engine(lora={"max_loras": 2, "max_cpu_loras": MANY}, max_num_seqs=4, max_num_batched_tokens=16)
    wanted, *others = [loaded(small, path, i) for i, path in enumerate(adapters)]
    for i in range(20):
        submit(small, f"noisy {i}", others[i % len(others)], prompt(5), 4, "noisy")
    small.step()
    submit(small, "quiet", wanted, prompt(5), 2, "quiet")
    while small.loras.slots.find(wanted.digest) is None:
        assert small.has_work
        small.step()
    assert sum(s.tenant == "noisy" for s in small.scheduler.waiting) > 10
    run(small)
