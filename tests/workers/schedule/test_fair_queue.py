"""Whose request starts next. A server that takes one request at a time stands for the engine; what the scheduler makes
of it is in test_scheduler.py."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator

import pytest

from lorafleet.protocol.limits import BACKGROUND
from lorafleet.protocol.lora_request import LoRARequest
from lorafleet.protocol.sampling_params import SamplingParams
from lorafleet.workers.schedule.fair_queue import MAX_IDLE_FLOWS, OUTPUT_WEIGHT, PROMPT_WEIGHT, FairQueue
from lorafleet.workers.schedule.kv_cache import SequenceBlocks
from lorafleet.workers.schedule.sequence import Sequence


def sequence(adapter: str, name: str = "r", num_prompt: int = 10) -> Sequence:
    """adapter: "" is the base."""
    lora = LoRARequest(adapter, 1, "/", digest=adapter) if adapter else None
    return Sequence(name, [1] * num_prompt, num_prompt, SamplingParams(), seed=0, max_tokens=100, lora=lora)


def serve_next(queue: FairQueue, in_slots: frozenset[str] = frozenset(), num_output: int = 0) -> Sequence:
    """The whole request at once."""
    queue.sort(in_slots)
    chosen = next(queue.in_start_order())
    queue.start(chosen)
    for _ in range(num_output):
        queue.count_outputs([chosen.flow])
    chosen.blocks = SequenceBlocks(0, 0)
    queue.finish(chosen)
    return chosen


def adapter_of(one: Sequence) -> str:
    return one.lora.digest if one.lora is not None else ""


def cost(one: Sequence, num_output: int) -> int:
    return PROMPT_WEIGHT * one.num_prompt + OUTPUT_WEIGHT * num_output


@pytest.mark.parametrize("seed", range(20))
def test_backlogged_adapters_get_the_same_service_up_to_a_bound_whatever_they_ask_for(seed):
    rng = random.Random(seed)
    queue = FairQueue(slot_credit=0)
    adapters = ["", *(f"a{i}" for i in range(rng.randrange(1, 8)))]
    sizes = {adapter: rng.randrange(1, 60) for adapter in adapters}  # some ask for long prompts, others for short ones
    waiting = Counter[str]()
    served = Counter[str]()
    dearest = 2 * (PROMPT_WEIGHT * 60 + OUTPUT_WEIGHT * 40)
    for _ in range(600):
        for adapter in adapters:
            for _ in range(rng.randrange(4) if waiting[adapter] > 2 else 3):
                queue.add(sequence(adapter, num_prompt=rng.randrange(1, sizes[adapter] + 1)))
                waiting[adapter] += 1
        num_output = rng.randrange(40)
        one = serve_next(queue, num_output=num_output)
        waiting[adapter_of(one)] -= 1
        served[adapter_of(one)] += cost(one, num_output)
        assert max(served.values()) - min(served[a] for a in adapters) <= dearest


@pytest.mark.parametrize("seed", range(10))
def test_nobody_starves_and_order_within_an_adapter_holds_while_adapters_come_and_go(seed):
    rng = random.Random(seed)
    queue = FairQueue(slot_credit=50)
    numbers = Counter[str]()
    next_of = Counter[str]()
    age: dict[str, int] = {}
    for turn in range(3000):
        hot = [f"hot{rng.randrange(2)}"] * 3
        for adapter in [*hot, *([f"cold{rng.randrange(400)}"] if rng.random() < 0.3 else [])][: 1 + (turn < 2500) * 3]:
            queue.add(sequence(adapter, f"{numbers[adapter]}", rng.randrange(1, 30)))
            age.setdefault(f"{adapter}/{numbers[adapter]}", turn)
            numbers[adapter] += 1
        one = serve_next(queue, frozenset({"hot0", "hot1"}), rng.randrange(20))
        adapter = adapter_of(one)
        assert one.request_id == str(next_of[adapter]), "first come, first served within an adapter"
        next_of[adapter] += 1
        waited = turn - age.pop(f"{adapter}/{one.request_id}")
        assert not adapter.startswith("cold") or waited < 150, (adapter, waited)
    while queue:
        serve_next(queue)
    assert (len(queue), queue.num_tokens, list(queue)) == (0, 0, [])


def test_an_adapter_alone_is_served_without_a_pause():
    queue = FairQueue(slot_credit=0)
    for i in range(50):
        queue.add(sequence("only", str(i)))
    assert [serve_next(queue).request_id for _ in range(50)] == [str(i) for i in range(50)]


def test_idling_saves_up_nothing():
    queue = FairQueue(slot_credit=0)
    queue.add(sequence("late"))
    serve_next(queue)
    for i in range(200):
        queue.add(sequence("busy", str(i)))
    for _ in range(100):
        serve_next(queue)
    for i in range(100):
        queue.add(sequence("late", str(i)))
    turns = [adapter_of(serve_next(queue)) for _ in range(20)]
    assert turns.count("late") in (10, 11), "it does not make up for the time in which it asked for nothing"


def test_having_been_idle_does_not_wipe_out_what_an_adapter_had():
    queue = FairQueue(slot_credit=0)
    queue.add(sequence("small"))
    queue.add(sequence("small"))
    queue.add(sequence("greedy", num_prompt=1000))
    assert {adapter_of(serve_next(queue)) for _ in range(2)} == {"small", "greedy"}
    for i in range(20):
        queue.add(sequence("small", str(i)))
    queue.add(sequence("greedy"))
    assert [adapter_of(serve_next(queue)) for _ in range(20)] == ["small"] * 20


def test_answer_tokens_are_paid_for_while_they_come():
    queue = FairQueue(slot_credit=0)
    for name in ("one", "two"):
        queue.add(sequence("long", name))
        queue.add(sequence("short", name))
    queue.sort(())
    turns = queue.in_start_order()
    running = next(turns)
    queue.start(running)
    queue.start(next(turns))
    for _ in range(50):
        queue.count_outputs([running.flow])
    other = {"long": "short", "short": "long"}[adapter_of(running)]
    assert adapter_of(serve_next(queue)) == other


def test_preempted_ones_come_first_and_pay_once():
    queue = FairQueue(slot_credit=0)
    queue.add(sequence("a", "early", 100))
    preempted = serve_next_unfinished(queue)
    queue.add(sequence("b", "waiting"))
    queue.add_preempted(preempted)
    assert queue.heads()[0] is preempted and len(queue) == 2
    queue.sort(())
    assert next(queue.in_start_order()) is preempted
    queue.start(preempted)
    queue.add(sequence("a", "later"))
    queue.add(sequence("b", "later"))
    assert [adapter_of(serve_next(queue)) for _ in range(3)].count("b") == 2


def serve_next_unfinished(queue: FairQueue) -> Sequence:
    queue.sort(())
    chosen = next(queue.in_start_order())
    queue.start(chosen)
    return chosen


def test_an_adapter_that_cannot_start_is_passed_over_and_keeps_its_turn():
    queue = FairQueue(slot_credit=0)
    for adapter in ("stuck", "a", "b"):
        for i in range(2):
            queue.add(sequence(adapter, str(i)))

    def one_pass(starting: set[str]) -> Iterator[str]:
        queue.sort(())
        for head in queue.in_start_order():
            yield f"{adapter_of(head)}{head.request_id}"
            if adapter_of(head) in starting:
                queue.start(head)

    assert list(one_pass({"a", "b"})) == ["stuck0", "a0", "b0", "a1", "b1"]
    assert list(one_pass({"stuck"})) == ["stuck0", "stuck1"]


def test_adapters_in_slots_are_ahead_by_the_credit_and_no_more():
    queue = FairQueue(slot_credit=100)
    for i in range(30):
        queue.add(sequence("in slot", str(i), 10))
        queue.add(sequence("elsewhere", str(i), 10))
    turns = [adapter_of(serve_next(queue, frozenset({"in slot"}))) for _ in range(20)]
    assert turns[:10] == ["in slot"] * 10
    assert turns[11:].count("elsewhere") in (4, 5)


def test_the_heads_come_in_the_order_of_their_turns():
    rng = random.Random(1)
    queue = FairQueue(slot_credit=40)
    for i in range(300):
        queue.add(sequence(f"a{rng.randrange(30)}", str(i), rng.randrange(1, 50)))
    for _ in range(100):
        serve_next(queue, frozenset({"a1", "a2"}))
    queue.sort({"a1", "a2"})
    assert queue.heads() == list(queue.in_start_order())


def test_aborted_ones_leave_wherever_they_are():
    queue = FairQueue(slot_credit=0)
    waiting, first = sequence("a", "waiting"), sequence("a", "first")
    for one in (first, waiting):
        queue.add(one)
    preempted = serve_next_unfinished(queue)
    queue.add_preempted(preempted)
    for one in (waiting, preempted):
        queue.finish(one)
    assert (len(queue), list(queue), queue.num_tokens) == (0, [], 0)


def test_adapters_that_are_idle_are_forgotten():
    queue = FairQueue(slot_credit=0)
    for i in range(20 * MAX_IDLE_FLOWS):
        queue.add(sequence(f"cold{i}"))
        serve_next(queue)
    assert len(queue._flows) <= 2 * MAX_IDLE_FLOWS


@pytest.mark.parametrize("num_adapters", [10, 1000])
def test_a_pass_over_a_thousand_waiting_requests_takes_well_under_a_step(num_adapters):
    queue = FairQueue(slot_credit=2048)
    rng = random.Random(1)
    for i in range(1000):
        queue.add(sequence(f"a{rng.randrange(num_adapters)}", str(i), rng.randrange(1, 500)))
    in_slots = {f"a{i}" for i in range(8)}
    times = []
    for _ in range(50):
        started = time.perf_counter()
        queue.sort(in_slots)
        queue.heads()
        assert sum(1 for _ in queue.in_start_order()) == len(queue.heads())
        times.append(time.perf_counter() - started)
    assert min(times) < 10e-3


def test_priority_orders_an_adapters_requests_and_takes_no_turn_from_another():
    queue = FairQueue(slot_credit=0)
    for name, priority in (("first", 0), ("late", 5), ("second", 0), ("urgent", -1), ("later", 5)):
        one = sequence("a", name)
        one.priority = priority
        queue.add(one)
    queue.add(sequence("b", "other"))
    order = [serve_next(queue, num_output=1).request_id for _ in range(6)]
    assert [name for name in order if name != "other"] == ["urgent", "first", "second", "late", "later"]
    assert order.index("other") == 1


def in_background(one: Sequence) -> Sequence:
    one.priority = BACKGROUND
    return one


def test_the_background_starts_after_all_tenants_and_adapters_and_shares_what_is_left():
    queue = FairQueue(slot_credit=0)
    for _ in range(2):
        queue.add(in_background(of_tenant("idle", "a", "background")))
        queue.add(in_background(of_tenant("busy", "b", "background")))
    assert not queue.waiting_tenants()  # Nothing may be preempted for them.
    for _ in range(3):
        for _ in range(4):
            queue.add(of_tenant("busy", "a", "foreground", num_prompt=50))
        assert [serve_next(queue).request_id for _ in range(4)] == ["foreground"] * 4
    assert queue.tokens_of("busy") == 20
    assert [serve_next(queue).tenant for _ in range(4)] in (["idle", "busy"] * 2, ["idle", "busy", "busy", "idle"])
    assert not len(queue)


def test_a_starved_background_gives_nobody_turns():
    queue = FairQueue(slot_credit=0)
    queue.add(in_background(of_tenant("x", "a", "background")))
    for _ in range(9):
        queue.add(of_tenant("x", "a", "first"))
    for _ in range(5):
        serve_next(queue)
    for _ in range(4):
        queue.add(of_tenant("y", "b", "second"))  # It has saved up nothing.
    assert Counter(serve_next(queue).request_id for _ in range(4)) == {"first": 2, "second": 2}


def of_tenant(tenant: str, adapter: str, name: str = "r", num_prompt: int = 10) -> Sequence:
    made = sequence(adapter, name, num_prompt)
    made.tenant = tenant
    return made


def test_a_tenant_gains_nothing_by_ever_new_adapters():
    queue = FairQueue(slot_credit=100)
    served = Counter[str]()
    for i in range(1000):
        queue.add(of_tenant("noisy", f"new {i}"))
        queue.add(of_tenant("noisy", f"new too {i}"))
        queue.add(of_tenant("quiet", "own"))
        served[serve_next(queue, frozenset({"own"}), num_output=5).tenant] += 1
    assert abs(served["noisy"] - served["quiet"]) <= 2 * 100 // cost(sequence(""), 5) + 1


def test_two_tenants_requests_for_one_adapter_belong_to_different_flows():
    queue = FairQueue(slot_credit=0)
    for i in range(20):
        queue.add(of_tenant("noisy", "public", str(i)))
    queue.add(of_tenant("quiet", "public", "first"))
    assert [serve_next(queue).tenant for _ in range(2)].count("quiet") == 1


def test_a_tenant_that_comes_back_has_not_saved_up_turns():
    queue = FairQueue(slot_credit=0)
    for i in range(40):
        queue.add(of_tenant("busy", "a", str(i)))
    for _ in range(20):
        serve_next(queue)
    for i in range(20):
        queue.add(of_tenant("back", "b", str(i)))
    assert Counter(serve_next(queue).tenant for _ in range(20)) == {"busy": 10, "back": 10}


def test_the_tenant_that_room_was_made_for_comes_first():
    queue = FairQueue(slot_credit=0)
    for tenant in ("noisy", "quiet"):
        queue.add(of_tenant(tenant, "a"))
    queue.sort(())
    assert [one.tenant for one in queue.in_start_order("quiet")] == ["quiet", "noisy"]
    assert [one.tenant for one in queue.in_start_order()] == ["noisy", "quiet"]


def test_waiting_tokens_are_counted_by_tenant():
    queue = FairQueue(slot_credit=0)
    for tenant, num_prompt in (("noisy", 30), ("noisy", 40), ("quiet", 5)):
        queue.add(of_tenant(tenant, "a", num_prompt=num_prompt))
    assert [queue.tokens_of(tenant) for tenant in ("noisy", "quiet", "nobody")] == [70, 5, 0]
    while queue:
        serve_next(queue)
    assert queue.waiting_tenants() == []
