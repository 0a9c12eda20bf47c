"""How a step's tokens are shared between streams and prompts. The answers do not depend on it: test_overlap.py,
test_matches_transformers.py."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence as Many
from typing import Any

import pytest

from lorafleet.protocol.lora_request import LoRARequest
from lorafleet.protocol.sampling_params import SamplingParams
from lorafleet.workers.bases.rope_config import RopeConfig
from lorafleet.workers.schedule.kv_cache import KVCacheManager
from lorafleet.workers.schedule.scheduler import Scheduler
from lorafleet.workers.schedule.sequence import UNKNOWN, Chunk, Sequence
from lorafleet.workers.schedule.step_budget import StepBudget, StepLimits
from lorafleet.workers.slots.slot_policy import Slot
from tests.workers.schedule.stepped_scheduler import Events, SteppedScheduler


def sequence(name: str, num_prompt: int, max_tokens: int = 1000, lora: LoRARequest | None = None) -> Sequence:
    tokens = [len(name) % 1000] * num_prompt
    return Sequence(name, tokens, num_prompt, SamplingParams(), seed=0, max_tokens=max_tokens, lora=lora)


def scheduler(*, max_num_seqs=256, most=8192, mixed=512, caching=False, loras=None, num_blocks=4096) -> Scheduler:
    rope = RopeConfig(rotary_dim=8, theta=10000.0, max_position_embeddings=16384)
    budget = StepBudget(StepLimits(most, mixed))
    return Scheduler(KVCacheManager(num_blocks, 16, caching), loras, rope, max_num_seqs, budget)


def step(scheduled: Scheduler, in_flight: Many[Chunk] = ()) -> dict[str, int]:
    """The next step's tokens by sequence; the step is taken as done."""
    chunks = scheduled.schedule(in_flight)
    scheduled.launched(chunks)
    return {chunk.sequence.request_id: chunk.num_tokens for chunk in chunks}


def test_a_long_prompt_comes_in_small_chunks_while_others_stream():
    s = scheduler()
    for i in range(32):
        s.add(sequence(f"stream {i}", 10))
    assert sum(step(s).values()) == 320
    s.add(sequence("long", 2000))
    for chunk in (480, 480, 480, 480, 80):
        assert step(s) == {f"stream {i}": 1 for i in range(32)} | {"long": chunk}
    assert step(s)["long"] == 1


def test_where_nothing_streams_a_prompt_has_the_whole_step():
    s = scheduler()
    s.add(sequence("long", 10000))
    s.add(sequence("behind", 100))
    assert step(s) == {"long": 8192}
    assert step(s) == {"long": 10000 - 8192, "behind": 100}


def test_prompts_have_half_of_a_mixed_step_beside_however_many_streams():
    s = scheduler(max_num_seqs=600)
    for i in range(500):
        s.add(sequence(f"stream {i}", 2))
    step(s)
    s.add(sequence("long", 2000))
    assert step(s)["long"] == 256


def test_no_step_is_over_max_num_batched_tokens():
    s = scheduler(max_num_seqs=60, most=64, mixed=512)
    for i in range(30):
        s.add(sequence(f"stream {i}", 2))
    step(s)
    s.add(sequence("long", 2000))
    assert step(s)["long"] == 34


def test_prompts_that_come_together_compute_what_they_share_once():
    s = scheduler(caching=True)
    for name in ("one", "two", "six"):
        s.add(sequence(name, 100))
    assert step(s) == {"one": 100, "two": 4, "six": 4}
    assert step(s) == {"one": 1, "two": 1, "six": 1}


def test_a_shared_prompt_over_several_steps_is_computed_once_too():
    s = scheduler(caching=True, most=256)
    for name in ("one", "two"):
        s.add(sequence(name, 400))
    assert step(s) == {"one": 256}
    assert step(s) == {"one": 144, "two": 16}


def lora(name: str) -> LoRARequest:
    return LoRARequest(name, 1, "/", digest=name)


class SlotsForAll:
    """Stands in for WorkerLoRAManager where every adapter has a slot and each is ready."""

    def __init__(self) -> None:
        self.slots = self
        self.asked: list[list[str]] = []
        self.of = {name: Slot(i, digest=name) for i, name in enumerate(("hot", "cold", "warm"))}
        self.usable_digests = self.of.keys()
        self.absent: set[str] = set()
        self.claimed: set[int] = set()  # for those that are absent

    def prefetch(self, wanted: list[LoRARequest], _: dict[str, str]) -> None:
        self.asked.append([one.digest for one in wanted])

    def slot_for(self, wanted: LoRARequest) -> Slot | None:
        return self.find(wanted.digest)

    def find(self, digest: str) -> Slot | None:
        return None if digest in self.absent else self.of[digest]

    def claims(self, _: str, __: set[int], ___: str) -> set[int]:
        return self.claimed

    def may_use(self, _: int) -> bool:
        return True

    def hold(self, index: int, _: str) -> None:
        self.of[list(self.of)[index]].holders += 1

    def let_go(self, index: int) -> None:
        self.of[list(self.of)[index]].holders -= 1


