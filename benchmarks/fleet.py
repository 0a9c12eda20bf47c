"""Compares the routing rules of `--routing` on real replicas behind the real front, and how a fleet scales.

    python benchmarks/fleet.py                                    # replicas on the CPU, small
    python benchmarks/fleet.py --device cuda --replicas 1 2 4     # one GPU for each replica, an 8B with random weights
    python benchmarks/fleet.py --device cuda --replicas 4 --simulate     # what the simulation predicts of it
    python benchmarks/fleet.py --then "python benchmarks/chaos.py --attach {server} --models says0,says1"

Each rule gets a server of its own, and all rules get the same calls: first some that are not counted, one for each
adapter and then a load like S-LoRA's, so that no rule is judged by empty caches; then S-LoRA's and Dynamo's workloads
(placement_workloads.py), conversations of several turns (conversations.py), and `saturation`, a closed loop (with
`saturation, base`, without adapters). `saturation, one replica` is a closed loop on one of the replicas at its own
port, while the others are idle. The client is a process of its own. Other programs may follow on the first server
(`--then`). For them it also has the adapters says0 to says7, each of which answers every prompt with one token of its
own (random_llama.py).

A workload may have a rate of its own and be for the first rules alone: `Dynamo, flash@18:2` has 18 requests per second
and replica, and only the first two of `--rules` get it. No later workload is for more rules, so that all rules have
had the same loads before.

With `--resume`, rules whose rows are all in the file `--json` are left out, so a comparison fits into several calls of
the same command, each with a `--limit-s`: see fleet_resume.py. Rules whose workloads do not fit into the time that is
left are for the next call.

With `--at-once 2`, two rules have servers at a time, which are warmed up together. Then each workload is sent to one of
them after the other, and rules with fewer workloads come last. Both must fit on the GPUs, so `--server-args` should
have `--kv-cache-tokens`.

Columns: TTFT from when a request was due; `worst` is the TTFT p50 of the adapter that is worse than 90 % of all;
`hits` are prompt tokens from the prefix cache, beside those that one cache without bounds would have; `reads` and
`slots` count adapters read and copied to slots; cores are those of all replicas' fronts, and of HAProxy; `busy` is the
number of tokens that the busiest replica generated, relative to the mean.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import get_args

import placement_workloads
from benchmark_results import Case, this_hardware, write_results
from fleet_figures import (
    BLOCK_SIZE,
    LOOP_SHARE,
    SIMULATED,
    UNITS,
    measure,
    predict_row,
    simulated_load,
    warm_up,
)
from fleet_load import (
    ALONE,
    CONVERSATIONS,
    KNOWN,
    LOOPS,
    SATURATION,
    SIZES,
    SLORA,
    Size,
    Stage,
    draw_calls,
    first_pass,
    warm_up_size,
)
from fleet_resume import EarlierRun, read_earlier, row_key, split
from fleet_tables import print_header, print_ratios, print_row
from http_load import ReportLost
from local_server import LocalServer, running
from lorafleet.cluster.routing.rule_names import RoutingRule
from placement_workloads import RANKS, Load
from random_llama import write_alike_adapters, write_model, write_one_token_adapter
from serving import CONFIG, DEMO

RULES: tuple[RoutingRule, ...] = get_args(RoutingRule)
NUM_ONE_TOKEN_ADAPTERS = 8
START_S = {"cpu": 0.0, "cuda": 40.0}  # The time that a server takes to start at least.


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
    if size.lora_memory_gib is not None:
        command += ["--lora-memory-gib", str(size.lora_memory_gib)]
    command += ["--num-replicas", str(replicas), "--routing", rule]
    command += ["--catalog-uri", str(folder / f"catalogue-{rule}-{replicas}")]  # Other servers may run meanwhile.
    with running(command, folder / f"{rule}-{replicas}.log") as server:
        server.settle()
        yield server


def write_files(device: str, folder: Path, load: Load) -> None:
    """Writes the model, the adapters a0, a1, …, of S-LoRA's ranks, and says0, says1, …, of one token each."""
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
    for number in range(NUM_ONE_TOKEN_ADAPTERS):
        write_one_token_adapter(folder / "adapters" / f"says{number}", config, number)


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the words, or those of this process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=SIZES, default="cpu")
    parser.add_argument("--replicas", type=int, nargs="+")
    parser.add_argument("--rules", nargs="+", choices=RULES, default=RULES)
    parser.add_argument(
        "--workloads",
        nargs="+",
        type=Stage.parse,
        metavar="WORKLOAD[@RATE][:RULES]",
        help=f"any of {', '.join(KNOWN)}",
        default=[Stage(name) for name in (SLORA, "Dynamo, flash", "Dynamo, diurnal", CONVERSATIONS, SATURATION)],
    )
    parser.add_argument("--rate", type=float, help="requests per second and replica")
    parser.add_argument(
        "--load",
        type=float,
        metavar="SHARE",
        help="after the first closed loop, set the rate to this share of the requests per second that it reached",
    )
    parser.add_argument("--duration-s", type=float)
    parser.add_argument("--adapters", type=int)
    parser.add_argument("--max-loras", type=int)
    parser.add_argument("--max-cpu-loras", type=int)
    parser.add_argument("--lora-memory-gib", type=float)
    parser.add_argument("--warm-up-s", type=float, help="seconds of calls at the start that are not counted")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--simulate", action="store_true", help="predict the figures of WORKLOADS and `saturation`, without any server"
    )
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="after so many seconds no workload begins")
    parser.add_argument(
        "--then",
        action="append",
        default=[],
        metavar="COMMAND",
        help="run this on the first server after its workloads; {server} stands for URL,PID and {url} for its URL",
    )
    parser.add_argument("--at-once", type=int, default=1, metavar="N", help="the servers of N rules run at a time")
    parser.add_argument("--server-args", default="", help="additional options of `lorafleet serve`, as one string")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--resume", action="store_true", help="leave out rules that have all rows in the file --json")
    args = parser.parse_args(words)
    if args.at_once < 1:
        parser.error(f"--at-once is {args.at_once}; it must be at least 1")
    if args.resume and args.json is None:
        parser.error("--resume needs --json, the file with the rows of the calls before")
    if args.resume and (args.load is not None or args.then or args.simulate):
        parser.error(
            "--resume knows neither --load nor --then nor --simulate: give a --rate, and use calls of their own"
        )
    counts = [sum(map(stage.is_for, range(len(args.rules)))) for stage in args.workloads]
    if any(later > earlier for earlier, later in itertools.pairwise(counts)):
        parser.error(
            "a workload is for more rules than one before it, which would have warmed the caches of the first rules "
            "only. Put those for few rules last."
        )
    return args


