"""Sends the loads of benchmarks/fleet.py to a server, and counts what came of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from conversations import count_endless_hits
from fleet_load import CONVERSATIONS, LOOPS, SATURATION, SLORA, Size, draw_calls, load_of, lora_bytes, warm_up_size
from fleet_simulation import LoopLoad, predict
from http_load import Call, Job, ReportLost, run_apart
from latency import Outcome, Percentiles, summarize
from local_server import LocalServer
from lorafleet.cluster.routing.rule_names import RoutingRule
from placement import RAMP
from placement_workloads import WORKLOADS, Load

BLOCK_SIZE = 16
SIMULATED = (*WORKLOADS, SATURATION)
LOOP_SHARE = 0.6  # The time of a closed loop, relative to that of the other workloads.
FIRST_STREAMS = 8  # Streams for each replica that request every adapter once, before the warm-up.
FIRST_S = 120.0  # The time in which they must have done so.
MAX_ERRORS, ERROR_CHARS = 3, 160  # Printed of each workload.
UNITS = {
    **dict.fromkeys(("ttft_p50", "ttft_p99", "gap_p50", "gap_p99", "ttft_worst_adapters"), "s"),
    **dict.fromkeys(("tokens_per_s", "front_cores", "haproxy_cores", "busiest"), ""),
    **dict.fromkeys(("failed", "reads", "slots", "hit_tokens", "endless_hit_tokens"), ""),
}


def warm_up(server: LocalServer, size: Size, replicas: int) -> None:
    """Requests each adapter once, and then sends calls that are like S-LoRA's, but drawn by another seed."""
    if size.warm_up_s:
        first = [Call(0.0, f"a{number}", [size.token_ids[0]], 1) for number in range(size.adapters)]
        outcomes = run_apart(Job(server.url, first, FIRST_STREAMS * replicas, FIRST_S)).outcomes
        num_warm = sum(outcome.error is None for outcome in outcomes)
        if num_warm < len(first):  # Its caches would not be as warm as those of other rules.
            raise ReportLost(f"{num_warm} of {len(first)} adapters answered within {FIRST_S:.0f} s")
        run_apart(Job(server.url, draw_calls(SLORA, warm_up_size(size), replicas)))


def measure(server: LocalServer, url: str, workload: str, size: Size, replicas: int) -> dict[str, float | None]:
    """Sends the workload of so many replicas to the URL."""
    calls = draw_calls(workload, size, replicas)
    is_closed, loop_s = workload in LOOPS, LOOP_SHARE * size.duration_s
    # One client process reads the streams of one replica, so that it is not what saturates.
    jobs = (
        [Job(url, calls[i::replicas], size.streams, loop_s) for i in range(replicas)]
        if is_closed
        else [Job(url, calls)]
    )
    before, generated_before, cpu_before = server.engine_counters(), server.generated_tokens(), server.cpu_s()
    with ThreadPoolExecutor(len(jobs)) as pool:
        reports = list(pool.map(run_apart, jobs))
    after, generated, cpu_after = server.engine_counters(), server.generated_tokens(), server.cpu_s()
    generated.subtract(generated_before)

    def counted(name: str) -> float:
        return after.get(name, 0.0) - before.get(name, 0.0)

    def cores(role: str) -> float:
        return (cpu_after[role] - cpu_before[role]) / max(report.wall_s for report in reports)

    outcomes = [outcome for report in reports for outcome in report.outcomes]
    summary = summarize(outcomes, [])
    first, gaps = summary.first_token_s, summary.inter_token_s
    for error in summary.errors[:MAX_ERRORS]:
        print(f"  failed: {error[:ERROR_CHARS]}")
    return {
        "ttft_p50": first and first.p50,
        "ttft_p99": first and first.p99,
        "gap_p50": gaps and gaps.p50,
        "gap_p99": gaps and gaps.p99,
        # A closed loop sends the calls in their order, but which stream's outcome is whose is not recorded.
        "ttft_worst_adapters": None if is_closed else worst_adapters_s(calls, outcomes),
        "tokens_per_s": steady_tokens_per_s(outcomes, loop_s) if is_closed else summary.tokens_per_s,
        "failed": summary.failed,
        "reads": counted("lora_loads_total"),
        "slots": counted("lora_activations_total"),
        "hit_tokens": counted("prefix_cache_hits_total"),
        "endless_hit_tokens": count_endless_hits(calls, BLOCK_SIZE) if workload == CONVERSATIONS else None,
        "front_cores": cores("EngineReplica"),
        "haproxy_cores": cores("haproxy"),
        "busiest": max(generated.values()) * len(generated) / total if (total := generated.total()) else None,
    }


def steady_tokens_per_s(outcomes: Sequence[Outcome], end_s: float) -> float:
    """Returns the tokens per second of a closed loop between its ramp and its end, when no calls begin anymore."""
    begin_s = RAMP * end_s
    done = [outcome for outcome in outcomes if outcome.error is None and outcome.chunks_s]
    shares = [sum(begin_s <= at_s < end_s for at_s in outcome.chunks_s) / len(outcome.chunks_s) for outcome in done]
    tokens = sum(outcome.num_tokens * share for outcome, share in zip(done, shares, strict=True))
    return tokens / (end_s - begin_s)


def worst_adapters_s(calls: Sequence[Call], outcomes: Sequence[Outcome]) -> float | None:
    """Returns the 90th percentile, over adapters, of the median TTFT of each adapter's requests."""
    by_adapter: defaultdict[str, list[float]] = defaultdict(list)
    for call, outcome in zip(calls, outcomes, strict=True):
        if outcome.error is None:
            by_adapter[call.model].append(outcome.first_token_s)
    medians = [float(np.median(times)) for times in by_adapter.values()]
    found = Percentiles.of(medians)
    return found and found.p90


def simulated_load(workload: str, size: Size, replicas: int) -> Load | LoopLoad:
    """Returns one of SIMULATED as the simulation takes it."""
    load = load_of(workload, size, replicas)
    return LoopLoad(load, LOOP_SHARE * size.duration_s, size.streams * replicas) if workload in LOOPS else load


def predict_row(
    server_loads: Sequence[Load | LoopLoad], rule: RoutingRule, replicas: int, size: Size, *, is_warm: bool
) -> dict[str, float | None]:
    """Returns the figures that the simulation has of the last load, after the others on the same server. If it
    `is_warm`, the first of the others is the warm-up."""
    result = predict(server_loads, rule, replicas, lora_bytes(size), size.max_cpu_loras, is_warm=is_warm)
    known = {
        "ttft_p50": result.p50_s,
        "ttft_p99": result.p99_s,
        "busiest": result.max_over_mean,
        "reads": float(result.num_reads),
        "slots": float(result.num_fills),
        "tokens_per_s": result.tokens_per_s,
    }
    return dict.fromkeys(UNITS) | known