def finish(scheduled: Scheduler, name: str) -> None:
    scheduled.finish(next(one for one in scheduled.running if one.request_id == name))


def test_a_flood_of_one_adapter_leaves_the_others_their_turns():
    slots = SlotsForAll()
    s = scheduler(max_num_seqs=2, loras=slots)
    for i in range(20):
        s.add(sequence(f"hot {i}", 100, lora=lora("hot")))
    assert step(s).keys() == {"hot 0", "hot 1"}
    for kind in ("warm", None):
        for i in range(3):
            s.add(sequence(f"{kind} {i}", 100, lora=lora(kind) if kind else None))
    started: list[str] = []
    for _ in range(3):
        for one in list(s.running):
            s.finish(one)
        started += step(s)
    assert sorted(started) == ["None 0", "None 1", "hot 2", "hot 3", "warm 0", "warm 1"]


def test_adapters_are_loaded_ahead_in_the_order_of_their_turns():
    slots = SlotsForAll()
    s = scheduler(max_num_seqs=1, loras=slots)
    s.add(sequence("running", 500, lora=lora("hot")))
    step(s)
    s.add(sequence("next", 10, lora=lora("hot")))
    for name in ("cold", "warm"):
        s.add(sequence(name, 10, lora=lora(name)))
    s.add(sequence("cold 2", 10, lora=lora("cold")))
    step(s)
    assert slots.asked[-1] == ["hot", "cold", "warm"], "as they came, while none had more than another"
    finish(s, "running")  # it has answered a token meanwhile, which its adapter has paid for
    assert step(s) == {"cold": 10}
    step(s)
    assert slots.asked[-1] == ["warm", "hot", "cold"]


def test_a_preempted_sequence_starts_again_before_those_whose_turn_it_would_be():
    slots = SlotsForAll()
    s = scheduler(loras=slots, num_blocks=8, mixed=512)
    s.add(sequence("first", 60, lora=lora("hot")))
    s.add(sequence("second", 60, lora=lora("hot")))
    step(s)
    s.add(sequence("cold", 20, lora=lora("cold")))
    while not s.num_preemptions:
        step(s)
    assert [one.request_id for one in s.running] == ["first"]
    finish(s, "first")
    assert next(iter(step(s))) == "second"


def test_a_prefix_is_found_by_the_same_tenant_and_salt_only():
    """Where it were found by others, the time a prompt takes would tell what they have sent."""
    s = scheduler(caching=True)
    for number, (salt, cached) in enumerate([("acme", 0), ("rival", 0), ("", 0), ("acme", 32), ("rival", 32)]):
        one = sequence(str(number), 40)
        one.cache_salt = salt
        s.add(one)
        assert step(s) == {str(number): 40 - cached}
        assert one.num_cached == cached
        s.finish(one)


def of_tenant(tenant: str, name: str, num_prompt: int = 10, **fields: Any) -> Sequence:
    made = sequence(f"{tenant} {name}", num_prompt, **fields)
    made.tenant = tenant
    return made


def running(scheduled: Scheduler) -> Counter[str]:
    """How many sequences of each tenant run."""
    return Counter(one.tenant for one in scheduled.running)


def answered(scheduled: Scheduler) -> None:
    """The tokens of the step under way are known from now on."""
    for one in scheduled.running:
        one.tokens = [0 if token == UNKNOWN else token for token in one.tokens]


def test_a_tenant_does_not_wait_for_the_long_answers_of_another_to_end():
    s = scheduler(max_num_seqs=8)
    for i in range(50):
        s.add(of_tenant("noisy", str(i)))
    step(s)
    answered(s)
    s.add(of_tenant("quiet", "first"))
    assert step(s)["quiet first"] == 10
    assert running(s) == {"noisy": 7, "quiet": 1}


def test_tenants_that_ask_for_all_come_to_run_as_many_sequences_and_stay_so():
    s = scheduler(max_num_seqs=8)
    for i in range(50):
        s.add(of_tenant("noisy", str(i)))
    step(s)
    for i in range(50):
        s.add(of_tenant("other", str(i)))
    for _ in range(8):
        answered(s)
        step(s)
    assert running(s) == {"noisy": 4, "other": 4}
    num_preemptions = s.num_preemptions
    for _ in range(8):
        answered(s)
        step(s)
    assert (running(s), s.num_preemptions) == ({"noisy": 4, "other": 4}, num_preemptions)


