from __future__ import annotations

import pytest

from latency import Outcome, Percentiles, gaps_s, summarize


def outcome(due_s: float, chunks_s: list[float], error: str | None = None) -> Outcome:
    return Outcome(due_s, due_s, chunks_s, len(chunks_s), error)


def test_rates_and_latencies_are_those_of_the_streams() -> None:
    summary = summarize([outcome(1.0, [1.5, 1.6, 1.8]), outcome(2.0, [2.1, 4.0])], [0.3, 0.6])
    assert (summary.requests, summary.failed, summary.elapsed_s) == (2, 0, 4.0)
    assert summary.requests_per_s == pytest.approx(2 / 4)
    assert summary.tokens_per_s == pytest.approx(5 / 4)
    assert summary.first_token_s == pytest.approx((0.3, 0.46, 0.496))
    assert summary.inter_token_s == pytest.approx((0.2, 1.56, 1.866))
    assert summary.slo_attainment == {"0.3": 0.5, "0.6": 1.0}


def test_a_failed_request_misses_every_slo_and_adds_to_no_rate() -> None:
    failed = outcome(0.5, [0.6], error="503: overloaded")
    summary = summarize([outcome(0.0, [0.1, 0.2]), failed, failed], [6.0])
    assert (summary.requests, summary.failed, summary.errors) == (3, 2, ["503: overloaded"])
    assert summary.slo_attainment == {"6": pytest.approx(1 / 3)}
    assert summary.tokens_per_s == pytest.approx(2 / 0.2)
    assert summary.first_token_s == pytest.approx((0.1, 0.1, 0.1))


def test_the_first_token_counts_from_when_the_request_was_due() -> None:
    late = Outcome(due_s=1.0, sent_s=1.4, chunks_s=[1.5], num_tokens=1)
    summary = summarize([late], [0.2])
    assert summary.first_token_s == pytest.approx((0.5, 0.5, 0.5))
    assert summary.lag_s == pytest.approx((0.4, 0.4, 0.4))
    assert summary.slo_attainment == {"0.2": 0.0}


def test_nothing_done_gives_no_figures() -> None:
    summary = summarize([outcome(0.0, [], error="no connection")], [6.0])
    assert (summary.first_token_s, summary.inter_token_s, summary.requests_per_s) == (None, None, 0.0)
    assert summary.slo_attainment == {"6": 0.0}


def test_gaps_belong_to_the_window_in_which_they_end() -> None:
    stream = outcome(0.0, [1.0, 2.0, 4.0, 7.0])
    assert gaps_s(stream) == [1.0, 2.0, 3.0]
    assert gaps_s(stream, 2.0, 7.0) == [1.0, 2.0]


def test_percentiles_lie_on_the_line_between_neighbors() -> None:
    assert Percentiles.of([float(i) for i in range(101)]) == pytest.approx((50, 90, 99))
    assert Percentiles.of([]) is None
