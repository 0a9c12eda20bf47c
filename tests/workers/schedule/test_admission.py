from __future__ import annotations

import gc
import pickle
import weakref

import pytest

from lorafleet.protocol.errors import EngineDead, Overloaded, QueueFull, QueueTimeout, from_wire, to_wire
from lorafleet.protocol.messages import EngineRequest
from lorafleet.protocol.sampling_params import SamplingParams
from lorafleet.workers.bases.rope_config import RopeConfig
from lorafleet.workers.schedule.admission import MAX_RETRY_S, SPARE_DEADLINES, QueueAdmission
from lorafleet.workers.schedule.kv_cache import KVCacheManager
from lorafleet.workers.schedule.scheduler import Scheduler
from lorafleet.workers.schedule.sequence import Sequence
from lorafleet.workers.schedule.step_budget import StepBudget, StepLimits


class Queue:
    """A scheduler that runs two sequences at a time, and its admission, with a clock of its own."""

    def __init__(self, max_queued: int | None, max_tokens: int | None = None) -> None:
        self.now = 1000.0
        rope = RopeConfig(rotary_dim=8, theta=10000.0, max_position_embeddings=16384)
        budget = StepBudget(StepLimits(8192, 512))
        self.scheduler = Scheduler(KVCacheManager(4096, 16, False), None, rope, 2, budget)
        self.admission = QueueAdmission(self.scheduler, max_queued, max_tokens, lambda: self.now)

    def add(
        self,
        name: str,
        group: str = "",
        timeout_s: float | None = None,
        num_prompt: int = 10,
        tenant: str = "",
        num_in_group: int = 1,
    ) -> Sequence:
        params, prompt = SamplingParams(), [1] * num_prompt
        request = EngineRequest(
            request_id=name,
            prompt_token_ids=prompt,
            params=params,
            group=group,
            group_sequences=num_in_group,
            group_tokens=num_in_group * num_prompt,
            tenant=tenant,
        )
        joined = self.admission.join(request)
        added = Sequence(name, prompt, num_prompt, params, 0, 100, group=joined, tenant=tenant)
        self.scheduler.add(added)
        self.admission.queued(added, timeout_s)
        return added

    def end(self, sequence: Sequence) -> None:
        self.scheduler.finish(sequence)
        self.admission.left(sequence)

    def step(self, seconds: float = 0.0) -> list[str]:
        """Names of those whose time is up."""
        self.now += seconds
        self.scheduler.launched(self.scheduler.schedule())
        refused = [sequence for sequence, _ in self.admission.expired()]
        for sequence in refused:
            self.end(sequence)
        return [sequence.request_id for sequence in refused]


def test_as_many_wait_as_may_beside_those_that_run():
    queue = Queue(max_queued=3)
    waiting = [queue.add(str(i)) for i in range(5)]
    with pytest.raises(QueueFull, match="max_queued_requests=3"):
        queue.add("6th")
    queue.step()
    with pytest.raises(QueueFull):
        queue.add("6th")
    queue.end(waiting[4])
    queue.add("6th")


def test_without_a_queue_only_what_can_run_is_taken():
    queue = Queue(max_queued=0)
    queue.add("one")
    queue.add("two")
    with pytest.raises(QueueFull):
        queue.add("three")


def test_as_many_tokens_wait_as_may_and_what_is_longer_by_itself_starts_where_nothing_waits():
    queue = Queue(max_queued=None, max_tokens=100)
    queue.add("long", num_prompt=500)
    with pytest.raises(
        QueueFull, match=r"500 tokens wait on this replica; with this request's 10 .*max_queued_tokens=100"
    ):
        queue.add("short", num_prompt=10)
    queue.step()  # it runs, and so nothing waits
    queue.add("second", num_prompt=200)
    queue.step()
    third, fourth = queue.add("third", num_prompt=60), queue.add("fourth", num_prompt=40)
    with pytest.raises(QueueFull, match="max_queued_tokens=100"):
        queue.add("fifth", num_prompt=1)
    assert queue.admission.refused == {"tokens": 2}
    queue.end(third)
    queue.add("fifth", num_prompt=60)
    assert [one.request_id for one in queue.scheduler.waiting] == [fourth.request_id, "fifth"]


