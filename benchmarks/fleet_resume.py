"""Lets benchmarks/fleet.py continue what an earlier call has begun, so that a comparison fits into several short calls.

A rule's rows are one unit: they come from one server, whose caches hold what the rows before left there. So a rule that
lacks a row is measured again as a whole. Rows of other loads, other options of the server or another machine would
compare nothing, and are refused.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from benchmark_results import Case, Hardware, read_results

# The options that decide what is measured. The others only say where, when and how much of it in one call.
SAME = (
    "device",
    "replicas",
    "rules",
    "workloads",
    "rate",
    "duration_s",
    "adapters",
    "max_loras",
    "max_cpu_loras",
    "lora_memory_gib",
    "warm_up_s",
    "seed",
    "server_args",
)


class EarlierRun(Exception):
    """The rows of a file cannot stand beside those of this run."""


def read_earlier(
    path: Path, args: argparse.Namespace, parse: Callable[[Sequence[str]], argparse.Namespace], here: Hardware
) -> list[Case]:
    """Returns the rows of an earlier call, which are none if the file is not there. Raises EarlierRun if they were
    measured with other options, or on other GPUs or versions.

    Args:
        parse: Parses the words of a command line after the script's name.
    """
    if not path.exists():
        return []
    results = read_results(path)
    given = parse([*shlex.split(results.command)[2:], "--json", str(path)])
    for name in SAME:
        earlier, now = getattr(given, name), getattr(args, name)
        if earlier != now:
            raise EarlierRun(
                f"{path} was measured with {name}={earlier}, and this run has {now}. Give another --json file."
            )
    for name in ("gpus", "versions"):
        earlier, now = getattr(results.hardware, name), getattr(here, name)
        if earlier != now:
            raise EarlierRun(f"{path} was measured with {name} {earlier}, and this machine has {now}.")
    return list(results.cases)


def split(cases: Sequence[Case], rules: Sequence[str], wanted: Callable[[str], Collection[str]]) -> list[Case]:
    """Returns the rows of rules that have all of theirs, and prints which rules are measured again.

    Args:
        wanted: Returns the keys, as of key(), of all rows that a rule should have.
    """
    kept = []
    for rule in rules:
        rows = [case for case in cases if case.settings["rule"] == rule]
        if {key(case) for case in rows} >= set(wanted(rule)):
            kept += rows
        elif rows:
            print(f"{rule} has {len(rows)} of {len(wanted(rule))} rows, and is measured again", file=sys.stderr)
    return kept


def key(case: Case) -> str:
    settings = case.settings
    return row_key(str(settings["workload"]), int(settings["replicas"]), float(settings["rate"]))


def row_key(workload: str, replicas: int, rate: float) -> str:
    return f"{workload}, {replicas}, {rate:g}"
