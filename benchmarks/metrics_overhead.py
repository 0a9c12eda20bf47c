"""Measures the cost of metrics: CPU microseconds per step in the worker, per token and sequence in the front, and per
scrape.

    python benchmarks/metrics_overhead.py [--batches 1 8 64 256] [--json FILE]

It runs only the counting code, in a loop, and measures the thread's CPU time, so that a busy machine hardly changes the
figures. The cost per step covers the step's shape and its counts; the cost per report covers sending them to the front,
ten times a second. The share relates to the step times of one H200 with an 8B Llama in bf16 (NOTES.md, base step), as
if the host's CPU were this one. It excludes the two CUDA events that are recorded for one step in 32: to measure them,
run benchmarks/engine_e2e.py on a GPU with and without them.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np

from lorafleet.api.access.access import Access
from lorafleet.api.answer.shared_run import SharedRun
from lorafleet.api.telemetry.http_metrics import Metrics, Stopwatch, text_of
from lorafleet.api.telemetry.recent import RecentFailures, RecentTraffic
from lorafleet.api.telemetry.sequence_observer import SequenceObserver
from lorafleet.api.telemetry.sequence_record import SequenceRecord
from lorafleet.api.telemetry.telemetry import Telemetry
from lorafleet.api.telemetry.traced import NO_TRACE
from lorafleet.api.telemetry.traffic_history import TrafficHistory
from lorafleet.kernels.lora.lora_batch import BASE_SLOT
from lorafleet.protocol.messages import AdapterMove, EngineStats, TokenOutput
from lorafleet.protocol.step_metrics import StepMetrics
from lorafleet.workers.attention.attention_backend import AttentionBatch
from lorafleet.workers.device.step_plan import FIELDS, StepPlan

H200_STEP_MS = {1: 4.73, 8: 4.99, 64: 6.43, 256: 12.83}  # Step times of the base, from NOTES.md.
REPORTS_S = 10.0
TOKENS = 200  # The number of tokens of an answer.
ROUNDS = 5


def cpu_us(work: Callable[[], object], times: int) -> float:
    """Returns the CPU microseconds of one call: the best of several rounds."""
    best = float("inf")
    for _ in range(ROUNDS):
        started = time.thread_time()
        for _ in range(times):
            work()
        best = min(best, time.thread_time() - started)
    return best / times * 1e6


def decode_step(batch: int) -> StepPlan:
    attention = AttentionBatch([1] * batch, [500] * batch, [[0]] * batch)
    slots = [BASE_SLOT if i % 4 == 0 else i % 8 for i in range(batch)]
    rows = list(range(batch))
    return StepPlan(np.zeros((FIELDS, batch), np.int64), attention, slots, [0] * batch, rows, True, [], [16] * 8)


def mixed_step(batch: int) -> StepPlan:
    """Returns a step with decodes and two prompts of 256 tokens."""
    lens = [1] * batch + [256, 256]
    attention = AttentionBatch(lens, lens, [[0]] * len(lens))
    slots = [i % 8 for i in range(len(lens))]
    fields = np.zeros((FIELDS, sum(lens)), np.int64)
    return StepPlan(fields, attention, slots, [0] * len(lens), list(range(batch)), True, [], [16] * 8)


def worker_costs(batch: int) -> dict[str, float]:
    metrics, encode = StepMetrics(), msgspec.msgpack.Encoder().encode
    decode, mixed = decode_step(batch), mixed_step(batch)
    row = {
        "batch": batch,
        "decode_us": cpu_us(lambda: metrics.ended(decode.shape, time.perf_counter()), 20_000),
        "mixed_us": cpu_us(lambda: metrics.ended(mixed.shape, time.perf_counter()), 20_000),
        "report_us": cpu_us(lambda: encode(EngineStats(steps=metrics.stats([]))), 2000),
    }
    step_ms = H200_STEP_MS.get(batch)
    if step_ms is not None:
        reports_us = row["report_us"] * REPORTS_S * step_ms / 1e3
        row["share_of_an_h200_step"] = (row["decode_us"] + reports_us) / (step_ms * 1e3)
    return row


def front_costs() -> dict[str, float]:
    metrics = Metrics(EngineStats, "base", "r1")
    model: Any = SimpleNamespace(lora=None, fetched=False, fallback_reason=None)
    telemetry = Telemetry(metrics, RecentTraffic(), TrafficHistory(), RecentFailures(), SharedRun(metrics.render))
    observer = SequenceObserver(telemetry, Access(), NO_TRACE, "r", model, SequenceRecord(0, 100, counts_prompt=True))
    output = TokenOutput(request_id="r", token_ids=[1])
    tick = cpu_us(lambda: observer.received(output), 20_000)

    def sequence() -> None:
        """Counts everything about a sequence except its tokens."""
        stopwatch = Stopwatch()
        stopwatch.first, stopwatch.gaps, stopwatch.lora_rank = 0.1, [0.005] * (TOKENS - 1), 16
        label = metrics.adapters.count("sql")
        metrics.count_start(label, 0.001, "gpu")
        metrics.count_sequence(label, 100, TOKENS, stopwatch, "stop")
        metrics.count_request("/v1/completions", label, 200)

    whole = cpu_us(sequence, 500)
    for i in range(100):  # Creates as many labels as there can be.
        label = metrics.adapters.count(f"adapter-{i}")
        metrics.count_start(label, 0.001, "cpu")
        metrics.count_sequence(label, 100, 1, Stopwatch(), "stop")
        metrics.count_move(AdapterMove(f"adapter-{i}", "disk", "cpu", 0.1))
    return {
        "token_us": tick,
        "sequence_us": whole,
        f"token_of_{TOKENS}_us": tick + whole / TOKENS,
        "scrape_us": cpu_us(lambda: text_of(list(metrics.collect())), 5),
        "scrape_lines": float(len(text_of(list(metrics.collect())).splitlines())),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    worker, front = [worker_costs(batch) for batch in args.batches], front_costs()
    for row in (*worker, front):
        print("  ".join(f"{name} {value:.4g}" for name, value in row.items()))
    if args.json is not None:
        args.json.write_text(json.dumps({"machine": platform.machine(), "worker": worker, "front": front}, indent=1))


if __name__ == "__main__":
    main()
