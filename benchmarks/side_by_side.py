"""Compares OpenAI-compatible servers under the same load: tokens per second, times to first token, gaps, errors.

    python benchmarks/side_by_side.py lorafleet=http://127.0.0.1:8000 vllm=http://127.0.0.1:8001
        [--streams 1 64 256] [--rates 5 20] [--adapters 0 64] [--earlier FILE ...] [--json FILE]
    python benchmarks/side_by_side.py --serve      (starts `lorafleet serve` on an 8B shape with random weights)

Each load is run on each server in turn. A number of streams is a closed loop: each stream sends its next request when
its last answer is complete. A rate is a Poisson process of so many requests per second. Prompts are random token ids of
/v1/completions, the same for every server, and answers have a fixed length (`ignore_eos`, greedy unless --fields says
otherwise). Before each load, the server answers short requests with as many streams and with every adapter, which are
not measured.

Tokens are counted by the server's usage. An event of a stream may carry several tokens. So gaps are the times between
events, and `tok/event` is the mean number of tokens in one: compare gaps only where it is alike. `ms/token`, the mean
time per token after the first one, can always be compared. The client is a process of its own. If it needs most of a
core (`client`) or sends late (`late ms`, p99), the figures are the client's rather than the server's.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import urllib.request
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmark_results import Case, Results, Value, read_results, write_results
from http_load import NO_BOUND_S, Call, Job, Report, run_apart
from latency import Percentiles, Summary, summarize
from slora_workload import Workload, draw

WARM_UP_TOKENS = 16
WARM_UP_STREAMS = 32
BUSY_CLIENT_CORES = 0.8
RANK = 16
UNITS = {
    "tokens_per_s": "tokens/s",
    "requests_per_s": "requests/s",
    "ttft_p50_ms": "ms",
    "ttft_p99_ms": "ms",
    "gap_p50_ms": "ms",
    "gap_p99_ms": "ms",
    "token_mean_ms": "ms per token after the first one of an answer",
    "tokens_per_event": "tokens",
    "requests": "requests",
    "failed": "requests",
    "client_cores": "processor cores",
    "late_p99_ms": "ms",
}


class Column(NamedTuple):
    figure: str
    head: str
    decimals: int

    def __str__(self) -> str:
        return f"{self.head:>{self.width}}"

    @property
    def width(self) -> int:
        return max(len(self.head), 6) + 2

    def cell(self, case: Case) -> str:
        value = case.figures[self.figure]
        return f"{'-' if value is None else format(value, f'.{self.decimals}f'):>{self.width}}"


COLUMNS = (
    Column("tokens_per_s", "tok/s", 0),
    Column("requests_per_s", "req/s", 2),
    Column("ttft_p50_ms", "TTFT p50", 1),
    Column("ttft_p99_ms", "p99 ms", 1),
    Column("gap_p50_ms", "gap p50", 2),
    Column("gap_p99_ms", "p99 ms", 2),
    Column("token_mean_ms", "ms/token", 2),
    Column("tokens_per_event", "tok/event", 2),
    Column("failed", "failed", 0),
    Column("client_cores", "client", 2),
    Column("late_p99_ms", "late ms", 1),
)
COMPARED = COLUMNS[:7]  # The figures whose ratios are printed.


@dataclass(frozen=True, slots=True)
class Server:
    name: str
    url: str
    base: str  # The name of the base model.
    adapters: tuple[str, ...]  # The names of adapters, of which a load uses the first ones.


@dataclass(frozen=True, slots=True)
class Load:
    adapters: int  # If 0, every request uses the base.
    streams: int = 0  # Closed loop.
    rate: float = 0.0  # Requests per second, if there are no streams.

    @property
    def settings(self) -> dict[str, Value]:
        kind: dict[str, Value] = {"streams": self.streams} if self.streams else {"rate": self.rate}
        return kind | {"adapters": self.adapters}

    def __str__(self) -> str:
        return f"{self.streams} streams" if self.streams else f"{self.rate:g}/s"


class Bench:
    """Sends the same loads to each server."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._fields: dict[str, Any] = json.loads(args.fields)

    def measure(self, server: Server, load: Load) -> Case:
        settings: dict[str, Value] = {"server": server.name, **load.settings}
        settings |= {"prompt": self._args.prompt, "generated": self._args.generated, "fields": self._args.fields}
        report = self._run(server, self._warm_up_calls(server, load), load.streams or WARM_UP_STREAMS)
        errors = {outcome.error for outcome in report.outcomes if outcome.error is not None}
        if not errors:
            report = self._run(server, self._calls(server, load), load.streams, self._args.seconds)
        summary = summarize(report.outcomes, [])
        for error in summary.errors[:3]:
            print(f"  {server.name}, {'warm-up, ' if errors else ''}failed: {error}", file=sys.stderr)
        return Case(settings, _figures(summary, report))

    def _warm_up_calls(self, server: Server, load: Load) -> list[Call]:
        count = max(load.streams or WARM_UP_STREAMS, load.adapters)
        models = server.adapters[: load.adapters] or (server.base,)
        prompts = self._prompts(f"warm-up {load}", count)
        return [Call(0.0, models[i % len(models)], prompts[i], WARM_UP_TOKENS) for i in range(count)]

    def _calls(self, server: Server, load: Load) -> list[Call]:
        arrivals_s = [0.0] * (load.streams * self._args.requests_per_stream)
        if not load.streams:
            arrivals_s = [arrival.at_s for arrival in draw(Workload(load.rate, self._args.seconds, 0))]
        chosen = self._adapters(load, len(arrivals_s))
        models = [server.adapters[i] for i in chosen] if load.adapters else [server.base] * len(arrivals_s)
        prompts = self._prompts(f"{load}, {load.adapters} adapters", len(arrivals_s))
        generated = self._args.generated
        return [Call(*call, generated) for call in zip(arrivals_s, models, prompts, strict=True)]

    def _adapters(self, load: Load, count: int) -> list[int]:
        if not load.adapters or self._args.popularity == "even":
            return [i % max(1, load.adapters) for i in range(count)]
        shares = 1 / np.arange(1, load.adapters + 1)
        random = np.random.default_rng([self._args.seed, load.adapters])
        drawn: list[int] = random.choice(load.adapters, count, p=shares / shares.sum()).tolist()
        return drawn

    def _prompts(self, salt: str, count: int) -> list[list[int]]:
        """Returns other prompts for each load, so that no server finds them in a prefix cache."""
        low, high = self._args.token_ids
        random = np.random.default_rng([self._args.seed, zlib.crc32(salt.encode())])
        prompts: list[list[int]] = random.integers(low, high, (count, self._args.prompt)).tolist()
        return prompts

    def _run(self, server: Server, calls: list[Call], streams: int, seconds: float = NO_BOUND_S) -> Report:
        return run_apart(Job(server.url, calls, streams, seconds, self._fields, self._args.header))


