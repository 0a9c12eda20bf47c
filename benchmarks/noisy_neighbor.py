"""Measures how much a hostile tenant affects a quiet one.

    python benchmarks/noisy_neighbor.py --json noisy.json
    python benchmarks/noisy_neighbor.py --only logit-bias connections
    python benchmarks/noisy_neighbor.py --list

It measures the quiet tenant's time to first token and the gaps between its tokens: alone, beside each of many attacks,
and beside all of them at once. It starts `lorafleet serve` on the CPU with the demo's model. Attacks (noisy/) come from
a process of lower priority, as real clients would not use the server's processors.

It exits with status 1 if a bound was broken: a first token within 2 s beside each attack and all of them, no replica
lost, no process larger by 300 MiB, and only correct answers.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from noisy import report
from noisy.attacks import ALL, BY_AREA, chosen
from noisy.hostile import Attack, Target, description_of, name_of, run
from noisy.processes import TITLES
from noisy.quiet import QuietTenant
from noisy.report import ALL_AT_ONCE, ALONE, Round
from noisy.watch import Watch, probe, sample_on
from noisy.world import World, serving

AFTER_S = 3.0  # Questions go on for this time after an attack, to see its after-effects.
GRACE_S = 60.0  # The time within which an attacking process must end.
NICENESS = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attack-s", type=float, default=8.0, help="seconds that each attack lasts")
    parser.add_argument(
        "--interval-s", type=float, default=0.25, help="seconds between two questions of the quiet tenant"
    )
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="attacks, or areas of attacks")
    parser.add_argument(
        "--rounds",
        choices=("single", "at-once", "both"),
        default="both",
        help="run attacks one at a time, all at once, or both",
    )
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    parser.add_argument("--list", action="store_true", help="print the attacks and exit")
    args = parser.parse_args()
    if args.list:
        _print_list()
        return
    attacks = chosen(args.only)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65_536), hard))
    groups = [] if args.rounds == "at-once" else [[attack] for attack in attacks]
    groups += [attacks] if args.rounds != "single" and len(attacks) > 1 else []
    with (
        tempfile.TemporaryDirectory(prefix="lorafleet-noisy-", ignore_cleanup_errors=True) as folder,
        serving(Path(folder), args.replicas) as world,
    ):
        rounds = asyncio.run(_rounds(world, groups, args.attack_s, args.interval_s))
    print(f"\n{report.summary(rounds)}")
    if args.json is not None:
        args.json.write_text(json.dumps([result.as_json() for result in rounds], indent=1))
    sys.exit(any(result.broken for result in rounds))


def _print_list() -> None:
    for area, attacks in BY_AREA.items():
        print(f"\n{area}")
        for attack in attacks:
            print(f"  {name_of(attack):34} {description_of(attack)}")
    print(f"\n{len(ALL)} attacks")


async def _rounds(world: World, groups: Sequence[Sequence[Attack]], attack_s: float, interval_s: float) -> list[Round]:
    await world.push_adapters()
    quiet = QuietTenant(world.server.url, world.keys["quiet"], world.questions, interval_s)
    print(report.HEADER, flush=True)
    rounds = []
    async with contextlib.aclosing(quiet):
        await quiet.learn()
        for group in ([], *groups):
            result = await _round(world, quiet, group, attack_s)
            print(report.row(result), flush=True)
            rounds.append(result)
            await world.settle()
    return rounds


async def _round(world: World, quiet: QuietTenant, attacks: Sequence[Attack], attack_s: float) -> Round:
    """Measures the quiet tenant beside these attacks, and for a while after them."""
    watch = Watch(world.server.pid)
    health_s: list[float] = []
    metrics_s: list[float] = []
    refused: list[str] = []
    async with quiet.asking() as answers, world.client("operator") as http, contextlib.AsyncExitStack() as stack:
        for beside in (
            sample_on(watch),
            probe(http, "/health", 0.5, health_s, refused),
            probe(http, "/metrics", 2.0, metrics_s, refused),
        ):
            stack.callback(asyncio.create_task(beside).cancel)
        hostile = await _attacked(world.target(), attacks, attack_s)
        await asyncio.sleep(AFTER_S)
    seen = watch.seen()
    seen.health_s, seen.metrics_s, seen.refused = health_s, metrics_s, refused
    name = ALONE if not attacks else name_of(attacks[0]) if len(attacks) == 1 else ALL_AT_ONCE
    return Round.of(name, answers, seen, hostile)


async def _attacked(target: Target, attacks: Sequence[Attack], seconds: float) -> Counter[str]:
    """Runs the attacks and returns the counts of their answers. In any case, stopped processes are continued."""
    if not attacks:
        await asyncio.sleep(seconds)
        return Counter()
    loop = asyncio.get_running_loop()
    attacker = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
    try:
        work = loop.run_in_executor(attacker, attack, [name_of(chosen) for chosen in attacks], target, seconds)
        seen = await asyncio.wait_for(work, seconds + GRACE_S)
    finally:
        # These calls block, so they run in threads: blocking this event loop would count as the server's time.
        await asyncio.to_thread(_let_go_on, target)
        await asyncio.to_thread(attacker.shutdown)
    return sum(seen.values(), Counter())


def _let_go_on(target: Target) -> None:
    for title in TITLES:
        for pid in target.pids(title):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def attack(names: Sequence[str], target: Target, seconds: float) -> dict[str, Counter[str]]:
    """Runs in the attacking process, at a lower priority than the server.

    Linux first divides processor time among sessions (sched(7), autogroups), and applies priorities within each. So the
    attacker gets its own session, and that session gets the lower priority.
    """
    os.nice(NICENESS)
    os.setsid()
    with contextlib.suppress(OSError):  # This kernel has no autogroups.
        Path("/proc/self/autogroup").write_text(str(NICENESS))
    return asyncio.run(run([ALL[name] for name in names], target, seconds))


if __name__ == "__main__":
    main()
