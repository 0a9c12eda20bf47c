"""Runs a server at saturation while everything about it changes, and checks answers, metering and growth.

    python benchmarks/soak.py --minutes 30 --adapters 200

It starts `lorafleet serve` on the CPU with two replicas, few slots and API keys of five tenants, and runs the clients
of soak_traffic.py against it. Every answer must be correct, the metered usage must add up, and no resource may grow.
Growth is measured over the second half (soak_drift.py), when everything bounded is full. It exits with status 1 if any
check fails.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
import yaml

from local_server import LocalServer, running
from lorafleet.cluster.tenancy.key_text import digest_of, make_key
from lorafleet.cluster.tenancy.usage_sums import read_usage
from soak_drift import MAX_DRIFT, Drift, Samples
from soak_metering import Metered, compare
from soak_traffic import LIMITED, MAX_SHOWN, OPERATOR, PROBER, TENANTS, TIMEOUT_S, WATCHER, Report, Soak, series
from soak_world import World, make_world
from tiny_llama import write_tiny_llama

NUM_CLIENTS = 48
COUNTERS = (
    *("vllm:num_preemptions", "lorafleet_tenant_sequences"),
    *("lorafleet_engine_generation_tokens", "lorafleet_engine_lora_loads", "lorafleet_engine_lora_activations"),
)
WANTED = (
    *("whole", "stream", "chat", "whole with n=3", "stream with n=3", "adapter", "base", "mix", "stream that was left"),
    *("push", "rollback", "alias", "removal", "404 while it was not there", "429 over a quota"),
    "other tenants' adapters asked for",
)
SAMPLE_S = 10.0
SERVER = [
    *("--served-model-name", "base", "--device", "cpu", "--cpu-threads", "1", "--num-replicas", "2"),
    *("--max-loras", "6", "--max-cpu-loras", "24", "--max-num-seqs", "4", "--kv-cache-tokens", "4096"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--adapters", type=int, default=200)
    parser.add_argument("--nice", type=int, default=5)
    args = parser.parse_args()
    os.nice(args.nice)
    with tempfile.TemporaryDirectory(prefix="lorafleet-soak-") as folder:
        sys.exit(1 if soak(Path(folder), args.minutes, args.adapters) else 0)


def soak(folder: Path, minutes: float, num_adapters: int) -> int:
    """Runs the soak and returns the number of failed checks."""
    os.environ["LORAFLEET_STATE_DIR"] = str(folder / "state")
    write_tiny_llama(folder / "model")
    begin = time.monotonic()
    world = make_world(folder / "model", num_adapters)
    print(f"answers of {num_adapters} adapters known after {time.monotonic() - begin:.0f} s", flush=True)
    keys = _write_keys(folder / "keys.yaml")
    arguments = ["--model", str(folder / "model"), "--api-keys", str(folder / "keys.yaml"), *SERVER]
    arguments += ["--usage-dir", str(folder / "usage"), "--audit-dir", str(folder / "audit")]
    with running(arguments, folder / "serve.log") as server:
        samples = Samples(server.pid)
        report, counters = asyncio.run(_run(server, world, keys, samples, minutes))
        metered = compare(report.usages, read_usage(folder / "usage"))
        return verdict(report, metered, counters, _command_s_sums(folder / "usage"), samples.drifts())


def _write_keys(path: Path) -> dict[str, str]:
    """Writes the file of keys, and returns the keys by tenant, with the operator's."""
    names = (*TENANTS, PROBER, WATCHER, OPERATOR)
    keys = {name: make_key() for name in names}
    entries = [
        {"id": name, "hash": f"sha256:{digest_of(key)}", "scopes": ["infer", "admin", "metrics"]}
        | ({} if name == OPERATOR else {"tenant": name})
        for name, key in keys.items()
    ]
    limits = {LIMITED: {"limits": {"requests_per_minute": 300, "max_concurrent": 12}}}
    path.write_text(yaml.safe_dump({"keys": entries, "tenants": limits}))
    return keys