def test_what_is_refused_is_counted_by_its_bound():
    queue = Queue(max_queued=1, max_tokens=30)
    for name in ("running 1", "running 2"):
        queue.add(name)
    queue.step()
    queue.add("waits", timeout_s=1.0)
    with pytest.raises(QueueFull, match="max_queued_requests=1"):
        queue.add("one more", num_prompt=100)
    assert queue.step(2.0) == ["waits"]
    assert queue.admission.refused == {"requests": 1, "deadline": 1}


def test_without_a_bound_nothing_is_refused():
    queue = Queue(max_queued=None)
    for i in range(5000):
        queue.add(str(i))


def test_a_request_is_refused_at_its_first_sequence_or_not_at_all():
    queue = Queue(max_queued=0)
    samples = [queue.add(f"s{i}", group="many") for i in range(10)]
    with pytest.raises(QueueFull):
        queue.add("other", group="other")
    for sample in samples:
        queue.end(sample)
    queue.add("other", group="other")


def test_all_sequences_of_a_request_count_for_the_queue():
    queue = Queue(max_queued=3)
    queue.add("alone")
    with pytest.raises(QueueFull, match="this one's 5"):
        queue.add("s0", group="many", num_in_group=5)
    samples = [queue.add(f"s{i}", group="few", num_in_group=4) for i in range(4)]
    with pytest.raises(QueueFull):
        queue.add("other")
    for sample in samples:
        queue.end(sample)
    queue.step()
    queue.add("s0", group="many", num_in_group=50)  # more than ever fit may begin where nothing waits


def test_the_tokens_of_all_sequences_of_a_request_count_for_the_queue():
    queue = Queue(max_queued=None, max_tokens=100)
    queue.add("first", num_prompt=10)
    with pytest.raises(QueueFull, match="with this request's 120"):
        queue.add("s0", group="many", num_prompt=40, num_in_group=3)
    queue.add("s0", group="few", num_prompt=40, num_in_group=2)


def test_who_has_not_started_when_its_time_is_up_is_refused_and_the_rest_runs_on():
    queue = Queue(max_queued=None)
    for name in ("running 1", "running 2"):
        queue.add(name, timeout_s=1.0)
    assert queue.step() == []
    queue.add("short", timeout_s=1.0)
    queue.add("long", timeout_s=5.0)
    queue.add("patient")
    assert queue.step(0.9) == []
    assert queue.step(0.2) == ["short"]
    assert queue.step(5.0) == ["long"]
    assert queue.step(1000.0) == []
    assert [one.request_id for one in queue.scheduler.running] == ["running 1", "running 2"]
    assert [one.request_id for one in queue.scheduler.waiting] == ["patient"]


def test_no_time_at_all_is_enough_where_there_is_room():
    queue = Queue(max_queued=None)
    queue.add("now", timeout_s=0.0)
    queue.add("too", timeout_s=0.0)
    queue.add("never", timeout_s=0.0)
    assert queue.step() == ["never"]


def test_a_request_that_has_started_with_one_sequence_keeps_the_others():
    queue = Queue(max_queued=None)
    first = queue.add("first", group="a", timeout_s=1.0)
    queue.add("other")
    queue.add("second", group="a", timeout_s=1.0)
    assert queue.step() == []
    queue.end(first)  # it has started, and even ended
    queue.add("third", group="a", timeout_s=1.0)
    queue.add("late", group="b", timeout_s=1.0)
    queue.scheduler.max_num_seqs = 1
    assert queue.step(2.0) == ["late"]


