"""Measures the real server under S-LoRA's load over HTTP: TTFT, inter-token latency, throughput, SLO attainment.

    python benchmarks/serving.py [--rates 5 15 30] [--alpha 0.3] [--adapters 100] [--json FILE]
    python benchmarks/serving.py --base-url http://127.0.0.1:8000      (a running server, with its adapters)

It starts `lorafleet serve` twice, without LoRA and with it, and streams /v1/completions from a client process. On a GPU
it serves an 8B Llama with random weights and adapters of rank 16 on all seven projections; without one it serves the
demo model with adapters for it. All cases have the same arrival times, lengths and draws (slora_workload.py), and
prompts of their own, so that no prefix is cached. Each case is warmed up first, so that kernels are compiled and every
adapter has been read once. At the end, long prompts arrive amid running streams, to show the effect of chunked prefill
on their gaps.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import tempfile
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from engine_e2e import CONFIG
from http_load import Call, Job, Report, run_apart
from latency import Percentiles, Summary, gaps_s, summarize
from local_server import LocalServer, running
from random_llama import write_adapters, write_model
from slora_workload import Workload, draw

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "demo" / "model"
WARM_UP_S = 4.0
PRIME_S = 0.05  # The time between the first requests to each adapter.
COUNTERS = (
    "lora_loads_total",
    "lora_activations_total",
    "lora_load_seconds_total",
    "lora_evictions_total",
    "prefix_cache_hits_total",
    "num_preemptions_total",
)


@dataclass(frozen=True, slots=True)
class Scale:
    """Sizes of a run; the defaults fit the machine."""

    rates: tuple[float, ...]  # Requests per second.
    duration_s: float
    lengths: tuple[int, int]  # The range of tokens of prompts and of answers.
    token_ids: tuple[int, int]  # The range of the prompts' token ids.
    few_adapters: int
    adapters: int
    rank: int
    max_loras: int
    max_cpu_loras: int
    streams: int  # The number of streams that are running when the long prompts arrive.
    long_prompts: int
    long_tokens: int
    burst_at_s: float
    stream_tokens: int  # The tokens of a stream's answer, which must last beyond the burst.


H200 = Scale((5, 15, 30), 20, (8, 511), (10, 128_000), 8, 100, 16, 32, 64, 32, 8, 4096, 2.0, 900)
CPU = Scale((2, 6), 10, (4, 64), (10, 250), 3, 12, 8, 4, 6, 8, 4, 400, 0.3, 440)


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    model: str
    adapters: tuple[str, ...]  # If empty, every request uses the base.


class Row(msgspec.Struct):
    case: str
    rate: float
    summary: Summary
    client_cores: float
    server_cores: dict[str, float]  # Processor cores by process; empty if the server was started elsewhere.
    counters: dict[str, float]  # The engine's counters during the row.


class Burst(msgspec.Struct):
    """The gaps of running streams before and during the prefill of long prompts, in seconds."""

    case: str
    quiet: Percentiles | None  # Gaps before the long prompts arrive.
    during: Percentiles | None  # Gaps until the first token of the last long prompt.
    longest_gap_s: float
    first_token_s: list[float]  # Times to first token of the long prompts.
    errors: list[str]


@dataclass(frozen=True, slots=True)
class Bench:
    """Sends load to one server."""

    url: str
    server: LocalServer | None
    scale: Scale
    alpha: float
    cv: float
    seed: int
    slos_s: tuple[float, ...]

    def warm_up(self, case: Case) -> None:
        """Reads every adapter once and compiles the kernels for prompts of every size, without measuring."""
        names = case.adapters or (case.model,)
        lengths = [1 << i for i in range(3, self.scale.long_tokens.bit_length())]
        primes = [
            Call(i * PRIME_S, names[i % len(names)], self._prompt(lengths[i % len(lengths)], 9, i), 2)
            for i in range(max(len(names), len(lengths)))
        ]
        begin = primes[-1].at_s + PRIME_S
        load = self._calls(case, self.scale.rates[len(self.scale.rates) // 2], WARM_UP_S, seed=self.seed + 1)
        report = self._run([*primes, *(msgspec.structs.replace(call, at_s=call.at_s + begin) for call in load)])
        errors = {outcome.error for outcome in report.outcomes if outcome.error is not None}
        assert not errors, f"{case.name}: {errors}"

    def measure(self, case: Case, rate: float) -> Row:
        calls = self._calls(case, rate, self.scale.duration_s, self.seed)
        before = self._costs()
        report = self._run(calls)
        after = self._costs()
        cpu, counters = ({name: b[name] - a.get(name, 0) for name in b} for a, b in zip(before, after, strict=True))
        return Row(
            case=case.name,
            rate=rate,
            summary=summarize(report.outcomes, self.slos_s),
            client_cores=report.cpu_s / report.wall_s,
            server_cores={name: seconds / report.wall_s for name, seconds in cpu.items()},
            counters={name: counters[name] for name in COUNTERS if name in counters},
        )

    def burst(self, case: Case) -> Burst:
        scale = self.scale
        names = case.adapters or (case.model,)
        streams = [
            Call(0.01 * i, names[i % len(names)], self._prompt(scale.lengths[1], 5, i), scale.stream_tokens)
            for i in range(scale.streams)
        ]
        longs = [
            Call(scale.burst_at_s, names[i % len(names)], self._prompt(scale.long_tokens, 6, i), scale.lengths[0])
            for i in range(scale.long_prompts)
        ]
        outcomes = self._run([*streams, *longs]).outcomes
        errors = sorted({outcome.error for outcome in outcomes if outcome.error is not None})
        if errors:
            return Burst(case.name, None, None, 0.0, [], errors)
        running_streams, long_outcomes = outcomes[: scale.streams], outcomes[scale.streams :]
        end_s = max(outcome.chunks_s[0] for outcome in long_outcomes)
        if min(outcome.chunks_s[-1] for outcome in running_streams) < end_s:
            return Burst(case.name, None, None, 0.0, [], ["the streams ended before the burst did"])
        quiet = [g for outcome in running_streams for g in gaps_s(outcome, scale.burst_at_s / 2, scale.burst_at_s)]
        during = [g for outcome in running_streams for g in gaps_s(outcome, scale.burst_at_s, end_s)]
        first = [outcome.first_token_s for outcome in long_outcomes]
        return Burst(case.name, Percentiles.of(quiet), Percentiles.of(during), max(during), first, [])

    def _calls(self, case: Case, rate: float, duration_s: float, seed: int) -> list[Call]:
        lengths = self.scale.lengths
        arrivals = draw(Workload(rate, duration_s, len(case.adapters), self.alpha, self.cv, lengths, lengths, seed))
        salt = sum(map(ord, case.name)) + int(1000 * rate)
        return [
            Call(
                arrival.at_s,
                case.model if arrival.adapter is None else case.adapters[arrival.adapter],
                self._prompt(arrival.num_input, seed, salt, i),
                arrival.num_output,
            )
            for i, arrival in enumerate(arrivals)
        ]

    def _prompt(self, length: int, *seed: int) -> list[int]:
        prompt: list[int] = np.random.default_rng([self.seed, *seed]).integers(*self.scale.token_ids, length).tolist()
        return prompt

    def _run(self, calls: list[Call]) -> Report:
        return run_apart(Job(self.url, calls))

    def _costs(self) -> tuple[dict[str, float], dict[str, float]]:
        return ({}, {}) if self.server is None else (dict(self.server.cpu_s()), self.server.engine_counters())


class Table:
    """Prints rows as they arrive."""

    def __init__(self, slos_s: Sequence[float]) -> None:
        self._slos = [f"{slo:g}" for slo in slos_s]
        self.rows: list[Row] = []
        self.bursts: list[Burst] = []
        slo_heads = "".join(f"{'<' + slo + ' s':>8}" for slo in self._slos)
        print(
            f"{'':24}{'asked':>6}{'req/s':>7}{'tok/s':>7}  {'TTFT ms p50, p90, p99':^21}  {'ITL ms p50, p90, p99':^21}"
            f"{slo_heads}{'failed':>7}{'reads':>6}{'slots':>6}"
        )

    def add(self, row: Row) -> None:
        self.rows.append(row)
        s, counters = row.summary, row.counters
        slos = "".join(f"{100 * s.slo_attainment[slo]:7.1f}%" for slo in self._slos)
        counted = "".join(f"{counters.get(name, 0):6.0f}" for name in COUNTERS[:2])
        print(
            f"{row.case:24}{row.rate:6g}{s.requests_per_s:7.2f}{s.tokens_per_s:7.0f}  {_ms(s.first_token_s)}  "
            f"{_ms(s.inter_token_s)}{slos}{s.failed:7}{counted}",
            flush=True,
        )
        for error in s.errors:
            print(f"  failed: {error}")

    def add_burst(self, burst: Burst) -> None:
        self.bursts.append(burst)
        if burst.errors:
            print(f"long prompts, {burst.case}: failed: {burst.errors}")
            return
        print(
            f"long prompts, {burst.case}: the streams' ITL ms p50, p90, p99 {_ms(burst.quiet)} before, "
            f"{_ms(burst.during)} during, {1e3 * burst.longest_gap_s:.1f} at most; long prompts' TTFT ms "
            f"{_ms(Percentiles.of(burst.first_token_s))}",
            flush=True,
        )

    def costs(self) -> str:
        """Returns the costs in the row with the busiest client, and in the one with the busiest front."""
        client = max(self.rows, key=lambda row: row.client_cores)
        late = max(self.rows, key=lambda row: row.summary.lag_s.p99 if row.summary.lag_s else 0.0)
        lines = [
            f"client: {client.client_cores:.2f} cores at most; send delay, ms p50, p90, p99 {_ms(late.summary.lag_s)}"
        ]
        front = max(self.rows, key=lambda row: row.server_cores.get("EngineReplica", 0.0))
        if front.server_cores:
            shares = ", ".join(f"{name} {cores:.2f}" for name, cores in sorted(front.server_cores.items()))
            lines.append(f"server cores at the front's busiest ({front.case}, {front.rate:g}/s): {shares}")
        return "\n".join(lines)


def _ms(values: Percentiles | None) -> str:
    return f"{'-':^21}" if values is None else "".join(f"{1e3 * value:7.1f}" for value in values)


@contextmanager
def made(folder: Path, scale: Scale, *, on_gpu: bool) -> Iterator[tuple[list[str], Path]]:
    """Yields the server's arguments for the model, and the folder of adapters."""
    adapters = folder / "adapters"
    if on_gpu:
        write_model(folder / "model", CONFIG)
        write_adapters(adapters, CONFIG, scale.adapters, scale.rank)
        yield ["--model", str(folder / "model"), "--load-format", "dummy", "--device", "cuda"], adapters
    else:
        write_adapters(adapters, json.loads((DEMO / "config.json").read_text()), scale.adapters, scale.rank)
        yield ["--model", str(DEMO), "--device", "cpu"], adapters