async def _run(
    server: LocalServer, world: World, keys: dict[str, str], samples: Samples, minutes: float
) -> tuple[Report, dict[str, float]]:
    """Runs all clients, and returns their report and the server's counters at the end."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S, limits=limits) as http:
        soak = Soak(http, world, keys)
        begin = time.monotonic()
        await soak.push_all()
        print(f"{len(world.adapters)} adapters pushed after {time.monotonic() - begin:.0f} s", flush=True)
        work = [soak.client(seed) for seed in range(NUM_CLIENTS)]
        work += [soak.prober(1000), soak.poller()]
        work += [soak.administrator(tenant, 2000 + i) for i, tenant in enumerate((None, *TENANTS))]
        tasks = [asyncio.create_task(work_item) for work_item in work]
        end = time.monotonic() + 60 * minutes
        while time.monotonic() < end:
            done, _ = await asyncio.wait(tasks, timeout=SAMPLE_S, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
            await asyncio.to_thread(samples.take)
            left, asked, faults = end - time.monotonic(), len(soak.report.usages), soak.report.faults
            print(f"{left:6.0f} s left: {asked} requests, faults {dict(faults)}", flush=True)
        soak.ending = True
        await asyncio.gather(*tasks)
        await soak.settle()
        text = (await http.get("/metrics", headers=soak.headers(OPERATOR))).text
    # These counters replace vllm:prompt_tokens, which leaves out adapters that have lost their label.
    tokens = {kind: series(text, "lorafleet_tenant_tokens", f'kind="{kind}"') for kind in ("prompt", "completion")}
    return soak.report, tokens | {name: series(text, name) for name in COUNTERS}


def _command_s_sums(folder: Path) -> dict[str, tuple[int, int]]:
    """Returns the prompt and completion tokens that `lorafleet usage` prints, by tenant with any usage."""
    program = [sys.executable, "-c", "from lorafleet.cluster.cli.cli import main; main()", "usage", str(folder)]
    shown = subprocess.run(program, check=True, capture_output=True, text=True).stdout
    sums = {
        row["tenant"]: (int(row["prompt_tokens"]), int(row["completion_tokens"]))
        for row in csv.DictReader(shown.splitlines())
    }
    return {tenant: tokens for tenant, tokens in sums.items() if any(tokens)}


def verdict(
    report: Report,
    metered: Metered,
    counters: dict[str, float],
    command_s: dict[str, tuple[int, int]],
    drifts: Sequence[Drift],
) -> int:
    """Prints the report and each check; returns the number of failed checks."""
    for what, count in sorted(report.done.items()):
        print(f"{count:8} {what}")
    print(f"{sum(report.waiting) / max(1, len(report.waiting)):8.1f} sequences waited, as the mean over scrapes")
    for name, value in counters.items():
        print(f"{value:8.0f} {name}")
    for line in (*report.shown, *metered.faults[:MAX_SHOWN]):
        print(f"! {line}")
    for drift in drifts:
        sign = " " if drift.is_flat else "!"
        print(f"{sign} {drift.who:24} {drift.what:9} {_shown(drift, drift.start)} -> {_shown(drift, drift.end)} "
              f"{100 * drift.share:+6.2f} %")  # fmt: skip
    prompt = sum(tokens for tokens, _ in metered.by_tenant.values())
    completion = sum(tokens for _, tokens in metered.by_tenant.values())
    surplus = counters["lorafleet_engine_generation_tokens"] - completion
    checks = {
        "every answer was correct, in time and the tenant's own": not report.faults,
        "every kind of request was made": all(report.done[kind] for kind in WANTED),
        "saturated": sum(report.waiting) > 0,
        "each request was metered as its client was told": not metered.faults,
        "`lorafleet usage` adds this up by tenant": command_s == metered.told_by_tenant == metered.by_tenant,
        "the replicas' counters have the same sums": (prompt, completion)
        == (counters["prompt"], counters["completion"]),
        f"the engines generated {surplus:.0f} more tokens, all for the {metered.num_left} clients that left": 0
        <= surplus
        <= metered.unmetered_tokens,
        f"memory, files and threads grew by no more than {100 * MAX_DRIFT:.0f} %": all(
            drift.is_flat for drift in drifts
        ),
    }
    for what, passed in checks.items():
        print(f"{'pass' if passed else 'FAIL'}  {what}")
    return sum(not passed for passed in checks.values())


def _shown(drift: Drift, value: float) -> str:
    return f"{value / 2**20:8.1f} MiB" if drift.what in ("rss", "anonymous") else f"{value:8.1f}    "


if __name__ == "__main__":
    main()
