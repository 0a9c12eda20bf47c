"""Declares the usage record of one sequence, for billing and statistics.

It is written before the end of the answer is sent, so that every answer is metered. cluster/tenancy/usage_log.py
stores the records.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from lorafleet.protocol.messages import FinishReason

MAX_ID_CHARS = 256  # Limit of a request's ID in a line of the usage log.


class TenantUsage(msgspec.Struct, frozen=True, omit_defaults=True):
    """The usage of one sequence. A request has one sequence for each prompt and sample."""

    at_s: float  # Time when it ended, in seconds since 1970.
    request_id: str
    tenant: str = ""  # ID of the tenant, which no other tenant ever has.
    key: str = ""  # ID of the API key, which another key may have later.
    adapter: str = ""  # Full name, or several joined by "+"; "" is the base model.
    digest: str = ""  # Digest of the version or mix that answered; "" if the base model answered.
    prompt_tokens: int = 0  # Counted for the first sample of a prompt only.
    cached_tokens: int = 0  # Those of prompt_tokens that were not computed again.
    completion_tokens: int = 0
    ended: FinishReason = "stop"
    fell_back: bool = False  # The base model answered in place of a failed adapter.
    key_mark: str = ""  # Identity of the API key, which no other key ever has.


class UsageMeter(Protocol):
    def check_room(self) -> None:
        """Raises LogUnwritable while no more usage can be recorded, so that no new sequence starts."""
        ...

    def add(self, usage: TenantUsage) -> None: ...


class NoMeter:
    """The meter of a server that records no usage."""

    def check_room(self) -> None:
        pass

    def add(self, usage: TenantUsage) -> None:
        pass


def short_id(request_id: str) -> str:
    """Shortens a long ID for a line of the log. The end remains, because it differs between requests."""
    return request_id if len(request_id) <= MAX_ID_CHARS else f"{request_id[: MAX_ID_CHARS - 32]}…{request_id[-31:]}"