def test_a_tenant_alone_gives_room_to_nobody():
    s = scheduler(max_num_seqs=4)
    for i in range(20):
        s.add(of_tenant("only", str(i)))
    for _ in range(5):
        step(s)
        answered(s)
    assert s.num_preemptions == 0


def test_room_for_a_tenant_is_made_of_blocks_too():
    s = scheduler(num_blocks=16)
    for i in range(4):
        s.add(of_tenant("noisy", str(i), 60))
    step(s)
    answered(s)
    s.add(of_tenant("quiet", "first", 60))
    assert step(s)["quiet first"] == 60
    assert running(s) == {"noisy": 3, "quiet": 1}


def test_a_tenant_that_runs_fewer_comes_before_what_was_preempted_of_another():
    s = scheduler(num_blocks=16)
    for i in range(4):
        s.add(of_tenant("noisy", str(i), 60))
    while not s.num_preemptions:
        step(s)
        answered(s)
    s.add(of_tenant("quiet", "first", 10))
    assert step(s)["quiet first"] == 10


def test_a_tenant_that_runs_fewer_has_its_prompt_in_a_step_before_the_long_prompts_of_another():
    s = scheduler()
    for i in range(4):
        s.add(of_tenant("noisy", str(i), 4000))
    assert step(s) == {"noisy 0": 4000, "noisy 1": 4000, "noisy 2": 192}
    s.add(of_tenant("quiet", "first", 100))
    assert step(s) == {"noisy 0": 1, "noisy 1": 1, "quiet first": 100, "noisy 2": 410}


def test_when_blocks_run_out_the_tenant_that_runs_most_gives_way():
    s = scheduler(num_blocks=16)
    for i in range(3):
        s.add(of_tenant("noisy", str(i), 60))
    s.add(of_tenant("quiet", "first", 60))
    step(s)
    while not s.num_preemptions:
        answered(s)
        step(s)
    assert running(s) == {"noisy": 2, "quiet": 1}


def test_what_a_step_under_way_computes_is_not_preempted_and_the_next_step_waits_for_it():
    s = scheduler(max_num_seqs=2)
    for i in range(4):
        s.add(of_tenant("noisy", str(i)))
    chunks = s.schedule()
    s.launched(chunks)
    s.add(of_tenant("quiet", "first"))
    assert not s.may_preempt
    assert "quiet first" not in step(s, in_flight=chunks)
    assert s.may_preempt, "the engine has to wait for the tokens"
    answered(s)
    assert "quiet first" in step(s)
    assert not s.may_preempt


def test_no_room_is_made_for_a_tenant_whose_adapter_is_not_at_hand():
    slots = SlotsForAll()
    s = scheduler(max_num_seqs=2, loras=slots)
    for i in range(4):
        s.add(of_tenant("noisy", str(i), lora=lora("hot")))
    step(s)
    answered(s)
    slots.absent.add("cold")
    s.add(of_tenant("quiet", "first", lora=lora("cold")))
    assert "quiet first" not in step(s)
    assert s.num_preemptions == 0


def test_a_tenant_does_not_wait_for_a_slot_that_another_s_long_answers_hold():
    slots = SlotsForAll()
    s = scheduler(loras=slots)
    for name in ("hot", "hot", "warm"):
        s.add(of_tenant("noisy", f"{name} {len(s.waiting)}", lora=lora(name)))
    step(s)
    answered(s)
    slots.absent.add("cold")
    slots.claimed = {slots.of["warm"].index}
    s.add(of_tenant("quiet", "first", lora=lora("cold")))
    step(s)
    assert [one.request_id for one in s.running] == ["noisy hot 0", "noisy hot 1"], "the slot has nobody"
    slots.absent.clear()
    answered(s)
    assert "quiet first" in step(s)


def test_a_tenant_with_ever_new_requests_does_not_keep_a_slot_that_drains_for_another():
    slots = SlotsForAll()
    s = scheduler(loras=slots)
    for i in range(5):
        s.add(of_tenant("noisy", str(i)))
    s.add(of_tenant("quiet", "first", lora=lora("warm")))
    step(s)
    slots.absent.add("cold")
    slots.claimed = {slots.of["warm"].index}
    s.add(of_tenant("other", "first", lora=lora("cold")))
    s.add(of_tenant("quiet", "second", lora=lora("warm")))
    for _ in range(3):
        answered(s)
        assert "quiet second" not in step(s)


def test_a_slot_is_not_taken_from_a_tenant_that_runs_as_few():
    slots = SlotsForAll()
    s = scheduler(loras=slots)
    for tenant, adapter in (("noisy", "hot"), ("noisy", "hot"), ("noisy", "hot"), ("other", "warm")):
        s.add(of_tenant(tenant, f"{len(s.waiting)}", lora=lora(adapter)))
    step(s)
    answered(s)
    slots.absent.add("cold")
    slots.claimed = {slots.of["warm"].index}
    s.add(of_tenant("quiet", "first", lora=lora("cold")))
    step(s)
    assert running(s) == {"noisy": 3, "other": 1}


