"""The sums over replicas that the console's charts show: the same size however many replicas and adapters there are."""

from __future__ import annotations

import msgspec
import pytest

from lorafleet.api.telemetry.recent import Traffic, bin_of
from lorafleet.api.telemetry.traffic_history import BUCKET_S, NUM_BUCKETS, AdapterSeries, TrafficReport
from lorafleet.cluster.console.history_state import MAX_SHOWN, history_state
from lorafleet.cluster.console.view import Viewer

NOW_S = 1000 * BUCKET_S + 2.0
OPERATOR = Viewer(None, True)


def report(first: int = 999, requests: int = 1, latency_s: float = 0.1, **adapters: int) -> TrafficReport:
    traffic = Traffic(requests, 0, 10, 20, first_token={bin_of(latency_s): requests})
    series = {name: AdapterSeries(7, {first: count}) for name, count in adapters.items()}
    return TrafficReport({first: traffic}, {"": AdapterSeries(), **series}, {first: 2}, {})


def test_replicas_are_added_bucket_by_bucket_and_percentiles_are_of_all_their_requests() -> None:
    reports = [report(requests=99, latency_s=0.1, sql=3), report(requests=101, latency_s=2.0, sql=4, law=5)]
    state = history_state(reports, OPERATOR, lambda _: True, NOW_S)
    assert state["start_s"] == (1000 - NUM_BUCKETS) * BUCKET_S
    assert (state["requests"][-1], state["tokens"][-1], state["slot_loads"][-1]) == (200, 40, 4)
    assert state["median_first_token_s"][-1] == pytest.approx(2.0, rel=0.06)
    assert state["median_first_token_s"][0] is None
    assert [(one["name"], one["requests"]) for one in state["busiest"]] == [("sql", 7), ("law", 5)]
    assert [one["series"][-1] for one in state["busiest"]] == [7, 5]


def test_buckets_outside_the_window_are_left_out() -> None:
    """A replica whose clock is wrong does not break the charts of the others."""
    reports = [report(first=1000), report(first=2000, sql=1), report(first=999 - NUM_BUCKETS)]
    state = history_state(reports, OPERATOR, lambda _: True, NOW_S)
    assert sum(state["requests"]) == sum(state["slot_loads"]) == 0


def test_the_size_does_not_grow_with_replicas_and_adapters() -> None:
    def size(num_replicas: int) -> int:
        reports = [report(**{f"a{number:04}-{k}": 1 for k in range(20)}) for number in range(num_replicas)]
        state = history_state(reports, OPERATOR, lambda _: True, NOW_S)
        assert len(state["busiest"]) == MAX_SHOWN
        return len(msgspec.json.encode(state))

    assert size(200) - size(2) < 20, "digits of the sums alone"


def test_a_tenant_is_shown_no_names_that_it_may_not_see_and_no_loads() -> None:
    counts = {"~acme/sql": 3, "~other/law": 5, "public": 1, "kept": 2, "public+~other/law": 9, "~acme/sql+public": 1}
    state = history_state([report(**counts)], Viewer("acme", False), lambda name: name != "kept", NOW_S)
    assert [one["name"] for one in state["busiest"]] == ["sql", "public", "sql+public"]
    assert (state["slot_loads"], state["memory_loads"]) == (None, None)
