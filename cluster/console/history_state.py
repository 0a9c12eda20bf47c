"""Adds the replicas' traffic histories, and turns them into the series that the console's charts show.

The size of the result depends neither on the number of replicas nor on the number of adapters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import nlargest
from typing import Any

from lorafleet.api.telemetry.recent import Traffic
from lorafleet.api.telemetry.traffic_history import BUCKET_S, NUM_BUCKETS, AdapterSeries, TrafficReport
from lorafleet.cluster.console.view import Viewer
from lorafleet.protocol.adapter_mix import SIGN

MAX_SHOWN = 10  # Adapters in the table of the busiest.


def history_state(
    reports: Sequence[TrafficReport], viewer: Viewer, sees: Callable[[str], bool], now_s: float
) -> dict[str, Any]:
    """Returns the series of the last NUM_BUCKETS complete buckets, oldest first. `sees` says which public adapters
    the viewer may use, unless it sees all."""

    def may_see(name: str) -> bool:
        return viewer.may_see(name) and sees(name)

    end = int(now_s // BUCKET_S)
    numbers = range(end - NUM_BUCKETS, end)
    traffic = [Traffic() for _ in numbers]
    for report in reports:
        for number, part in report.traffic.items():
            if number in numbers:
                traffic[number - numbers.start].add(part)
    adapters = _summed(reports)
    base = adapters.pop("", AdapterSeries())
    shown = [name for name in adapters if viewer.sees_all or all(map(may_see, name.split(SIGN)))]
    busiest = nlargest(MAX_SHOWN, sorted(shown), key=lambda name: _in(numbers, adapters[name].requests))
    return {
        "start_s": numbers.start * BUCKET_S,
        "bucket_s": BUCKET_S,
        "requests": [bucket.requests for bucket in traffic],
        "failed": [bucket.failed for bucket in traffic],
        "tokens": [bucket.generated_tokens for bucket in traffic],
        "prompt_tokens": [bucket.prompt_tokens for bucket in traffic],
        "median_first_token_s": [_quantile(bucket, 0.5) for bucket in traffic],
        "p99_first_token_s": [_quantile(bucket, 0.99) for bucket in traffic],
        "slot_loads": _loads(numbers, (report.slot_loads for report in reports)) if viewer.sees_all else None,
        "memory_loads": _loads(numbers, (report.memory_loads for report in reports)) if viewer.sees_all else None,
        "base": _adapter("", base, numbers),
        "busiest": [_adapter(_naming(viewer, name), adapters[name], numbers) for name in busiest],
    }


def _summed(reports: Sequence[TrafficReport]) -> dict[str, AdapterSeries]:
    summed: dict[str, AdapterSeries] = {}
    for report in reports:
        for name, series in report.adapters.items():
            summed.setdefault(name, AdapterSeries()).merge(series)
    return summed


def _adapter(name: str, series: AdapterSeries, numbers: range) -> dict[str, Any]:
    return {
        "name": name,
        "requests": _in(numbers, series.requests),
        "tokens": series.tokens,
        "series": [series.requests.get(number, 0) for number in numbers],
    }


def _naming(viewer: Viewer, name: str) -> str:
    """Returns the viewer's name for an adapter, or for a mix of adapters."""
    return SIGN.join(viewer.naming(part) for part in name.split(SIGN))


def _in(numbers: range, counts: Mapping[int, int]) -> int:
    return sum(count for number, count in counts.items() if number in numbers)


def _quantile(traffic: Traffic, quantile: float) -> float | None:
    value = traffic.first_token_s(quantile)
    return None if value is None else round(value, 4)


def _loads(numbers: range, parts: Iterable[Mapping[int, int]]) -> list[int]:
    known = list(parts)
    return [sum(part.get(number, 0) for part in known) for number in numbers]