def test_a_part_of_a_prompt_that_is_under_way_is_not_preempted_either():
    s = scheduler(max_num_seqs=2, most=16)
    s.add(of_tenant("noisy", "short", 10))
    s.add(of_tenant("noisy", "long", 100))
    step(s)
    answered(s)
    chunks = s.schedule()
    s.launched(chunks)
    s.add(of_tenant("quiet", "first", 5))
    assert "quiet first" not in step(s, in_flight=chunks)
    assert s.may_preempt
    answered(s)
    assert "quiet first" in step(s)


def test_a_tenant_does_not_take_the_blocks_that_those_under_way_need_next():
    s = scheduler(num_blocks=16)
    for i in range(3):
        s.add(of_tenant("noisy", str(i), 16))
    chunks = s.schedule()
    s.launched(chunks)
    s.add(of_tenant("quiet", "first", 11 * 16))
    assert not s.may_preempt
    assert "quiet first" not in step(s, in_flight=chunks)
    assert (s.num_preemptions, s.may_preempt) == (0, True)
    answered(s)
    assert "quiet first" in step(s)


def test_a_tenant_may_wait_with_a_preempted_sequence_alone():
    s = scheduler()
    for i in range(3):
        s.add(of_tenant("rich", str(i)))
    poor = of_tenant("poor", "only")
    s.add(poor)
    step(s)
    answered(s)
    s.preempt(poor)
    assert "poor only" in step(s)


@pytest.mark.parametrize("seed", range(8))
def test_a_step_in_flight_is_never_preempted(seed):
    rng = random.Random(seed)
    s = scheduler(num_blocks=60, max_num_seqs=20, most=64, mixed=48, caching=seed % 2 == 0)
    driven = SteppedScheduler(s, Events(stops=lambda _: rng.random() < 0.02))
    tenants = ["one"] if seed < 4 else ["one", "one", "one", "two", "three"]
    for number in range(2000):
        if len(s.waiting) < 4:
            name = str(rng.randrange(3)) * rng.randrange(1, 9)  # its length is its token
            added = of_tenant(rng.choice(tenants), name, rng.randrange(1, 90), max_tokens=rng.randrange(1, 80))
            added.request_id += f" {number}"
            s.add(added)
        driven.step()
    assert len(driven.finished) > 300
    assert s.num_preemptions > 20, "the cache was full"


def test_steps_overlap_though_fewer_blocks_are_free_than_sequences_run():
    s = scheduler(num_blocks=66)
    for i in range(16):
        s.add(sequence(f"stream {i}", 33 + i))  # their blocks are full one after the other
    driven = SteppedScheduler(s)
    while s.kv.num_free > 8:
        driven.step()
    driven.num_waits = 0
    for _ in range(6):
        driven.step()
    assert (driven.num_waits, s.num_preemptions) == (0, 0)


def test_a_start_leaves_blocks_for_the_sequences_that_run():
    s = scheduler(num_blocks=640, most=16384)
    for i in range(16):
        s.add(sequence(f"stream {i}", 600))
    step(s)
    s.add(sequence("new", 200))  # 13 blocks of the 32 that are free
    step(s)
    assert len(s.running) == 16
    finish(s, "stream 0")
    assert "new" in step(s)
    for _ in range(40):
        step(s)
    assert s.num_preemptions == 0


def test_a_start_leaves_no_more_than_those_that_run_may_still_need():
    s = scheduler(num_blocks=640, most=16384)
    for i in range(16):
        s.add(sequence(f"stream {i}", 600, max_tokens=8))
    step(s)
    s.add(sequence("new", 32 * 16))
    assert "new" in step(s)


def test_a_sequence_alone_may_take_the_whole_cache():
    s = scheduler(num_blocks=64)
    s.add(sequence("large", 1024))
    assert step(s) == {"large": 1024}


def test_a_decode_has_the_same_chunk_in_each_step_and_still_gets_its_blocks_and_its_end():
    s = scheduler()
    s.add(sequence("answer", 30, max_tokens=40))
    step(s)
    [first] = s.schedule()
    assert first is first.sequence.next_chunk
    for _ in range(39):
        assert s.schedule() == [first]
        assert first.sequence.blocks is not None
        assert len(first.sequence.blocks.table) == -(-len(first.sequence.tokens) // 16)
        s.launched([first])
    assert s.schedule() == []  # all of its tokens are known or in flight
    s.finish(first.sequence)
    assert first.sequence.next_chunk is None
