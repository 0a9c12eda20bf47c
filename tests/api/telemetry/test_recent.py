"""What a replica remembers of its traffic and its failures: bounded, by tenant, without what senders wrote."""

from __future__ import annotations

import random

import pytest

from lorafleet.api.telemetry import recent
from lorafleet.api.telemetry.recent import BUCKET_S, WINDOW_S, RecentFailures, RecentTraffic, Traffic, bin_of
from lorafleet.protocol.errors import AdapterMissing, InvalidAdapterName, InvalidRequest, ModelNotFound, QueueFull
from lorafleet.protocol.messages import DraftCounts


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def traffic(clock: Clock) -> RecentTraffic:
    return RecentTraffic(clock)


def count(traffic: RecentTraffic, name: str, tenant: str | None = None, first_token_s: float | None = 0.1) -> None:
    traffic.count(tenant, name, 10, 5, first_token_s, failed=first_token_s is None)


def test_a_quantile_is_within_five_per_cent_of_the_exact_one() -> None:
    drawn = random.Random(1)
    latencies = sorted(drawn.lognormvariate(-2, 1) for _ in range(5000))
    seen = Traffic(requests=len(latencies))
    for one in latencies:
        seen.first_token[bin_of(one)] = seen.first_token.get(bin_of(one), 0) + 1
    for quantile in (0.5, 0.95, 0.99):
        exact = latencies[int(quantile * len(latencies))]
        assert seen.first_token_s(quantile) == pytest.approx(exact, rel=0.06)
    assert Traffic().first_token_s(0.95) is None


def test_draft_tokens_are_counted_by_name_and_in_total(traffic: RecentTraffic) -> None:
    for name, drafts in (("sql", DraftCounts(2, 8, 5)), ("sql", DraftCounts(1, 4, 0)), ("", DraftCounts(1, 2, 2))):
        traffic.count(None, name, 10, 5, 0.1, failed=False, drafts=drafts)
    count(traffic, "law")
    assert traffic.of_names(["sql"], None, of_all=True)["sql"].drafts == DraftCounts(3, 12, 5)
    assert traffic.of_names(["law"], None, of_all=True)["law"].drafts == DraftCounts()
    assert traffic.total(None, of_all=True).drafts == DraftCounts(4, 14, 7)


def test_what_left_the_window_is_not_counted(traffic: RecentTraffic, clock: Clock) -> None:
    count(traffic, "sql")
    clock.now_s += WINDOW_S - BUCKET_S
    count(traffic, "sql")
    assert traffic.of_names(["sql"], None, of_all=True)["sql"].requests == 2
    clock.now_s += 2 * BUCKET_S
    assert traffic.of_names(["sql"], None, of_all=True)["sql"].requests == 1
    clock.now_s += WINDOW_S
    assert traffic.of_names(["sql"], None, of_all=True) == {}
    assert traffic.total(None, of_all=True) == Traffic()


def test_a_tenant_sees_its_own_requests_to_a_shared_adapter(traffic: RecentTraffic) -> None:
    for tenant in ("acme", "acme", "other", None):
        count(traffic, "shared", tenant)
    count(traffic, "theirs", "other")
    assert traffic.of_names(["shared", "theirs"], "acme", of_all=False)["shared"].requests == 2
    assert traffic.busiest(9, "acme", of_all=False) == ["shared"]
    assert traffic.total("acme", of_all=False).requests == 2
    assert traffic.busiest(9, None, of_all=True) == ["shared", "theirs"]
    assert traffic.total(None, of_all=True).requests == 5


def test_names_are_bounded_and_the_total_has_all(traffic: RecentTraffic, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent, "MAX_NAMES", 3)
    for number in range(10):
        count(traffic, f"a{number}")
    assert len(traffic.busiest(100, None, of_all=True)) == 3
    assert traffic.total(None, of_all=True).requests == 10


def test_only_failures_of_serving_are_kept(clock: Clock) -> None:
    failures = RecentFailures("replica", clock)
    for error in (
        InvalidRequest("the prompt 'my secret' is wrong"),
        ModelNotFound("no"),
        InvalidAdapterName("no"),
        AdapterMissing("no files", None),
        QueueFull("full"),
        ValueError("my secret"),
    ):
        failures.record(error, "sql")
    assert [one.code for one in failures.of(None, of_all=True)] == ["internal_error", "QueueFull", "AdapterMissing"]
    assert not any("secret" in one.message for one in failures.of(None, of_all=True))


def test_alike_failures_are_one_line_and_push_no_others_out(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent, "MAX_FAILURES", 2)
    failures = RecentFailures("replica", clock)
    failures.record(AdapterMissing("no files"), "sql")
    for _ in range(100):
        clock.now_s += 1
        failures.record(QueueFull(f"{clock.now_s} wait"))
    seen = failures.of(None, of_all=True)
    assert [(one.code, one.count) for one in seen] == [("QueueFull", 100), ("AdapterMissing", 1)]
    assert (seen[0].message, seen[0].at_s) == ("1100.0 wait", 1100.0)
    failures.record(AdapterMissing("no files"), "json")
    assert [one.adapter for one in failures.of(None, of_all=True)] == ["json", ""]


def test_a_failure_is_told_to_its_tenant_and_the_operator_alone(clock: Clock) -> None:
    failures = RecentFailures("replica", clock)
    failures.record(AdapterMissing("no files"), "sql", "acme")
    failures.record(QueueFull("full"))
    assert [one.code for one in failures.of("acme", of_all=False)] == ["AdapterMissing"]
    assert failures.of("other", of_all=False) == []
    assert failures.of(None, of_all=False) == []
    assert len(failures.of(None, of_all=True)) == 2
