"""Compares the routing rules of `--routing` on real replicas behind the real front, and how a fleet scales.

    python benchmarks/fleet.py                                    # replicas on the CPU, small
    python benchmarks/fleet.py --device cuda --replicas 1 2 4     # one GPU for each replica, an 8B with random weights

Each rule gets a server of its own, and all rules get the same calls: S-LoRA's and Dynamo's workloads
(placement_workloads.py), conversations of several turns (conversations.py), and `saturation`, a closed loop. The
client is a process of its own.

Columns: TTFT from when a request was due; `worst` is the TTFT p50 of the adapter that is worse than 90 % of all;
`hits` are prompt tokens from the prefix cache, beside those that one cache without bounds would have; `reads` and
`slots` count adapters read and copied to slots; cores are those of all replicas' fronts, and of HAProxy.
"""

from __future__ import annotations

import argparse
import json
import shlex
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np

import placement_workloads
from benchmark_results import Case, write_results
from conversations import Conversations, count_endless_hits
from conversations import draw as draw_conversations
from http_load import Call, Job, run_apart
from latency import Outcome, Percentiles, summarize
from local_server import LocalServer, running
from lorafleet.cluster.routing.rule_names import RoutingRule
from placement_workloads import RANKS, WORKLOADS, Load
from random_llama import write_alike_adapters, write_model
from serving import CONFIG, DEMO

RULES: tuple[RoutingRule, ...] = get_args(RoutingRule)
CONVERSATIONS, SATURATION = "conversations", "saturation"
BLOCK_SIZE = 16
UNITS = {
    **dict.fromkeys(("ttft_p50", "ttft_p99", "gap_p50", "gap_p99", "ttft_worst_adapters"), "s"),
    **dict.fromkeys(("tokens_per_s", "front_cores", "haproxy_cores"), ""),
    **dict.fromkeys(("failed", "reads", "slots", "hit_tokens", "endless_hit_tokens"), ""),
}


@dataclass(frozen=True, slots=True)
class Size:
    """Sizes of a run; the defaults of both devices differ."""

    replicas: tuple[int, ...]
    adapters: int
    max_loras: int
    max_cpu_loras: int
    rate: float  # Requests per second and replica.
    duration_s: float
    longest: int  # Prompts and answers are cut to this many tokens.
    token_ids: tuple[int, int]
    streams: int  # Number of streams of the closed loop for each replica.
    turn_tokens: int  # Mean tokens of a question, and of an answer, in conversations.
    seed: int


SIZES = {
    "cpu": Size((2,), 24, 4, 8, 1.5, 20.0, 48, (10, 250), 4, 24, 0),
    "cuda": Size((1, 2, 4), 512, 16, 128, 10.0, 120.0, 512, (10, 128_000), 64, 256, 0),
}


@contextmanager
def served(args: argparse.Namespace, size: Size, folder: Path, rule: str, replicas: int) -> Iterator[LocalServer]:
    """Starts a server on the files that write_files() made."""
    command = shlex.split(args.server_args)
    command += ["--model", str(folder / "model" if args.device == "cuda" else DEMO), "--device", args.device]
    if args.device == "cuda":
        command += ["--load-format", "dummy"]
    command += ["--served-model-name", "base", "--lora-resolver-dir", str(folder / "adapters")]
    command += ["--max-lora-rank", str(max(RANKS)), "--max-loras", str(size.max_loras)]
    command += ["--max-cpu-loras", str(size.max_cpu_loras), "--block-size", str(BLOCK_SIZE)]
    command += ["--num-replicas", str(replicas), "--routing", rule]
    with running(command, folder / f"{rule}-{replicas}.log") as server:
        server.settle()
        yield server


def write_files(device: str, folder: Path, load: Load) -> None:
    """Writes the model and the adapters a0, a1, …, of S-LoRA's ranks."""
    config = CONFIG if device == "cuda" else json.loads((DEMO / "config.json").read_text())
    if device == "cuda":
        write_model(folder / "model", config)
    ranks = placement_workloads.ranks(load)
    (folder / "adapters").mkdir()
    for rank in RANKS:
        numbers = [number for number, one in enumerate(ranks) if one == rank]
        alike = write_alike_adapters(folder / f"rank{rank}", config, len(numbers), rank) if numbers else []
        for number, path in zip(numbers, alike, strict=True):
            path.rename(folder / "adapters" / f"a{number}")


def draw_calls(workload: str, size: Size, replicas: int) -> list[Call]:
    names = [f"a{number}" for number in range(size.adapters)]
    rate = size.rate * replicas
    if workload == CONVERSATIONS:
        turns = 6
        return draw_conversations(
            Conversations(
                rate / turns,
                size.duration_s,
                names,
                turns,
                2 * size.turn_tokens,
                size.turn_tokens,
                size.duration_s / 20,
                size.token_ids,
                size.seed,
            )
        )
    name = "S-LoRA, alpha .3" if workload == SATURATION else workload
    arrivals = placement_workloads.draw(Load(name, rate, size.duration_s, size.adapters, size.seed))
    random = np.random.default_rng([size.seed, 13])
    return [
        Call(
            arrival.at_s,
            "base" if arrival.adapter is None else names[arrival.adapter],
            random.integers(*size.token_ids, min(arrival.num_input, size.longest)).tolist(),
            min(arrival.num_output, size.longest),
        )
        for arrival in arrivals
    ]


