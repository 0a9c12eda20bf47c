"""Adds up the lines of usage logs (usage_log.py), which several replicas may still be writing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from lorafleet.api.access.usage import TenantUsage
from lorafleet.cluster.tenancy.line_file import SUFFIX
from lorafleet.protocol.errors import InvalidRequest, StoreError

FIELDS = ("tenant", "key", "key_mark", "adapter", "digest", "ended")


@dataclass(slots=True)
class Sum:
    sequences: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    def add(self, usage: TenantUsage) -> None:
        self.sequences += 1
        self.prompt_tokens += usage.prompt_tokens
        self.cached_tokens += usage.cached_tokens
        self.completion_tokens += usage.completion_tokens


def read_usage(folder: Path) -> Iterator[TenantUsage]:
    """Yields each line of the usage logs. Skips a last line that a machine's crash has cut off. Raises StoreError
    for any other line that cannot be parsed, and InvalidRequest if there are no logs."""
    paths = sorted(folder.glob(f"usage-*{SUFFIX}"))
    if not paths:
        raise InvalidRequest(f"{folder} has no usage logs. Name the folder that the servers use as --usage-dir.")
    decoder = msgspec.json.Decoder(TenantUsage)
    for path in paths:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.endswith(b"\n"):
                    break
                try:
                    yield decoder.decode(line)
                except msgspec.DecodeError as error:
                    raise StoreError(f"{path}, line {number}: {error}. Correct or remove the line.") from None


def summed(
    folder: Path, by: Sequence[str], since_s: float = 0.0, until_s: float = float("inf")
) -> dict[tuple[str, ...], Sum]:
    """Returns the sums by the fields `by`, which are names of FIELDS. Includes what ended from since_s on and before
    until_s, in seconds since 1970. Raises InvalidRequest for an unknown field."""
    for field in by:
        if field not in FIELDS:
            raise InvalidRequest(f"usage has no field {field!r} to sum by; choose from {', '.join(FIELDS)}.", "by")
    sums: dict[tuple[str, ...], Sum] = {}
    for usage in read_usage(folder):
        if since_s <= usage.at_s < until_s:
            sums.setdefault(tuple(getattr(usage, field) for field in by), Sum()).add(usage)
    return dict(sorted(sums.items()))
