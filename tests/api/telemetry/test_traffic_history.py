"""The console's time series: true to what was counted, bounded whatever is asked for, and separate by tenant."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lorafleet.api.telemetry.traffic_history import (
    BUCKET_S,
    MAX_BUSIEST,
    MAX_NAMES,
    MAX_REPORTS,
    MAX_TENANTS,
    NUM_BUCKETS,
    TrafficHistory,
)
from lorafleet.protocol.messages import AdapterMove

START = 1000 * BUCKET_S


class Clock:
    now_s = float(START)

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def history(clock: Clock) -> TrafficHistory:
    return TrafficHistory(clock)


def count(
    history: TrafficHistory, name: str = "sql", tenant: str | None = None, tokens: int = 20, duration_s: float = 0.1
) -> None:
    history.count(tenant, name, 10, tokens, 0.1, duration_s, failed=False)


def pass_buckets(clock: Clock, number: int = 1) -> None:
    clock.now_s += number * BUCKET_S


def sizes(history: TrafficHistory) -> Iterator[tuple[int, int]]:
    """The tenants and the names of each bucket."""
    for bucket in history._buckets.values():
        yield len(bucket.by_tenant), sum(len(one.by_name) for one in bucket.by_tenant.values())


def test_a_bucket_is_shown_when_it_is_complete(history: TrafficHistory, clock: Clock) -> None:
    count(history)
    assert history.report(None, of_all=True).traffic == {}
    pass_buckets(clock)
    [(number, traffic)] = history.report(None, of_all=True).traffic.items()
    assert (number, traffic.requests, traffic.prompt_tokens, traffic.generated_tokens) == (1000, 1, 10, 20)
    assert traffic.first_token_s(0.5) == pytest.approx(0.1, rel=0.06)


def test_the_tokens_of_a_long_answer_are_spread_over_its_time(history: TrafficHistory, clock: Clock) -> None:
    pass_buckets(clock, 3)
    count(history, tokens=103, duration_s=0.1 + 3 * BUCKET_S)
    pass_buckets(clock)
    traffic = history.report(None, of_all=True).traffic
    series = [traffic[1000 + number] for number in range(4)]
    assert [one.generated_tokens for one in series] == [25, 25, 25, 28]
    assert [one.requests for one in series] == [0, 0, 0, 1]
    assert [bool(one.first_token) for one in series] == [True, False, False, False]


def test_an_answer_longer_than_the_window_stays_in_the_window(history: TrafficHistory) -> None:
    count(history, tokens=1000, duration_s=1e9)
    assert len(history._buckets) == NUM_BUCKETS
    assert min(history._buckets) == 1000 - NUM_BUCKETS + 1


def test_time_may_pass_while_a_sequence_is_counted() -> None:
    times = iter(range(START, START + 100 * BUCKET_S, BUCKET_S))
    history = TrafficHistory(lambda: next(times))
    count(history)
    count(history)
    assert sum(one.requests for one in history.report(None, of_all=True).traffic.values()) == 2


def test_a_request_without_a_token_has_no_latency(history: TrafficHistory, clock: Clock) -> None:
    history.count(None, "sql", 10, 0, None, 3.0, failed=True)
    pass_buckets(clock)
    [traffic] = history.report(None, of_all=True).traffic.values()
    assert (traffic.requests, traffic.failed, traffic.first_token) == (1, 1, {})


def test_the_ring_is_bounded_whatever_the_clock_does(history: TrafficHistory, clock: Clock) -> None:
    for _ in range(3 * NUM_BUCKETS):
        count(history, duration_s=60.0)
        pass_buckets(clock)
    assert len(history._buckets) <= NUM_BUCKETS + 1
    assert len(history.report(None, of_all=True).traffic) == NUM_BUCKETS
    clock.now_s -= 3600.0
    count(history)
    assert set(history._buckets) == {int(clock.now_s // BUCKET_S)}
    clock.now_s += 1e6
    assert history.report(None, of_all=True).traffic == {}
    assert history._buckets == {}


def test_thousands_of_adapters_and_tenants_grow_nothing_and_the_total_has_all(
    history: TrafficHistory, clock: Clock
) -> None:
    for number in range(5000):
        count(history, f"adapter-{number}", f"tenant-{number % 500}")
    [(num_tenants, num_names)] = sizes(history)
    assert num_tenants <= MAX_TENANTS + 1
    assert num_names == MAX_NAMES
    pass_buckets(clock)
    report = history.report(None, of_all=True)
    [traffic] = report.traffic.values()
    assert traffic.requests == 5000
    assert len(report.adapters) == MAX_BUSIEST + 1, "the base as well"
    for number in range(3 * MAX_REPORTS):
        history.report(f"tenant-{number}", of_all=False)
    assert len(history._reports) <= MAX_REPORTS


def test_a_frequent_adapter_is_found_among_thousands_of_rare_ones_and_none_is_overrated(
    history: TrafficHistory, clock: Clock
) -> None:
    for number in range(6000):
        count(history, f"rare-{number}")
        if number % 10 == 0:
            count(history, "frequent")
    pass_buckets(clock)
    adapters = history.report(None, of_all=True).adapters
    busiest = [name for name in adapters if name]
    assert busiest[0] == "frequent"
    assert 500 <= sum(adapters["frequent"].requests.values()) <= 600
    assert all(sum(adapters[name].requests.values()) <= 1 for name in busiest[1:])


def test_a_tenant_with_many_adapters_displaces_no_other_tenants(history: TrafficHistory, clock: Clock) -> None:
    for number in range(10):
        count(history, f"~quiet/{number}", "quiet")
    for number in range(5000):
        count(history, f"~loud/{number}", "loud")
    pass_buckets(clock)
    report = history.report("quiet", of_all=False)
    assert {name: sum(one.requests.values()) for name, one in report.adapters.items() if name} == {
        f"~quiet/{number}": 1 for number in range(10)
    }


def test_a_tenant_gets_its_own_counts_alone(history: TrafficHistory, clock: Clock) -> None:
    for tenant, name in (("acme", "shared"), ("acme", ""), ("other", "shared"), (None, "shared")):
        count(history, name, tenant)
    history.count_move(AdapterMove("shared", "cpu", "gpu", 0.1))
    pass_buckets(clock)
    report = history.report("acme", of_all=False)
    [traffic] = report.traffic.values()
    assert (traffic.requests, report.slot_loads) == (2, {})
    assert {name: sum(one.requests.values()) for name, one in report.adapters.items()} == {"": 1, "shared": 1}
    assert history.report("nobody", of_all=False).traffic == {}
    assert sum(history.report(None, of_all=True).adapters["shared"].requests.values()) == 3


def test_loads_into_slots_and_memory_are_counted_and_failed_ones_are_not(history: TrafficHistory, clock: Clock) -> None:
    for move in (
        AdapterMove("sql", "remote", "disk", 0.1),
        AdapterMove("sql", "disk", "cpu", 0.1),
        AdapterMove("sql", "cpu", "gpu", 0.1),
        AdapterMove("law", "cpu", "gpu", 0.1),
        AdapterMove("bad", "disk", "cpu", 0.1, "AdapterMalformed"),
        AdapterMove("", "gpu", "none", 0.1),
    ):
        history.count_move(move)
    pass_buckets(clock)
    report = history.report(None, of_all=True)
    assert (report.slot_loads, report.memory_loads) == ({1000: 2}, {1000: 1})
