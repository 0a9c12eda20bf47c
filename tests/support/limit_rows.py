"""Declares a row of docs/limits.md, and how its sizes, times and options are written."""

from __future__ import annotations

from typing import NamedTuple

from lorafleet.cluster.config import AppArgs

REFUSED = "400, names the field"
MALFORMED = "400 `adapter_malformed` when the adapter is pushed or loaded"
TOO_LARGE = "400 `adapter_too_large` when the adapter is pushed or loaded"
BUSY = "429 `queue_full`, with Retry-After"
RATE = "429 `rate_limit_exceeded`"
FAILED = "the batch ends as `failed`"
INTERNAL = "no error: older entries are evicted, or work waits"


class Limit(NamedTuple):
    name: str
    bound: object
    changed_by: str  # An empty string means that nobody can change the limit.
    answer: str


def size(num_bytes: int) -> str:
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if num_bytes >= 1 << shift and num_bytes % (1 << shift) == 0:
            return f"{num_bytes >> shift} {unit}"
    return f"{num_bytes:,} bytes"


def chars(count: int) -> str:
    return f"{count:,} characters"


def seconds(count: float) -> str:
    return f"{count:g} s"


def default(option: str) -> object:
    value = AppArgs.model_fields[option].default
    return "none" if value is None else f"{value:,}" if isinstance(value, int) else value


def flag(option: str) -> str:
    assert option in AppArgs.model_fields, option
    return f"`--{option.replace('_', '-')}`"