def serve_and_measure(args: argparse.Namespace, scale: Scale, table: Table, *, on_gpu: bool) -> None:
    names = tuple(f"a{i}" for i in range(scale.adapters))
    few = Case(f"{scale.few_adapters} adapters", "base", names[: scale.few_adapters])
    many = Case(f"{scale.adapters} adapters, {scale.max_loras} slots", "base", names)
    off, on = Case("base, LoRA off", "base", ()), Case("base, LoRA on", "base", ())
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        with made(folder, scale, on_gpu=on_gpu) as (model, adapters):
            lora = ["--lora-resolver-dir", str(adapters), "--max-lora-rank", str(scale.rank)]
            lora += ["--max-loras", str(scale.max_loras), "--max-gpu-loras", str(scale.max_loras)]
            lora += ["--max-cpu-loras", str(scale.max_cpu_loras)]
            for arguments, cases, bursts in ((["--no-enable-lora"], [off], []), (lora, [on, few, many], [on, few])):
                wanted = [case for case in cases if args.only is None or any(word in case.name for word in args.only)]
                if not wanted:
                    continue
                command = [*model, "--served-model-name", "base", *arguments, *shlex.split(args.server_args)]
                with running(command, args.server_log or folder / "serve.log") as server:
                    server.settle()
                    bench = make_bench(args, scale, server.url, server)
                    measure_cases(bench, wanted, [case for case in bursts if case in wanted], table)