def _figures(summary: Summary, report: Report) -> dict[str, float | None]:
    done = [outcome for outcome in report.outcomes if outcome.error is None]
    num_events = sum(len(outcome.chunks_s) for outcome in done)
    after_first = [(outcome.chunks_s[-1] - outcome.chunks_s[0], outcome.num_tokens - 1) for outcome in done]
    num_after_first = sum(tokens for _, tokens in after_first)
    return {
        "tokens_per_s": summary.tokens_per_s,
        "requests_per_s": summary.requests_per_s,
        "ttft_p50_ms": _ms(summary.first_token_s, 0),
        "ttft_p99_ms": _ms(summary.first_token_s, 2),
        "gap_p50_ms": _ms(summary.inter_token_s, 0),
        "gap_p99_ms": _ms(summary.inter_token_s, 2),
        "token_mean_ms": 1e3 * sum(s for s, _ in after_first) / num_after_first if num_after_first else None,
        "tokens_per_event": sum(outcome.num_tokens for outcome in done) / num_events if num_events else None,
        "requests": summary.requests,
        "failed": summary.failed,
        "client_cores": report.cpu_s / report.wall_s,
        "late_p99_ms": _ms(summary.lag_s, 2),
    }


def _ms(values: Percentiles | None, index: int) -> float | None:
    return None if values is None else 1e3 * values[index]


def find_server(name: str, url: str, base: str | None, pattern: str | None, num_adapters: int) -> Server:
    """Returns the server with the model names that it lists, unless they are given."""
    url = url.rstrip("/").removesuffix("/v1")
    if not url.startswith("http://"):
        sys.exit(f"{name}={url}: the client has no TLS; give an address that begins with http://.")
    cards = []
    if base is None or (pattern is None and num_adapters):
        with urllib.request.urlopen(f"{url}/v1/models") as answer:
            cards = json.load(answer)["data"]
    listed = sorted((card["id"] for card in cards if card.get("parent")), key=lambda name: (len(name), name))
    adapters = listed if pattern is None else [pattern.replace("{}", str(i)) for i in range(num_adapters)]
    if len(adapters) < num_adapters:
        sys.exit(
            f"{name} lists {len(adapters)} adapters at /v1/models, and --adapters asks for {num_adapters}. Load more, "
            f"or name them: --adapter-names {name}=PATTERN, where {{}} is their number."
        )
    return Server(name, url, base or next(card["id"] for card in cards if not card.get("parent")), tuple(adapters))


def label(case: Case) -> str:
    """Returns the load of a case as it is printed."""
    settings = case.settings
    streams = settings.get("streams")
    load = f"{settings['rate']:g}/s" if streams is None else f"{streams} stream{'s' * (streams != 1)}"
    return f"{load}, {settings['adapters'] or 'no'} adapters"


def print_row(case: Case) -> None:
    cells = "".join(column.cell(case) for column in COLUMNS)
    print(f"{case.settings['server']!s:12}{label(case):26}{cells}", flush=True)
    if (case.figures["client_cores"] or 0) > BUSY_CLIENT_CORES:
        print("  the client was busy: these are its figures rather than the server's")


