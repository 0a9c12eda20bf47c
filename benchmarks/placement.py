"""Measures the effect of placement and routing in a discrete-event simulation that runs the product's own code.

Eight replicas (simulated_replica.py) serve arrivals by the formulas of other benchmarks (placement_workloads.py); only
the rule that chooses a replica differs (placement_arms.py). Every rule receives the replicas' reports with the same
delay. The rate of a row is the highest rate of a grid at which the clairvoyant's p99 TTFT stays below a second for each
of TUNING_SEEDS: a cluster of the right size. The product's costs and policy were also tuned on these seeds; the
reported results use other seeds.

    python benchmarks/placement.py [--seeds 10] [--workloads NAME …] [--arms NAME …] [--ratios 1 4 16] [--storage s3]
    python benchmarks/placement.py --find-rates
"""

from __future__ import annotations

import argparse
import heapq
import math
import multiprocessing
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean

import numpy as np

import placement_arms
import placement_workloads
from placement_workloads import Load
from simulated_replica import RANK_BYTES, Counts, Replica, Request
from simulated_storage import KINDS, Storage, StorageKind
from slora_workload import Arrival

NUM_REPLICAS = 8
NUM_SLOTS = 32
CPU_ADAPTERS = 128  # Adapters in each replica's host memory.
RATIOS = (1, 4, 16)  # Adapters divided by (replicas x slots).
GRID = (320, 280, 240, 200, 160, 120, 80, 40)  # Requests per second, over all replicas.
RATES = {  # The rates that --find-rates finds, for each of RATIOS.
    "S-LoRA, alpha .3": (320, 160, 40),
    "S-LoRA, alpha .6, cv 4": (280, 120, 40),
    "Dynamo, steady": (320, 200, 120),
    "Dynamo, diurnal": (200, 120, 120),
    "Dynamo, flash": (200, 120, 80),
    "Dynamo, switching": (200, 120, 80),
    "dLoRA": (280, 160, 80),
}
REPORT_S = 0.1  # The time between two reports of a replica.
LAG_S = 0.005  # The delay until a router has received a report.
WARM_UP_S = 25.0  # Requests before this time are not counted.
SLO_S = 6.0  # The bound of the TTFT, as in S-LoRA.
TUNING_SEEDS = (0, 1, 2)
DURATION_S = 75.0
NEEDED = {"Ray multiplex sticky", "power of two", "clairvoyant"}  # The arms that the goals compare with.
RAMP = 0.2  # The part of a load's time in which tokens are not counted, since batches still grow.
MIN_REQUESTS = 5  # An adapter with fewer requests does not count in the worst decile.


@dataclass(frozen=True, slots=True)
class Result:
    p50_s: float
    p99_s: float
    attainment: float
    worst_decile: float  # The attainment over the tenth of the adapters that has the lowest.
    read_gb: float
    fill_gb: float
    slot_hits: float
    max_over_mean: float  # The number of requests of the busiest replica, divided by the mean.
    num_reads: int  # Adapters read from disk.
    num_fills: int  # Adapters copied to slots.
    tokens_per_s: float  # Generated until the last request arrived, without the first fifth of that time.


class Clock:
    """Runs planned calls in the order of their times."""

    def __init__(self) -> None:
        self._serial = 0
        self._planned: list[tuple[float, int, Callable[[float], None]]] = []

    def plan(self, time_s: float, call: Callable[[float], None]) -> None:
        self._serial += 1
        heapq.heappush(self._planned, (time_s, self._serial, call))

    def plan_every(self, period: float, until: float, call: Callable[[float], None]) -> None:
        def repeat(now: float) -> None:
            call(now)
            if now < until:
                self.plan(now + period, repeat)

        self.plan(0.0, repeat)

    def run(self) -> None:
        while self._planned:
            now, _, call = heapq.heappop(self._planned)
            call(now)