def test_a_preempted_sequence_is_not_refused():
    queue = Queue(max_queued=None)
    started = queue.add("started", timeout_s=1.0)
    queue.step()
    queue.scheduler.preempt(started)
    queue.scheduler.max_num_seqs = 0
    assert queue.step(10.0) == []
    assert list(queue.scheduler.waiting) == [started]


def test_retry_after_is_what_the_backlog_takes_at_the_rate_of_service():
    queue = Queue(max_queued=0)
    for i in range(50):
        queue.add(f"a{i}", group="many", num_prompt=100)
    for _ in range(20):  # two requests of 100 tokens every 4 s
        queue.step(4.0)
        for one in list(queue.scheduler.running):
            queue.end(one)
    assert queue.scheduler.waiting.num_tokens == 1000
    with pytest.raises(QueueFull) as refused:
        queue.add("x")
    assert refused.value.retry_after_s == pytest.approx(20.0, rel=0.1)
    queue.now += 3600  # idle hours say nothing of the rate
    for one in list(queue.scheduler.waiting):
        queue.end(one)
    assert queue.admission.retry_after_s() == 1.0


def test_retry_after_has_bounds_where_nothing_is_known_and_where_nothing_moves():
    queue = Queue(max_queued=None)
    assert queue.admission.retry_after_s() == 1.0
    queue.scheduler.max_num_seqs = 0
    queue.add("stuck")
    queue.step()
    queue.step(10.0)
    assert queue.admission.retry_after_s() == 10.0
    queue.step(500.0)
    assert queue.admission.retry_after_s() == MAX_RETRY_S


def test_retry_after_crosses_processes():
    for copied in (
        from_wire(to_wire(QueueTimeout("late", None, 7.5))),
        pickle.loads(pickle.dumps(QueueFull("x", "p", 3))),
    ):
        assert isinstance(copied, Overloaded)
        assert (type(copied), copied.message, copied.retry_after_s) in (
            (QueueTimeout, "late", 7.5),
            (QueueFull, "x", 3),
        )
    assert type(from_wire(to_wire(EngineDead("gone")))) is EngineDead


def test_a_sequence_that_has_ended_is_not_kept_until_its_deadline():
    queue = Queue(max_queued=None)
    for name in ("running 1", "running 2"):
        queue.add(name)
    queue.step()
    queue.add("late", timeout_s=5.0)
    left = [queue.add(f"left {i}", timeout_s=1e9) for i in range(1000)]
    references = [weakref.ref(sequence) for sequence in left]
    while left:
        queue.end(left.pop())
    gc.collect()
    assert not any(reference() for reference in references)
    assert len(queue.admission._deadlines) <= SPARE_DEADLINES + 2
    assert queue.step(5.0) == ["late"]
    assert queue.step(2e9) == []


def test_a_queue_that_one_tenant_has_filled_still_takes_another_s_share():
    queue = Queue(max_queued=6)  # beside two that run: places for eight
    for i in range(8):
        queue.add(str(i), tenant="noisy")
    with pytest.raises(QueueFull):
        queue.add("9th", tenant="noisy")
    taken = [queue.add(f"quiet {i}", tenant="quiet") for i in range(4)]
    with pytest.raises(QueueFull, match="max_queued_requests=6"):
        queue.add("quiet 5th", tenant="quiet")
    queue.end(taken[0])
    queue.add("quiet 5th", tenant="quiet")
    with pytest.raises(QueueFull):
        queue.add("9th", tenant="noisy")


def test_so_it_is_with_tokens():
    queue = Queue(max_queued=None, max_tokens=100)
    queue.add("1st", num_prompt=100, tenant="noisy")
    with pytest.raises(QueueFull):
        queue.add("2nd", num_prompt=1, tenant="noisy")
    queue.add("quiet", num_prompt=50, tenant="quiet")
    with pytest.raises(QueueFull, match="max_queued_tokens=100"):
        queue.add("quiet too", num_prompt=1, tenant="quiet")
