"""The decisions of the KV tiers, with a scheduler that is driven as by the engine and simulated copies.

The simulation checks at each step that all tokens before it have the keys and values of this very prefix, whoever
computed them and wherever they have been since.
"""

from __future__ import annotations

import random

import pytest

from lorafleet.protocol.sampling_params import SamplingParams
from lorafleet.workers.bases.rope_config import RopeConfig
from lorafleet.workers.kv_tiers.kv_tiers import KVTiers
from lorafleet.workers.kv_tiers.state_tiers import StateTiers
from lorafleet.workers.schedule.kv_cache import KVCacheManager
from lorafleet.workers.schedule.scheduler import Scheduler
from lorafleet.workers.schedule.sequence import UNKNOWN, Chunk, Sequence
from lorafleet.workers.schedule.state_slots import StateSlots
from lorafleet.workers.schedule.state_snapshots import StateSnapshots
from lorafleet.workers.schedule.step_budget import StepBudget, StepLimits
from tests.workers.kv_tiers.simulated_tiers import SimulatedTiers
from tests.workers.schedule.stepped_scheduler import Events, SteppedScheduler

SIZE = 4  # tokens of a block
ROPE = RopeConfig(rotary_dim=8, theta=10000.0, max_position_embeddings=16384)


class Simulation:
    """An engine without a model. With snapshots it has recurrent layers, whose state is the hash of all tokens."""

    def __init__(
        self, *, num_blocks=100, num_host=64, num_disk=0, most=48, seqs=8, rng=None, snapshots=(0, 0, 0), **options
    ) -> None:
        """`snapshots` are their slots on the GPU, in the host tier and on disk."""
        rng = rng or random.Random(0)
        self.copies, self.state_copies = SimulatedTiers(rng, **options), SimulatedTiers(rng, **options)
        self.now_s = 0.0
        kv = KVCacheManager(num_blocks, SIZE, enable_prefix_caching=True)
        self.pool = states = state_tiers = None
        if snapshots[0]:
            self.pool = StateSnapshots(range(seqs, seqs + snapshots[0]))
            states = StateSlots(seqs, self.pool)
            state_tiers = StateTiers(self.pool, self.state_copies, *snapshots[1:])
        self.tiers = KVTiers(kv, self.copies, num_host, num_disk, lambda: self.now_s, state_tiers)
        budget = StepBudget(StepLimits(most, most))
        self.scheduler = Scheduler(kv, None, ROPE, seqs, budget, states, self.tiers)
        self.driven = SteppedScheduler(self.scheduler, Events(launches=self._launch))
        self.num_computed = 0  # tokens in all steps

    def add(self, name: str, tokens: list[int], answer: int = 4, salt: str = "") -> Sequence:
        added = Sequence(name, list(tokens), len(tokens), SamplingParams(), 0, answer, cache_salt=salt)
        self.scheduler.add(added)
        return added

    def finish(self) -> None:
        for _ in range(2000):
            if not self.scheduler.has_work:
                return
            self.driven.step()
        raise AssertionError("some sequences never end")

    def answer(self, name: str, tokens: list[int], answer: int = 4, salt: str = "") -> Sequence:
        """Adds a sequence and runs until all have ended."""
        added = self.add(name, tokens, answer, salt)
        self.finish()
        return added

    def _launch(self, chunks: list[Chunk]) -> None:
        arriving = {block for load in self.copies.loading.values() for _, block in load}
        contents = self.copies.gpu
        for chunk in chunks:
            sequence = chunk.sequence
            assert sequence.blocks is not None and sequence.arrival is None
            table, start = sequence.blocks.table, sequence.num_computed
            tokens = [at if token == UNKNOWN else token for at, token in enumerate(sequence.tokens)]
            prefixes = [(sequence.cache_salt, hash(tuple(tokens[: at + 1]))) for at in range(start + chunk.num_tokens)]
            for at in range(start):
                assert contents[table[at // SIZE]][at % SIZE] == prefixes[at], (sequence.request_id, at)
            for at in range(start, start + chunk.num_tokens):
                assert table[at // SIZE] not in arriving, "a step and a copy write the same block"
                contents.setdefault(table[at // SIZE], [None] * SIZE)[at % SIZE] = prefixes[at]
            self.num_computed += chunk.num_tokens
            if self.pool is not None:
                self._compute_state(chunk, prefixes)
        arriving = {slot for load in self.state_copies.loading.values() for _, slot in load}
        for chunk in chunks:
            if chunk.snapshot is not None:
                assert chunk.snapshot not in arriving, "a step and a copy write the same snapshot"
                self.state_copies.gpu[chunk.snapshot] = self.state_copies.gpu[chunk.sequence.state_slot]

    def _compute_state(self, chunk: Chunk, prefixes: list[object]) -> None:
        states, slot, start = self.state_copies.gpu, chunk.sequence.state_slot, chunk.sequence.num_computed
        if chunk.resumes_from is not None:
            states[slot] = states[chunk.resumes_from]
        assert start == 0 or states[slot] == [prefixes[start - 1]], (chunk.sequence.request_id, start)
        states[slot] = [prefixes[-1]]


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(1000, 2000), k=length)


def fill(simulation: Simulation) -> None:
    """Overwrites all blocks of the GPU."""
    for seed in range(100, 106):
        simulation.answer(f"other {seed}", prompt(seed, 300))


def test_a_conversation_that_returns_after_its_eviction_is_not_computed_again():
    simulation = Simulation(num_host=1000)
    simulation.answer("first", prompt(1, 200))
    fill(simulation)
    before = simulation.num_computed
    returned = simulation.answer("second", prompt(1, 200) + prompt(2, 30))
    assert returned.num_cached == 200
    assert simulation.num_computed - before == 30 + 3
    assert simulation.tiers.counts.hit_tokens == {"host": 200}


def test_blocks_come_from_disk_once_they_have_left_the_host_tier():
    simulation = Simulation(num_host=96, num_disk=1000)
    simulation.answer("first", prompt(1, 200))
    fill(simulation)
    assert simulation.answer("second", prompt(1, 201)).num_cached == 200
    assert simulation.tiers.counts.hit_tokens["disk"] > 100
    assert simulation.tiers.stored.num_host <= 96


def test_nobody_gets_the_blocks_of_another_salt():
    simulation = Simulation(num_host=1000)
    simulation.answer("first", prompt(1, 200), salt="a")
    fill(simulation)
    assert simulation.answer("second", prompt(1, 201), salt="b").num_cached == 0
    assert simulation.answer("third", prompt(1, 201), salt="a").num_cached == 200


def test_others_run_while_blocks_come_in():
    simulation = Simulation(num_host=1000)
    simulation.answer("first", prompt(1, 200))
    fill(simulation)
    simulation.copies.is_stuck = True
    returned, other = simulation.add("returned", prompt(1, 201)), simulation.add("other", prompt(3, 20))
    for _ in range(8):
        simulation.driven.step()
    assert other.ended and returned.arrival is not None and not returned.ended
    simulation.copies.is_stuck = False
    simulation.finish()
    assert returned.num_cached == 200


def test_samples_of_one_prompt_bring_its_blocks_once():
    simulation = Simulation(num_host=1000)
    simulation.answer("first", prompt(1, 200))
    fill(simulation)
    moved = simulation.tiers.counts.moved_blocks["host_to_gpu"]
    samples = [simulation.add(f"sample {i}", prompt(1, 201)) for i in range(4)]
    simulation.finish()
    assert [sample.num_cached for sample in samples] == [200] * 4
    assert simulation.tiers.counts.moved_blocks["host_to_gpu"] - moved == 50


@pytest.mark.parametrize("ends", ["abort", "preempt"])
def test_blocks_on_their_way_are_not_given_to_others(ends: str):
    simulation = Simulation(num_host=1000, num_blocks=100)
    simulation.answer("first", prompt(1, 200))
    fill(simulation)
    simulation.copies.is_stuck = True
    returned = simulation.add("returned", prompt(1, 201))
    simulation.driven.step()
    assert returned.arrival is not None and simulation.scheduler.kv.num_free == 49
    if ends == "abort":
        returned.ended = True
        simulation.scheduler.finish(returned)
    else:
        simulation.scheduler.preempt(returned)
    assert simulation.scheduler.kv.num_free == 100 - 32  # 512 MiB of blocks are copied at a time
    assert returned.arrival is None
    simulation.copies.is_stuck = False
    fill(simulation)
    assert simulation.scheduler.kv.num_free == 100
    assert ends == "abort" or returned.num_cached == 200
    assert all(not block.users for block in simulation.tiers.stored)


def test_a_request_does_not_wait_forever_for_a_slow_disk():
    simulation = Simulation(num_host=96, num_disk=1000)
    simulation.answer("first", prompt(1, 200))
    fill(simulation)
    simulation.copies.is_stuck = True
    returned = simulation.add("returned", prompt(1, 201))
    for _ in range(5):
        simulation.driven.step()
    assert not returned.ended
    simulation.now_s = 2.5
    simulation.finish()
    assert returned.ended and returned.num_cached == 0
    assert simulation.tiers.counts.lost_blocks["late"] == 50
    simulation.copies.is_stuck = False
    assert simulation.answer("again", prompt(1, 201)).num_cached == 200  # the GPU knows them now
    simulation.tiers.poll()


def test_damaged_blocks_are_computed_again():
    simulation = Simulation(num_host=96, num_disk=1000, failing_share=0.1)
    for round in range(4):
        for seed in range(6):
            simulation.answer(f"{round} {seed}", prompt(seed, 200))
    counts = simulation.tiers.counts
    assert counts.lost_blocks["damaged"] > 0 and counts.hit_tokens["disk"] > 0


def test_a_failed_write_turns_writing_off_and_requests_go_on(caplog):
    simulation = Simulation(num_host=96, num_disk=1000, failing_share=0.05, fails_writes=True)
    for round in range(4):
        for seed in range(6):
            simulation.answer(f"{round} {seed}", prompt(seed, 200))
    assert not simulation.tiers.disk.writes and simulation.tiers.stats().disk_takes_blocks == 0
    assert caplog.text.count("takes no more blocks") == 1
    written = simulation.tiers.counts.moved_blocks["host_to_disk"]
    fill(simulation)
    assert simulation.tiers.counts.moved_blocks["host_to_disk"] == written


def test_cleared_tiers_have_nothing():
    simulation = Simulation(num_host=96, num_disk=1000)
    simulation.answer("first", prompt(1, 200))
    fill(simulation)
    simulation.scheduler.memory.flush()
    assert simulation.answer("second", prompt(1, 201)).num_cached == 0
    for _ in range(20):
        simulation.tiers.poll()  # jobs that were under way
    stats = simulation.tiers.stats()
    assert simulation.tiers.stored.num_host + simulation.tiers.stored.num_disk == 0, stats


@pytest.mark.parametrize(
    ("num_blocks", "num_host", "num_disk", "snapshots", "hits"),
    [
        (60, 200, 0, (0, 0, 0), {"host"}),
        (80, 10, 20, (0, 0, 0), set()),
        (80, 60, 300, (0, 0, 0), {"host", "disk"}),
        (150, 200, 300, (0, 0, 0), {"host"}),
        (100, 300, 0, (3, 20, 0), {"host"}),
        (100, 100, 400, (5, 4, 30), {"host", "disk"}),
    ],
)
def test_random_use_never_mixes_blocks_and_stays_within_bounds(
    num_blocks: int, num_host: int, num_disk: int, snapshots: tuple[int, int, int], hits: set[str]
):
    rng = random.Random(num_blocks + num_disk)
    simulation = Simulation(
        num_blocks=num_blocks, num_host=num_host, num_disk=num_disk, snapshots=snapshots, failing_share=0.01, rng=rng
    )
    states = simulation.tiers.states
    contents = [simulation.tiers.stored] if states is None else [simulation.tiers.stored, states.stored]
    talks = [prompt(i % 7, 60 + i) + prompt(i, 90) for i in range(20)]
    live: list[Sequence] = []
    for number in range(800):
        live = [sequence for sequence in live if not sequence.ended]
        if len(live) < 10 and rng.random() < 0.4:
            tokens = rng.choice(talks)[: rng.randrange(1, 200)]
            live.append(simulation.add(f"{number}", tokens, rng.randrange(1, 40), rng.choice(["a", "b"])))
        if live and rng.random() < 0.03:
            (gone := rng.choice(live)).ended = True
            simulation.scheduler.finish(gone)
        arriving = [sequence for sequence in simulation.scheduler.running if sequence.arrival is not None]
        if arriving and rng.random() < 0.1:
            simulation.scheduler.preempt(rng.choice(arriving))
        if rng.random() < 0.003:
            simulation.scheduler.memory.flush()
        simulation.now_s += rng.choice([0.0, 0.0, 0.01, 0.5])
        simulation.driven.step()
        for stored in contents:
            hosts = [block.host for block in stored if block.host is not None]
            disks = [block.disk for block in stored if block.disk is not None]
            assert len(set(hosts)) == len(hosts) == stored.num_host
            assert len(set(disks)) == len(disks) == stored.num_disk
    simulation.finish()
    for _ in range(60):
        simulation.tiers.poll()
    assert simulation.scheduler.kv.num_free == simulation.scheduler.kv.num_blocks
    assert all(not block.users for stored in contents for block in stored)
    if states is not None and simulation.pool is not None:
        assert states.counts.moved_blocks["host_to_gpu"] > 10
        assert simulation.pool.num_used == len(simulation.pool._slots)
    assert len(simulation.driven.finished) > 30
    assert {tier for tier, count in simulation.tiers.counts.hit_tokens.items() if count} >= hits