@dataclass(frozen=True, slots=True)
class Scene:
    """The parameters of a simulation that are the same for all rules, besides the requests."""

    storage: StorageKind = "local"
    cache_bytes: int = 64 << 30  # Size of each node's disk cache; the default of lora_cache_bytes.
    new_node_s: float | None = None  # The time at which a replica moves to a new node; only later requests count then.
    num_replicas: int = NUM_REPLICAS
    num_slots: int = NUM_SLOTS
    cpu_adapters: int = CPU_ADAPTERS
    slot_bytes: int | None = (
        None  # Memory that the adapters in slots of a replica share; None if slots are of one size.
    )
    mixed_s: float = math.inf  # The longest step that computes a prompt beside running sequences.
    warm_up_s: float = WARM_UP_S
    front_s: float = 0.0  # Added to each first token: the time that is not spent in the engine.


@dataclass(frozen=True, slots=True)
class Loop:
    """A closed loop, in which each stream sends its next call as soon as its last one is answered."""

    begin_s: float
    end_s: float  # Calls begin before it.
    calls: Sequence[Arrival]  # Their own times do not count.
    num_streams: int


def simulate(load: Load, arm_name: str, scene: Scene = Scene()) -> Result:
    return simulate_arrivals(placement_workloads.draw(load), load, arm_name, scene)


def simulate_arrivals(
    arrivals: Sequence[Arrival], load: Load, arm_name: str, scene: Scene, loops: Sequence[Loop] = ()
) -> Result:
    """Simulates these arrivals, and the loops, in place of the arrivals of the load, which has all other parameters."""
    ranks = placement_workloads.ranks(load)
    sizes = [rank * RANK_BYTES for rank in ranks]
    clock = Clock()
    next_use = _next_use(load.num_adapters, arrivals) if arm_name == "clairvoyant" else None
    names = [f"r{i}" for i in range(scene.num_replicas)]
    storage, replicas = Storage(scene.storage, names, sizes, scene.cache_bytes), list[Replica]()
    for name in names:
        replicas.append(
            Replica(
                name,
                scene.num_slots,
                scene.cpu_adapters,
                sizes,
                clock.plan,
                storage,
                replicas,
                scene.slot_bytes,
                scene.mixed_s,
                next_use,
            )
        )
    by_name = {replica.name: replica for replica in replicas}
    arm = placement_arms.make(arm_name, replicas, load.seed, sizes, ranks)
    opened = [Request(arrival, arrival.adapter) for arrival in arrivals if arrival.adapter is not None]
    requests = opened.copy()
    warm: list[Counts] = []

    def report(now: float) -> None:
        reports = [(replica.name, replica.load(), replica.unread(), replica.take_changes()) for replica in replicas]
        clock.plan(now + LAG_S, lambda time_s: arm.observe(reports, time_s))

    def arrive(i: int, now: float) -> None:
        by_name[arm.choose(opened[i], now)].arrive(opened[i], now)
        if i + 1 < len(opened):
            clock.plan(opened[i + 1].arrival.at_s, lambda time_s: arrive(i + 1, time_s))

    def send_next(calls: Iterator[Arrival], end_s: float, now: float) -> None:
        call = next(calls, None) if now < end_s else None
        if call is not None and call.adapter is not None:
            request = Request(
                replace(call, at_s=now), call.adapter, then=lambda time_s: send_next(calls, end_s, time_s)
            )
            requests.append(request)
            by_name[arm.choose(request, now)].arrive(request, now)

    clock.plan_every(REPORT_S, load.duration_s, report)
    clock.plan_every(1.0, load.duration_s, arm.each_second)
    clock.plan(scene.warm_up_s, lambda _: warm.extend(replica.counts.copy() for replica in replicas))
    counted_s = scene.warm_up_s
    if scene.new_node_s is not None:
        counted_s = scene.new_node_s
        clock.plan(counted_s, lambda _: replicas[0].lose_memory())
    for loop in loops:
        stream = partial(send_next, iter(loop.calls), loop.end_s)
        for _ in range(loop.num_streams):
            clock.plan(loop.begin_s, stream)
    if opened:
        clock.plan(opened[0].arrival.at_s, lambda time_s: arrive(0, time_s))
    clock.run()
    counted = [request for request in requests if request.arrival.at_s >= counted_s]
    return _result(
        counted, [count.counts.minus(early) for count, early in zip(replicas, warm, strict=True)], scene.front_s
    )