def measure_cases(bench: Bench, cases: Sequence[Case], bursts: Sequence[Case], table: Table) -> None:
    for case in cases:
        bench.warm_up(case)
        for rate in bench.scale.rates:
            table.add(bench.measure(case, rate))
    for case in bursts:
        table.add_burst(bench.burst(case))


def running_cases(url: str) -> list[Case]:
    """Returns a case for the base model of a running server, and one for its adapters if it lists any."""
    with urllib.request.urlopen(f"{url}/v1/models") as answer:
        cards: list[dict[str, Any]] = json.load(answer)["data"]
    base = next(card["id"] for card in cards if not card.get("parent"))
    adapters = tuple(card["id"] for card in cards if card.get("parent"))
    cases = [Case(f"base {base}"[:24], base, ())]
    return [*cases, Case(f"{len(adapters)} adapters", base, adapters)] if adapters else cases


def make_bench(args: argparse.Namespace, scale: Scale, url: str, server: LocalServer | None) -> Bench:
    return Bench(url, server, scale, args.alpha, args.cv, args.seed, tuple(args.slo))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", help="measure a running server, with the model names that it lists")
    parser.add_argument("--rates", type=float, nargs="+", help="requests per second")
    parser.add_argument("--duration-s", type=float)
    parser.add_argument(
        "--alpha", type=float, default=0.3, help="exponent of the power law; 1: all adapters are equally popular"
    )
    parser.add_argument(
        "--cv", type=float, default=1.0, help="coefficient of variation of the gaps between requests; 1: Poisson"
    )
    parser.add_argument("--adapters", type=int)
    parser.add_argument("--max-loras", type=int)
    parser.add_argument("--max-cpu-loras", type=int)
    parser.add_argument("--slo", type=float, nargs="+", default=[0.5, 6.0], help="bounds of the TTFT in seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", help="run only the cases whose name has one of these words")
    parser.add_argument("--server-args", default="", help="additional options of `lorafleet serve`, as one string")
    parser.add_argument("--server-log", type=Path, help="file for the output of the last server")
    parser.add_argument("--cpu", action="store_true", help="use the small demo model even if there is a GPU")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    on_gpu = torch.cuda.is_available() and not args.cpu
    given = {name: getattr(args, name) for name in ("rates", "duration_s", "adapters", "max_loras", "max_cpu_loras")}
    scale = dataclasses.replace(H200 if on_gpu else CPU, **{k: v for k, v in given.items() if v is not None})
    where = torch.cuda.get_device_name() if on_gpu else "CPU"
    low, high = scale.lengths
    print(
        f"{args.base_url or where}: prompts and answers of {low} to {high} tokens, cv {args.cv:g}, alpha "
        f"{args.alpha:g}, {scale.duration_s:g} s of arrivals per row, seed {args.seed}"
    )
    table = Table(args.slo)
    if args.base_url:
        cases = running_cases(args.base_url)
        measure_cases(make_bench(args, scale, args.base_url, None), cases, cases, table)
    else:
        serve_and_measure(args, scale, table, on_gpu=on_gpu)
    print(table.costs())
    if args.json:
        result = {"arguments": vars(args), "scale": scale, "device": where, "rows": table.rows, "bursts": table.bursts}
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(result, enc_hook=str), indent=1))


if __name__ == "__main__":
    main()
