"""How much placement and routing bring: a discrete-event simulation that drives the product's own code.

Eight replicas (simulated_replica.py) serve arrivals by other benchmarks' formulas (placement_workloads.py); only the
rule that chooses a replica differs (placement_arms.py). Every rule hears the replicas' reports equally late. A row's
rate is the highest in RATES at which the clairvoyant's p99 TTFT stays below a second: a cluster of the right size.

python benchmarks/placement.py [--seeds 10] [--workloads NAME …] [--arms NAME …] [--ratios 1 4 16] [--duration-s 75]
"""

from __future__ import annotations

import argparse
import heapq
import math
import multiprocessing
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

import placement_arms
import placement_workloads
from placement_workloads import Load
from simulated_replica import RANK_BYTES, Counts, Replica, Request
from slora_workload import Arrival

NUM_REPLICAS = 8
NUM_SLOTS = 32
CPU_ADAPTERS = 128  # of mean size, in each replica's host memory
RATIOS = (1, 4, 16)  # adapters / (replicas x slots)
RATES = (320, 280, 240, 200, 160, 120, 80, 40)  # requests a second, over all replicas
REPORT_S = 0.1  # between a replica's reports
LAG_S = 0.005  # until a router has heard one
WARM_UP_S = 25.0  # not counted
SLO_S = 6.0  # of TTFT: S-LoRA's
MIN_REQUESTS = 5  # of an adapter, to count in the worst decile


@dataclass(frozen=True, slots=True)
class Result:
    p50_s: float
    p99_s: float
    attainment: float
    worst_decile: float  # attainment of the tenth of the adapters that has the lowest
    read_gb: float
    fill_gb: float
    slot_hits: float
    max_over_mean: float  # requests of the busiest replica


class Clock:
    """Runs planned calls in the order of their times."""

    def __init__(self) -> None:
        self._serial = 0
        self._planned: list[tuple[float, int, Callable[[float], None]]] = []

    def plan(self, at: float, call: Callable[[float], None]) -> None:
        self._serial += 1
        heapq.heappush(self._planned, (at, self._serial, call))

    def plan_every(self, period: float, until: float, call: Callable[[float], None]) -> None:
        def turn(now: float) -> None:
            call(now)
            if now < until:
                self.plan(now + period, turn)

        self.plan(0.0, turn)

    def run(self) -> None:
        while self._planned:
            now, _, call = heapq.heappop(self._planned)
            call(now)


def simulate(load: Load, arm_name: str) -> Result:
    arrivals, ranks = placement_workloads.draw(load), placement_workloads.ranks(load)
    sizes = [rank * RANK_BYTES for rank in ranks]
    clock = Clock()
    next_use = _next_use(load.num_adapters, arrivals) if arm_name == "clairvoyant" else None
    cpu_bytes = int(CPU_ADAPTERS * fmean(sizes))
    replicas = [Replica(f"r{i}", NUM_SLOTS, cpu_bytes, sizes, clock.plan, next_use) for i in range(NUM_REPLICAS)]
    by_name = {one.name: one for one in replicas}
    arm = placement_arms.make(arm_name, replicas, load.seed, sizes, ranks)
    requests = [Request(one, one.adapter) for one in arrivals if one.adapter is not None]
    warm: list[Counts] = []

    def report(now: float) -> None:
        reports = [(one.name, one.load(), one.take_changes()) for one in replicas]
        clock.plan(now + LAG_S, lambda at: arm.observe(reports, at))

    def arrive(i: int, now: float) -> None:
        by_name[arm.choose(requests[i], now)].arrive(requests[i], now)
        if i + 1 < len(requests):
            clock.plan(requests[i + 1].arrival.at_s, lambda at: arrive(i + 1, at))

    clock.plan_every(REPORT_S, load.duration_s, report)
    clock.plan_every(1.0, load.duration_s, arm.each_second)
    clock.plan(WARM_UP_S, lambda _: warm.extend(one.counts.copy() for one in replicas))
    clock.plan(requests[0].arrival.at_s, lambda at: arrive(0, at))
    clock.run()
    return _result(requests, [one.counts.minus(early) for one, early in zip(replicas, warm, strict=True)])


def _next_use(num_adapters: int, arrivals: Sequence[Arrival]) -> Callable[[int, float], float]:
    times: list[list[float]] = [[] for _ in range(num_adapters)]
    for one in arrivals:
        if one.adapter is not None:
            times[one.adapter].append(one.at_s)

    def next_use(adapter: int, now: float) -> float:
        at = bisect_right(times[adapter], now)
        return times[adapter][at] if at < len(times[adapter]) else math.inf

    return next_use