def _next_use(num_adapters: int, arrivals: Sequence[Arrival]) -> Callable[[int, float], float]:
    times: list[list[float]] = [[] for _ in range(num_adapters)]
    for arrival in arrivals:
        if arrival.adapter is not None:
            times[arrival.adapter].append(arrival.at_s)

    def next_use(adapter: int, now: float) -> float:
        index = bisect_right(times[adapter], now)
        return times[adapter][index] if index < len(times[adapter]) else math.inf

    return next_use


def _result(counted: Sequence[Request], counts: Sequence[Counts], front_s: float) -> Result:
    ttft_s = np.array([request.first_token_s - request.arrival.at_s for request in counted]) + front_s
    assert np.isfinite(ttft_s).all(), "a request was never answered"
    of_adapter: dict[int, list[bool]] = {}
    for request, late in zip(counted, ttft_s > SLO_S, strict=True):
        of_adapter.setdefault(request.adapter, []).append(not late)
    attained = sorted(fmean(met) for met in of_adapter.values() if len(met) >= MIN_REQUESTS)
    num_requests = [count.requests for count in counts]
    return Result(
        float(np.quantile(ttft_s, 0.5)),
        float(np.quantile(ttft_s, 0.99)),
        float((ttft_s <= SLO_S).mean()),
        fmean(attained[: max(1, len(attained) // 10)]),
        sum(count.read_bytes for count in counts) / 1e9,
        sum(count.fill_bytes for count in counts) / 1e9,
        sum(count.slot_hits for count in counts) / sum(num_requests),
        max(num_requests) / fmean(num_requests),
        sum(count.num_reads for count in counts),
        sum(count.num_fills for count in counts),
        _steady_tokens_per_s(counted),
    )


def _steady_tokens_per_s(counted: Sequence[Request]) -> float:
    first_s, end_s = counted[0].arrival.at_s, counted[-1].arrival.at_s
    begin_s, tokens = first_s + RAMP * (end_s - first_s), 0.0
    for request in counted:
        took_s = max(request.end_s - request.first_token_s, 1e-9)
        within_s = min(request.end_s, end_s) - max(request.first_token_s, begin_s)
        tokens += request.arrival.num_output * max(0.0, within_s) / took_s
    return tokens / (end_s - begin_s) if end_s > begin_s else 0.0


def sustainable_rate(workload: str, ratio: int) -> float:
    for rate in GRID:
        if all(simulate(_load(workload, rate, ratio, seed), "clairvoyant").p99_s < 1.0 for seed in TUNING_SEEDS):
            return rate
    return GRID[-1]


def _load(workload: str, rate: float, ratio: int, seed: int) -> Load:
    return Load(workload, rate, DURATION_S, ratio * NUM_REPLICAS * NUM_SLOTS, seed)


def _star(arguments: tuple[Load, str, Scene]) -> Result:
    return simulate(*arguments)


def _mean(results: Sequence[Result], field: str) -> float:
    return fmean(getattr(result, field) for result in results)


def describe(arm: str, results: Sequence[Result]) -> str:
    """Returns a line with the means over seeds; for the p99 it also has the lowest and the highest value."""
    p99_ms = [result.p99_s * 1e3 for result in results]
    return (
        f"  {arm:21}TTFT {_mean(results, 'p50_s') * 1e3:6.0f}"
        f"{fmean(p99_ms):7.0f} ({min(p99_ms):.0f}-{max(p99_ms):.0f}) ms"
        f"  in 6 s {_mean(results, 'attainment'):.3f}, worst {_mean(results, 'worst_decile'):.3f}"
        f"  read {_mean(results, 'read_gb'):6.1f} GB, to slots {_mean(results, 'fill_gb'):6.0f}"
        f"  in slot {_mean(results, 'slot_hits'):.2f}  max/mean {_mean(results, 'max_over_mean'):.2f}"
    )


@dataclass(frozen=True, slots=True)
class Goal:
    """One goal of the product's arms."""

    name: str
    # Computes the figure of the named arm from the results of all arms.
    value: Callable[[dict[str, Sequence[Result]], str], float]
    bound: float
    at_least: bool = False

    def met(self, value: float) -> bool:
        return value >= self.bound if self.at_least else value <= self.bound


def _p99_over(other: str) -> Callable[[dict[str, Sequence[Result]], str], float]:
    return lambda arms, ours: _mean(arms[ours], "p99_s") / _mean(arms[other], "p99_s")


GOALS = (
    Goal("p99 / sticky", _p99_over("Ray multiplex sticky"), 0.5),
    Goal("p99 / clairvoyant", _p99_over("clairvoyant"), 1.3),
    Goal(
        "bytes / power of two",
        lambda arms, ours: _mean(arms[ours], "read_gb") / max(_mean(arms["power of two"], "read_gb"), 1e-9),
        0.5,
    ),
    Goal(
        "worst decile / all",
        lambda arms, ours: _mean(arms[ours], "worst_decile") / _mean(arms[ours], "attainment"),
        0.9,
        at_least=True,
    ),
)


def compare(arms: dict[str, Sequence[Result]], ours: str) -> dict[str, bool]:
    """Prints the figures of one of our arms beside the goals, and returns which are met. The means over seeds count."""
    met, texts = {}, []
    for goal in GOALS:
        value = goal.value(arms, ours)
        met[goal.name] = goal.met(value)
        sign = ">=" if goal.at_least else "<="
        texts.append(f"{goal.name} {value:.2f} ({sign} {goal.bound}: {'met' if met[goal.name] else 'MISSED'})")
    print(f"  {ours}: {', '.join(texts)}", flush=True)
    return met


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first-seed", type=int, default=100, help="the first seed; the policy was tuned on 0 to 2")
    parser.add_argument("--workloads", nargs="+", default=list(placement_workloads.WORKLOADS))
    parser.add_argument("--arms", nargs="+", default=list(placement_arms.ARMS), choices=placement_arms.ARMS)
    parser.add_argument("--ratios", nargs="+", type=int, default=RATIOS, choices=RATIOS)
    parser.add_argument("--storage", default="local", choices=KINDS, help="where adapters come from")
    parser.add_argument("--cache-gib", type=int, default=64, help="GiB of each node's disk cache")
    parser.add_argument("--new-node-s", type=float, help="time at which a replica loses its memory and its cache")
    parser.add_argument("--find-rates", action="store_true", help="only print the correct values of RATES")
    parser.add_argument("--processes", type=int, default=1)
    args = parser.parse_args()
    rows = [(workload, ratio) for workload in args.workloads for ratio in args.ratios]
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    scene = Scene(args.storage, args.cache_gib << 30, args.new_node_s)
    num_met: Counter[tuple[str, str]] = Counter()
    with multiprocessing.Pool(args.processes) as pool:
        if args.find_rates:
            print(dict(zip(rows, pool.starmap(sustainable_rate, rows, chunksize=1), strict=True)))
            return
        for workload, ratio in rows:
            rate = RATES[workload][RATIOS.index(ratio)]
            print(f"{workload}, {ratio} adapters per slot, {rate} requests/s, {args.storage}", flush=True)
            jobs = [(_load(workload, rate, ratio, seed), arm, scene) for arm in args.arms for seed in seeds]
            results = pool.map(_star, jobs, chunksize=1)
            arms = {arm: results[i * args.seeds : (i + 1) * args.seeds] for i, arm in enumerate(args.arms)}
            for arm, of_arm in arms.items():
                print(describe(arm, of_arm), flush=True)
            if arms.keys() >= NEEDED:
                for ours in [arm for arm in arms if arm.startswith("ours")]:
                    num_met.update((ours, goal) for goal, met in compare(arms, ours).items() if met)
    for (ours, goal), count in sorted(num_met.items()):
        print(f"{ours}: {goal} met in {count} of {len(rows)} rows")


if __name__ == "__main__":
    main()