def print_ratios(cases: Sequence[Case]) -> None:
    """Prints the figures of the first server relative to those of each other one under the same load."""
    ours = [case for case in cases if case.settings["server"] == cases[0].settings["server"]]
    for other in cases[1:]:
        for case in ours:
            is_alike = _without_server(case) == _without_server(other) and case.settings != other.settings
            if is_alike and (ratios := _ratios(case, other)):
                print(f"{case.settings['server']} / {other.settings['server']}, {label(case)}: {ratios}")


def _without_server(case: Case) -> dict[str, Value]:
    return {name: value for name, value in case.settings.items() if name != "server"}


def _ratios(case: Case, other: Case) -> str:
    found = []
    for column in COMPARED:
        ours, theirs = case.figures[column.figure], other.figures[column.figure]
        if ours and theirs:
            found.append(f"{column.head} {ours / theirs:.2f}")
    return ", ".join(found)


@contextmanager
def served(args: argparse.Namespace) -> Iterator[Server]:
    """Yields a `lorafleet serve` on an 8B shape, or on the demo model if there is no GPU."""
    import torch

    from engine_e2e import CONFIG
    from local_server import running
    from random_llama import write_alike_adapters, write_model

    demo = Path(__file__).resolve().parents[1] / "demo" / "model"
    on_gpu, count = torch.cuda.is_available(), max(args.adapters)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        config = CONFIG if on_gpu else json.loads((demo / "config.json").read_text())
        command = ["--served-model-name", "base", "--no-enable-prefix-caching", *args.server_args.split()]
        if on_gpu:
            write_model(folder / "model", config)
            command += ["--model", str(folder / "model"), "--load-format", "dummy", "--device", "cuda"]
        else:
            command += ["--model", str(demo), "--device", "cpu"]
        if count:
            write_alike_adapters(folder / "adapters", config, count, RANK)
            command += ["--lora-resolver-dir", str(folder / "adapters"), "--max-lora-rank", str(RANK)]
            command += ["--max-loras", str(count), "--max-cpu-loras", str(2 * count)]
        else:
            command.append("--no-enable-lora")
        with running(command, args.server_log or folder / "serve.log") as server:
            server.settle()
            yield find_server("lorafleet", server.url, "base", "a{}", count)


def pairs(words: Sequence[str]) -> dict[str, str]:
    found = dict(word.split("=", 1) for word in words if "=" in word)
    if len(found) < len(words):
        sys.exit(f"{' '.join(words)}: each must have the form NAME=VALUE, with another NAME.")
    return found


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("servers", nargs="*", metavar="NAME=URL", help="the first one is compared with the others")
    parser.add_argument("--serve", action="store_true", help="start and measure a lorafleet on an 8B shape")
    parser.add_argument("--server-args", default="", help="with --serve: additional options of `lorafleet serve`")
    parser.add_argument("--server-log", type=Path, help="with --serve: file for the server's output")
    parser.add_argument("--base", nargs="+", default=[], metavar="NAME=MODEL", help="default: as the server lists it")
    parser.add_argument(
        "--adapter-names", nargs="+", default=[], metavar="NAME=PATTERN", help="such as a{}; default: as listed"
    )
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 64, 256], help="closed loops")
    parser.add_argument("--rates", type=float, nargs="*", default=[], help="Poisson arrivals, requests per second")
    parser.add_argument("--adapters", type=int, nargs="+", default=[0], help="numbers of adapters; 0: the base")
    parser.add_argument("--popularity", choices=("even", "zipf"), default="even", help="of the adapters")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--generated", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--token-ids", type=int, nargs=2, default=[300, 32000], help="range of the prompts' token ids")
    parser.add_argument("--fields", default="{}", help="JSON object of further fields, such as sampling fields")
    parser.add_argument("--header", nargs="+", default=[], help='such as "Authorization: Bearer KEY"')
    parser.add_argument("--requests-per-stream", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=30.0, help="nothing is sent after this time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--earlier", type=Path, nargs="+", default=[], help="JSON files of servers measured before")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if bool(args.servers) == args.serve:
        parser.error("give servers as NAME=URL, or --serve")
    return args


def measure(args: argparse.Namespace, servers: Sequence[Server]) -> list[Case]:
    bench = Bench(args)
    print(f"{'':38}{''.join(map(str, COLUMNS))}")
    cases = []
    for adapters in args.adapters:
        closed = [Load(adapters, streams=streams) for streams in args.streams]
        for load in [*closed, *(Load(adapters, rate=rate) for rate in args.rates)]:
            for server in servers:
                cases.append(bench.measure(server, load))
                print_row(cases[-1])
    return cases


def main() -> None:
    args = arguments()
    earlier: list[Results] = [read_results(path) for path in args.earlier]
    if args.serve:
        with served(args) as server:
            cases = measure(args, [server])
    else:
        bases, patterns, most = pairs(args.base), pairs(args.adapter_names), max(args.adapters)
        urls = pairs(args.servers)
        servers = [find_server(name, urls[name], bases.get(name), patterns.get(name), most) for name in urls]
        cases = measure(args, servers)
    write_results(args.json, UNITS, cases)
    print_ratios([*cases, *(case for results in earlier for case in results.cases)])
    if any(case.figures["failed"] for case in cases):
        sys.exit("some requests failed")


if __name__ == "__main__":
    main()
