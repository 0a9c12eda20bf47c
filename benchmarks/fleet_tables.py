"""Prints the figures of benchmarks/fleet.py: a row for each case, and ratios of rules and of fleets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmark_results import Case
from fleet_load import LOOPS


def print_header() -> None:
    print(
        f"{'':27}{'':>13}{'':>3}{'TTFT p50':>9}{'p99':>9}{'worst':>9}{'gap p50':>9}{'p99':>9}{'tok/s':>8}{'failed':>8}"
        f"{'reads':>8}{'slots':>8}{'hits':>8}{'of':>8}{'front':>6}{'proxy':>6}{'busy':>6}   (ms, cores)",
        flush=True,
    )


def print_row(settings: dict[str, Any], figures: dict[str, float | None]) -> None:
    ms = "".join(
        f"{'-':>9}" if (value := figures[name]) is None else f"{1e3 * value:9.1f}"
        for name in ("ttft_p50", "ttft_p99", "ttft_worst_adapters", "gap_p50", "gap_p99")
    )
    counts = "".join(
        f"{'-' if (value := figures[name]) is None else f'{value:.0f}':>8}"
        for name in ("tokens_per_s", "failed", "reads", "slots", "hit_tokens", "endless_hit_tokens")
    )
    ratios = "".join(
        f"{'-' if (value := figures[name]) is None else f'{value:.2f}':>6}"
        for name in ("front_cores", "haproxy_cores", "busiest")
    )
    name = f"{settings['workload']} @{settings['rate']:g}"
    print(f"{name:27}{settings['rule']:>13}{settings['replicas']:>3}{ms}{counts}{ratios}", flush=True)


def comparison(ours: Mapping[str, float | None], figures: Mapping[str, float | None], rule: str) -> str | None:
    """Returns affinity's p99 of the TTFT relative to that of another rule, or why they are not compared."""
    p99, our_p99 = figures["ttft_p99"], ours["ttft_p99"]
    if ours["failed"] or figures["failed"]:  # Those that waited longest are not in the p99.
        return f"not compared, since {ours['failed']:g} requests of affinity and {figures['failed']:g} of {rule} failed"
    return None if our_p99 is None or not p99 else f"TTFT p99 of affinity is {our_p99 / p99:.2f} x {rule}'s"


def print_ratios(cases: Sequence[Case]) -> None:
    """Prints affinity's p99 of the TTFT beside each other rule's, and how throughput scales."""
    keys = ("workload", "rule", "replicas", "rate")
    by = {tuple(case.settings[key] for key in keys): case.figures for case in cases}
    for (workload, rule, replicas, rate), figures in by.items():
        ours = by.get((workload, "affinity", replicas, rate))
        if rule != "affinity" and ours is not None and (text := comparison(ours, figures, rule)):
            print(f"{workload}, {replicas} replicas, {rate} requests/s and replica: {text}")
        one = by.get((workload, rule, 1, rate))
        if workload in LOOPS and replicas != 1 and one is not None and one["tokens_per_s"]:
            times = (figures["tokens_per_s"] or 0.0) / one["tokens_per_s"]
            print(f"{workload}, {rule}: {replicas} replicas generate {times:.2f} x the tokens of one")