class Run:
    """Measures all cases, and has the figures of those that are complete. The first rule is the first that is given."""

    def __init__(self, args: argparse.Namespace, size: Size) -> None:
        self.cases: list[Case] = []
        self._args = args
        self._stages: list[Stage] = args.workloads
        self._size = size
        self._first_size = size  # Before --load changes the rate: warm-ups and closed loops are the same for all rules.
        self._end_s = time.monotonic() + args.limit_s
        self._commands: list[str] = args.then
        self._load: float | None = args.load

    def resume(self, earlier: Sequence[Case]) -> None:
        """Takes over the rows of rules that have all of theirs, and leaves these rules out."""
        self.cases = split(earlier, self._args.rules, self._row_keys)

    def simulate(self) -> None:
        for replicas in self._size.replicas:
            for index, rule in enumerate(self._args.rules):
                warm_up_load = simulated_load(SLORA, warm_up_size(self._size), replicas)
                loads = [warm_up_load] if self._size.warm_up_s else []
                is_warm = bool(loads)
                for stage in self._stages:
                    if stage.is_for(index) and stage.workload in SIMULATED:
                        size = self._size_of(stage)
                        loads.append(simulated_load(stage.workload, size, replicas))
                        figures = predict_row(loads, rule, replicas, size, is_warm=is_warm)
                        self._add(stage.workload, rule, replicas, size.rate, figures)

    def measure(self, folder: Path) -> None:
        complete = {case.settings["rule"] for case in self.cases}
        rules = [rule for rule in self._args.rules if rule not in complete]
        for replicas in self._size.replicas:
            for begin in range(0, len(rules), self._args.at_once):
                left_s, least_s = self._end_s - time.monotonic(), 0.0
                if self._args.resume:  # Rows of a part of the workloads would be measured in vain.
                    least_s = self._least_s(rules[begin : begin + self._args.at_once], replicas)
                if left_s < least_s:
                    print(
                        f"left out: {', '.join(rules[begin:])}, {replicas} replicas; the first need {least_s:.0f} s at "
                        f"least, and {max(0.0, left_s):.0f} s are left"
                    )
                    break
                self._measure_servers(folder, rules[begin : begin + self._args.at_once], replicas)

    def _measure_servers(self, folder: Path, rules: Sequence[str], replicas: int) -> None:
        """Starts the servers of these rules, and sends each workload to one after another.

        The first one starts alone, since it compiles kernels that the others then find on the disk.
        """
        servers: dict[str, LocalServer] = {}

        def start(rule: str) -> None:
            servers[rule] = stack.enter_context(served(self._args, self._size, folder, rule, replicas))

        def prepare(rule: str) -> bool:
            if rule not in servers:
                start(rule)
            began_s = time.monotonic()
            try:
                warm_up(servers[rule], self._first_size, replicas)
            except ReportLost as error:
                print(f"the warm-up of {rule} failed, {error}", flush=True)
                return False
            print(f"{rule}: warm after {time.monotonic() - began_s:.0f} s", flush=True)
            return True

        if self._size.warm_up_s and self._args.device == "cuda":
            num_bytes, pass_s = first_pass(self._first_size, replicas)
            print(f"{', '.join(rules)}: first requests read {num_bytes / 1e9:.1f} GB each; predicted {pass_s:.0f} s")
        with ExitStack() as stack, ThreadPoolExecutor(len(rules)) as pool:
            start(rules[0])
            warm = [rule for rule, is_warm in zip(rules, pool.map(prepare, rules), strict=True) if is_warm]
            for num_stages, group in itertools.groupby(warm, self._num_stages):  # Those with most workloads come first.
                alike = list(group)
                for stage in self._stages[:num_stages]:
                    for rule in alike:
                        self._measure_case(servers[rule], stage, rule, replicas)
            if (first := servers.get(self._args.rules[0])) is not None:
                self._follow(first)

    def _measure_case(self, server: LocalServer, stage: Stage, rule: str, replicas: int) -> None:
        workload = stage.workload
        if self._is_over():
            print(f"left out: {workload}, {rule}, {replicas} replicas")
            return
        url = server.url
        if workload in ALONE:
            url, replicas = server.replica_url(), 1
        size = self._size_of(stage)
        try:
            figures = measure(server, url, workload, size, replicas)
        except ReportLost as error:
            print(f"failed: {workload}, {rule}, {replicas} replicas, {error}", flush=True)
            return
        self._add(ALONE.get(workload, workload), rule, replicas, size.rate, figures)
        if workload == SATURATION and self._load is not None:
            tokens = fmean(call.max_tokens for call in draw_calls(SATURATION, size, replicas))
            rate = self._load * (figures["tokens_per_s"] or 0.0) / tokens / replicas
            self._size, self._load = replace(self._size, rate=round(rate, 1)), None
            print(f"rate: {self._size.rate} requests per second and replica")

    def _row_keys(self, rule: str) -> set[str]:
        """Returns the keys of the rows that the rule should have."""
        keys = set[str]()
        for stage in self._stages[: self._num_stages(rule)]:
            size = self._size_of(stage)
            for replicas in (1,) if stage.workload in ALONE else size.replicas:
                keys.add(row_key(ALONE.get(stage.workload, stage.workload), replicas, size.rate))
        return keys

    def _least_s(self, rules: Sequence[str], replicas: int) -> float:
        """Returns the seconds that these rules take at least."""
        size = self._first_size
        warm_s = START_S[self._args.device] + size.warm_up_s
        if size.warm_up_s and self._args.device == "cuda":
            warm_s += first_pass(size, replicas)[1]
        stages = [stage for rule in rules for stage in self._stages[: self._num_stages(rule)]]
        return warm_s + sum(size.duration_s * (LOOP_SHARE if one.workload in LOOPS else 1.0) for one in stages)

    def _num_stages(self, rule: str) -> int:
        """Returns the number of workloads that the rule gets, which are the first ones."""
        index = self._args.rules.index(rule)
        return sum(stage.is_for(index) for stage in self._stages)

    def _size_of(self, stage: Stage) -> Size:
        if stage.workload in LOOPS:
            return self._first_size
        return self._size if stage.rate is None else replace(self._size, rate=stage.rate)

    def _add(self, workload: str, rule: str, replicas: int, rate: float, figures: dict[str, float | None]) -> None:
        settings = {"workload": workload, "rule": rule, "replicas": replicas, "rate": rate}
        self.cases.append(Case(settings, figures))
        print_row(settings, figures)
        write_results(self._args.json, UNITS, self.cases)  # Each time, since a run may be cut.

    def _follow(self, server: LocalServer) -> None:
        commands, self._commands = self._commands, []
        for command in commands:
            words = [word.format(server=f"{server.url},{server.pid}", url=server.url) for word in shlex.split(command)]
            status = subprocess.run(words, check=False).returncode
            if status:
                print(f"exit status {status}: {shlex.join(words)}")

    def _is_over(self) -> bool:
        return time.monotonic() > self._end_s


def main() -> None:
    args = arguments()
    given = {name: value for name in Size.__slots__ if (value := getattr(args, name, None)) is not None}
    size = replace(SIZES[args.device], **given)
    print_header()
    run = Run(args, size)
    if args.resume:
        try:
            run.resume(read_earlier(args.json, args, arguments, this_hardware()))
        except EarlierRun as error:
            sys.exit(str(error))
    if args.simulate:
        run.simulate()
        print_ratios(run.cases)
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_files(args.device, folder, Load("", 1.0, 1.0, size.adapters, size.seed))
        try:
            run.measure(folder)
        finally:  # A run that is interrupted has the figures of the cases before.
            print_ratios(run.cases)


if __name__ == "__main__":
    main()