def _result(requests: Sequence[Request], counts: Sequence[Counts]) -> Result:
    counted = [one for one in requests if one.arrival.at_s >= WARM_UP_S]
    ttft_s = np.array([one.first_token_s - one.arrival.at_s for one in counted])
    assert np.isfinite(ttft_s).all(), "a request was never answered"
    of_adapter: dict[int, list[bool]] = {}
    for one, late in zip(counted, ttft_s > SLO_S, strict=True):
        of_adapter.setdefault(one.adapter, []).append(not late)
    attained = sorted(fmean(met) for met in of_adapter.values() if len(met) >= MIN_REQUESTS)
    num_requests = [one.requests for one in counts]
    return Result(
        float(np.quantile(ttft_s, 0.5)),
        float(np.quantile(ttft_s, 0.99)),
        float((ttft_s <= SLO_S).mean()),
        fmean(attained[: max(1, len(attained) // 10)]),
        sum(one.read_bytes for one in counts) / 1e9,
        sum(one.fill_bytes for one in counts) / 1e9,
        sum(one.slot_hits for one in counts) / sum(num_requests),
        max(num_requests) / fmean(num_requests),
    )


def sustainable_rate(workload: str, ratio: int, duration_s: float) -> float:
    for rate in RATES:
        if simulate(_load(workload, rate, ratio, duration_s, 0), "clairvoyant").p99_s < 1.0:
            return rate
    return RATES[-1]


def _load(workload: str, rate: float, ratio: int, duration_s: float, seed: int) -> Load:
    return Load(workload, rate, duration_s, ratio * NUM_REPLICAS * NUM_SLOTS, seed)


def _star(arguments: tuple[Load, str]) -> Result:
    return simulate(*arguments)


def _mean(results: Sequence[Result], field: str) -> float:
    return fmean(getattr(one, field) for one in results)


def compare(arms: dict[str, list[Result]]) -> str:
    """Ours beside the goals, of the means over seeds."""
    ours, sticky, two, best = (
        arms.get(name) for name in ("ours", "Ray multiplex sticky", "power of two", "clairvoyant")
    )
    if not (ours and sticky and two and best):
        return ""
    p99 = _mean(ours, "p99_s")
    read = _mean(ours, "read_gb") / max(_mean(two, "read_gb"), 1e-9)
    worst = _mean(ours, "worst_decile") / _mean(ours, "attainment")
    return (
        f"  ours: p99 {p99 / _mean(sticky, 'p99_s'):.2f} x sticky (goal .5), {p99 / _mean(best, 'p99_s'):.2f} x "
        f"clairvoyant (1.3); bytes read {read:.2f} x power of two (.5); worst decile {worst:.2f} of all (.9)"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--duration-s", type=float, default=75.0)
    parser.add_argument("--workloads", nargs="+", default=list(placement_workloads.WORKLOADS))
    parser.add_argument("--arms", nargs="+", default=list(placement_arms.ARMS), choices=placement_arms.ARMS)
    parser.add_argument("--ratios", nargs="+", type=int, default=RATIOS)
    args = parser.parse_args()
    rows = [(workload, ratio) for workload in args.workloads for ratio in args.ratios]
    with multiprocessing.Pool() as pool:
        rates = pool.starmap(sustainable_rate, [(*row, args.duration_s) for row in rows], chunksize=1)
        for (workload, ratio), rate in zip(rows, rates, strict=True):
            print(f"{workload}, {ratio} adapters a slot, {rate} requests/s", flush=True)
            loads = [_load(workload, rate, ratio, args.duration_s, seed) for seed in range(args.seeds)]
            jobs = [(load, arm) for arm in args.arms for load in loads]
            results = pool.map(_star, jobs, chunksize=1)
            arms = {arm: results[i * args.seeds : (i + 1) * args.seeds] for i, arm in enumerate(args.arms)}
            for arm, of_arm in arms.items():
                print(
                    f"  {arm:21}TTFT {_mean(of_arm, 'p50_s') * 1e3:7.0f}{_mean(of_arm, 'p99_s') * 1e3:8.0f} ms"
                    f"  in 6 s {_mean(of_arm, 'attainment'):.3f}, worst {_mean(of_arm, 'worst_decile'):.3f}"
                    f"  read {_mean(of_arm, 'read_gb'):6.1f} GB, to slots {_mean(of_arm, 'fill_gb'):6.0f}"
                    f"  in slot {_mean(of_arm, 'slot_hits'):.2f}  max/mean {_mean(of_arm, 'max_over_mean'):.2f}",
                    flush=True,
                )
            print(compare(arms), flush=True)


if __name__ == "__main__":
    main()
