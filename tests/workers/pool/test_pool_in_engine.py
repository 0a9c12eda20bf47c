"""Adapters borrow memory of the KV cache while an engine serves. On a CPU no memory moves: what is lent is spoiled, so
that an answer would show if a step touched it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest
import torch

from engine_steps import step_until_done
from lorafleet.protocol.engine_config import EngineConfig
from lorafleet.protocol.engine_control import SleepEngine, WakeEngine
from lorafleet.protocol.lora_config import LoRAConfig
from lorafleet.protocol.lora_request import LoRARequest
from lorafleet.protocol.messages import EngineRequest
from lorafleet.protocol.sampling_params import SamplingParams
from lorafleet.workers.engine import Engine
from lorafleet.workers.pool.group_layout import GroupLayout
from lorafleet.workers.pool.group_mover import GroupMove
from lorafleet.workers.pool.kv_groups import KVGroups
from lorafleet.workers.pool.memory_pool import MemoryPool, PoolSizes
from lorafleet.workers.pool.pool_cost import PoolCosts, RecentRequests
from lorafleet.workers.pool.pool_room import PoolRoom
from lorafleet.workers.startup import build_engine
from tiny_models import ALL_TARGETS, make_adapter

RANKS = 8, 16, 32, 8, 16, 8, 4, 8
BLOCKS = 4  # In a group.


class SpoilingMover:
    """Spoils the blocks of lent groups, and clears those that come back. Moves take a few steps."""

    def __init__(self, engine: Engine) -> None:
        self._caches = [t for cache in engine.runner.steps.caches for t in (cache.k_NPGD, cache.v_NPGD)]
        self._moves: deque[tuple[GroupMove, int]] = deque()
        self._num_polls = 0
        self.lent: dict[int, int] = {}  # Group by region.

    @torch.inference_mode()
    def begin(self, move: GroupMove) -> None:
        for cache in self._caches:
            blocks = cache[move.group * BLOCKS : (move.group + 1) * BLOCKS]
            if not move.to_adapters:
                assert blocks.isnan().all(), "a step has written to memory that was lent"
            blocks.fill_(float("nan") if move.to_adapters else 0.0)
        if move.to_adapters:
            assert move.region not in self.lent and move.group not in self.lent.values()
            self.lent[move.region] = move.group
        else:
            assert self.lent.pop(move.region) == move.group
        self._moves.append((move, self._num_polls + 2))

    def take_done(self) -> list[GroupMove]:
        self._num_polls += 1
        done: list[GroupMove] = []
        while self._moves and self._moves[0][1] <= self._num_polls:
            done.append(self._moves.popleft()[0])
        return done

    @property
    def num_away(self) -> int:
        """The number of groups that adapters have, or that are on their way in either direction."""
        return len(self.lent) + sum(not move.to_adapters for move, _ in self._moves)

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def adapters(fleet, tmp_path_factory) -> list[Path]:
    root, base = tmp_path_factory.mktemp("pool"), fleet("llama3").base
    return [
        make_adapter(root / f"a{i}", base, seed=170 + i, r=rank, target_modules=ALL_TARGETS)
        for i, rank in enumerate(RANKS)
    ]


Start = Callable[..., tuple[Engine, list[LoRARequest], SpoilingMover]]


@pytest.fixture
def start(fleet, adapters: list[Path]) -> Iterator[Start]:
    engines: list[Engine] = []

    def make(group_bytes: int, num_groups: int = 16, block_s: float = 1e-3, **options) -> tuple:
        lora = LoRAConfig(max_loras=2, max_lora_rank=32, max_cpu_loras=len(RANKS))
        config = EngineConfig(
            str(fleet("llama3").base),
            kv_cache_tokens=(num_groups * BLOCKS - 1) * 16,
            max_model_len=128,
            lora=lora,
            max_num_seqs=4,
            max_num_batched_tokens=64,
            **options,
        )
        engine = build_engine(config)
        engines.append(engine)
        loras = [load(engine, path) for path in adapters]
        return engine, loras, share(engine, group_bytes, num_groups, block_s)

    yield make
    for made in engines:
        made.close()


def share(engine: Engine, group_bytes: int, num_groups: int, block_s: float) -> SpoilingMover:
    """Lets the adapters of an engine on a CPU borrow groups, beside memory for one of the largest."""
    assert engine.loras is not None
    slots, kv, filler = engine.loras.slots, engine.scheduler.kv, engine.loras.filler
    own = slots.memory.num_bytes // 2
    slots.memory.shrink(own, slots.memory.num_bytes - own)
    layout = GroupLayout(BLOCKS, (group_bytes,), num_groups)
    requests, mover = RecentRequests(), SpoilingMover(engine)
    groups = KVGroups(
        kv, layout, num_groups - 2, lambda digest: requests.use_of(digest, is_here=True) if digest else None
    )
    tiers = engine.scheduler.memory.tiers
    leaving = (lambda _: None) if tiers is None else tiers.save_now
    costs = PoolCosts(block_s, 0.5)
    sizes = PoolSizes(group_bytes, own, layout.most_lendable(8), promised=2)
    pool = MemoryPool(groups, slots.memory, mover, sizes, lambda: costs, leaving)
    room = engine.loras.model_manager.room
    filler.pool = PoolRoom(pool, requests, slots, room, filler.evict_everywhere)
    return mover


def load(engine: Engine, path: Path) -> LoRARequest:
    future = engine.load_adapter(LoRARequest(path.name, 1, str(path)))
    step_until_done(engine, future)
    return LoRARequest(path.name, 1, str(path), future.result().digest)


def submit(engine: Engine, name: str, lora: LoRARequest | None, tokens: list[int], max_tokens: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    engine.add(EngineRequest(request_id=name, prompt_token_ids=tokens, params=params, lora=lora))


def run(engine: Engine) -> dict[str, list[int]]:
    answers: dict[str, list[int]] = {}
    assert engine.loras is not None
    memory, kv, pool = engine.loras.slots.memory, engine.scheduler.kv, engine.loras.filler.pool
    while engine.has_work:
        for output in engine.step():
            assert output.error is None, output.error
            answers.setdefault(output.request_id, []).extend(output.token_ids)
        taken = sum(extent.num_bytes for slot in engine.loras.slots.slots for extent in slot.extents)
        assert memory.num_used == taken <= memory.num_bytes <= memory.most_bytes
        assert kv.num_free <= kv.num_blocks - pool.num_blocks
    return answers


@pytest.mark.parametrize("kv_host_gib", [0, 0.01])
def test_answers_are_right_while_memory_moves_in_both_directions(
    start: Start, fleet, adapters: list[Path], prompt, kv_host_gib: float
) -> None:
    engine, loras, mover = start(group_bytes=40_000, kv_host_gib=kv_host_gib)
    random, expected = Random(3), {}
    reference = fleet("llama3").reference
    jobs = [(i, 8 + 9 * i) for i in range(len(RANKS))]
    answers: dict[str, list[int]] = {}
    for turn in range(6):
        random.shuffle(jobs)
        for i, length in jobs[: 3 + turn]:
            submit(engine, f"{turn}-{i}", loras[i], prompt(length), 6)
        submit(engine, f"{turn}-base", None, prompt(60 + turn), 6)
        answers |= run(engine)
    for name, tokens in answers.items():
        turn, who = name.split("-")
        length = 60 + int(turn) if who == "base" else 8 + 9 * int(who)
        path = None if who == "base" else adapters[int(who)]
        if (who, length) not in expected:
            expected[who, length] = reference.greedy(prompt(length), 6, path, likely=tokens).tokens
        assert tokens == expected[who, length], name
    stats = engine.stats()
    assert stats.lora_memory_moves_total["lent"] >= 2 and mover.lent
    assert stats.lora_memory_borrowed_bytes == mover.num_away * 40_000
    assert stats.kv_blocks_total == engine.scheduler.kv.num_blocks - mover.num_away * BLOCKS


def test_a_sleep_takes_all_memory_back_and_adapters_borrow_again(start: Start, fleet, adapters, prompt) -> None:
    engine, loras, mover = start(group_bytes=40_000)
    for i, lora in enumerate(loras):
        submit(engine, f"a{i}", lora, prompt(9), 3)
    run(engine)
    assert mover.lent
    done = engine.control(SleepEngine(tags=["kv_cache", "weights"], level=1, mode="wait"))
    step_until_done(engine, done)
    assert not mover.lent
    done = engine.control(WakeEngine(tags=["kv_cache", "weights"]))
    step_until_done(engine, done)
    for i, lora in enumerate(loras):
        submit(engine, f"b{i}", lora, prompt(9), 3)
    answers = run(engine)
    assert mover.lent
    for i, path in enumerate(adapters):
        assert answers[f"b{i}"] == fleet("llama3").reference.greedy(prompt(9), 3, path).tokens


def test_adapters_that_are_in_use_pinned_or_waited_for_keep_their_memory(start: Start, prompt) -> None:
    engine, loras, _ = start(group_bytes=40_000)
    for lora in loras[:3]:
        submit(engine, lora.lora_name, lora, prompt(9), 2)
        run(engine)
    assert engine.loras is not None
    slots, pool = engine.loras.slots, engine.loras.filler.pool
    idle, pinned, waited = (slots.find(lora.digest) for lora in loras[:3])

    def worths() -> list[float]:
        """The worth of each adapter's first byte, as a region of its own."""
        found = pool.worths(0, 1)
        return [found[slot.extents[0].start] for slot in (idle, pinned, waited)]

    assert all(0 < worth < 1 for worth in worths())
    slots.pin(pinned)
    pool.wanted = frozenset({loras[2].digest})
    assert worths()[0] < 1 and worths()[1:] == [float("inf")] * 2
    slots.hold(idle.index)
    assert worths()[0] == float("inf")
    slots.let_go(idle.index)