def measure(server: LocalServer, workload: str, size: Size, replicas: int) -> dict[str, float | None]:
    calls = draw_calls(workload, size, replicas)
    streams = size.streams * replicas if workload == SATURATION else 0
    before, cpu_before = server.engine_counters(), server.cpu_s()
    report = run_apart(Job(server.url, calls, streams))
    after, cpu_after = server.engine_counters(), server.cpu_s()

    def counted(name: str) -> float:
        return after.get(name, 0.0) - before.get(name, 0.0)

    def cores(role: str) -> float:
        return (cpu_after[role] - cpu_before[role]) / report.wall_s

    summary = summarize(report.outcomes, [])
    first, gaps = summary.first_token_s, summary.inter_token_s
    for error in summary.errors:
        print(f"  failed: {error}")
    return {
        "ttft_p50": first and first.p50,
        "ttft_p99": first and first.p99,
        "gap_p50": gaps and gaps.p50,
        "gap_p99": gaps and gaps.p99,
        # A closed loop sends the calls in their order, but which stream's outcome is whose is not recorded.
        "ttft_worst_adapters": None if streams else worst_adapters_s(calls, report.outcomes),
        "tokens_per_s": summary.tokens_per_s,
        "failed": summary.failed,
        "reads": counted("lora_loads_total"),
        "slots": counted("lora_activations_total"),
        "hit_tokens": counted("prefix_cache_hits_total"),
        "endless_hit_tokens": count_endless_hits(calls, BLOCK_SIZE) if workload == CONVERSATIONS else None,
        "front_cores": cores("EngineReplica"),
        "haproxy_cores": cores("haproxy"),
    }


def worst_adapters_s(calls: Sequence[Call], outcomes: Sequence[Outcome]) -> float | None:
    """Returns the 90th percentile, over adapters, of the median TTFT of each adapter's requests."""
    by_adapter: defaultdict[str, list[float]] = defaultdict(list)
    for call, outcome in zip(calls, outcomes, strict=True):
        if outcome.error is None:
            by_adapter[call.model].append(outcome.first_token_s)
    medians = [float(np.median(times)) for times in by_adapter.values()]
    found = Percentiles.of(medians)
    return found and found.p90


def print_row(settings: dict[str, Any], figures: dict[str, float | None]) -> None:
    ms = "".join(
        f"{'-':>9}" if (value := figures[name]) is None else f"{1e3 * value:9.1f}"
        for name in ("ttft_p50", "ttft_p99", "ttft_worst_adapters", "gap_p50", "gap_p99")
    )
    counts = "".join(
        f"{figures[name] or 0:8.0f}" for name in ("tokens_per_s", "failed", "reads", "slots", "hit_tokens")
    )
    endless = figures["endless_hit_tokens"]
    hits = f"{'-' if endless is None else f'{endless:.0f}':>8}"
    cores = f"{figures['front_cores']:6.2f}{figures['haproxy_cores']:6.2f}"
    print(
        f"{settings['workload']:24}{settings['rule']:>13}{settings['replicas']:>3}{ms}{counts}{hits}{cores}", flush=True
    )


def print_ratios(cases: Sequence[Case]) -> None:
    """Prints affinity's p99 of the TTFT beside each other rule's, and how throughput scales."""
    by = {(case.settings["workload"], case.settings["rule"], case.settings["replicas"]): case.figures for case in cases}
    for (workload, rule, replicas), figures in by.items():
        ours, p99 = by.get((workload, "affinity", replicas)), figures["ttft_p99"]
        if rule != "affinity" and ours is not None and ours["ttft_p99"] is not None and p99:
            print(f"{workload}, {replicas} replicas: TTFT p99 of affinity is {ours['ttft_p99'] / p99:.2f} x {rule}'s")
        one = by.get((workload, rule, 1))
        if workload == SATURATION and replicas != 1 and one is not None and one["tokens_per_s"]:
            times = (figures["tokens_per_s"] or 0.0) / one["tokens_per_s"]
            print(f"{rule}: {replicas} replicas generate {times:.2f} x the tokens of one")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=SIZES, default="cpu")
    parser.add_argument("--replicas", type=int, nargs="+")
    parser.add_argument("--rules", nargs="+", choices=RULES, default=RULES)
    parser.add_argument(
        "--workloads",
        nargs="+",
        choices=[*WORKLOADS, CONVERSATIONS, SATURATION],
        default=["S-LoRA, alpha .3", "Dynamo, flash", "Dynamo, diurnal", CONVERSATIONS, SATURATION],
    )
    parser.add_argument("--rate", type=float, help="requests per second and replica; 70 %% of a replica's saturation")
    parser.add_argument("--duration-s", type=float)
    parser.add_argument("--adapters", type=int)
    parser.add_argument("--max-loras", type=int)
    parser.add_argument("--max-cpu-loras", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--server-args", default="", help="additional options of `lorafleet serve`, as one string")
    parser.add_argument("--json", type=Path, help="file for the figures")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    given = {name: value for name in Size.__slots__ if (value := getattr(args, name, None)) is not None}
    size = replace(SIZES[args.device], **given)
    cases = []
    print(
        f"{'':24}{'':>13}{'':>3}{'TTFT p50':>9}{'p99':>9}{'worst':>9}{'gap p50':>9}{'p99':>9}{'tok/s':>8}{'failed':>8}"
        f"{'reads':>8}{'slots':>8}{'hits':>8}{'of':>8}{'front':>6}{'proxy':>6}   (ms, cores)"
    )
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_files(args.device, folder, Load("", 1.0, 1.0, size.adapters, size.seed))
        for replicas in size.replicas:
            for rule in args.rules:
                with served(args, size, folder, rule, replicas) as server:
                    for workload in args.workloads:
                        settings = {"workload": workload, "rule": rule, "replicas": replicas}
                        figures = measure(server, workload, size, replicas)
                        cases.append(Case(settings, figures))
                        print_row(settings, figures)
    print_ratios(cases)
    write_results(args.json, UNITS, cases)


if __name__ == "__main__":
    main()
