"""What one sequence has used, for whoever bills or counts: written before the end of its answer is sent, so that no
answer goes unmetered. cluster/tenancy/usage_log.py keeps it.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from lorafleet.protocol.messages import FinishReason

MAX_ID_CHARS = 256  # Of a request's id in a line of the usage log.


class Usage(msgspec.Struct, frozen=True, omit_defaults=True):
    """Of one sequence; a request has one for each prompt and sample.

    at_s: when it ended, since 1970. adapter: its full name, or several joined by "+"; "" is the base. digest: of the
    version that answered, or of the mix; "" where the base did, with fell_back in a failed adapter's place. A prompt
    counts with its first sample only; cached_tokens are those of prompt_tokens that were not computed anew.
    """

    at_s: float
    request_id: str
    tenant: str = ""
    key: str = ""
    adapter: str = ""
    digest: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    ended: FinishReason = "stop"
    fell_back: bool = False


class Meter(Protocol):
    def check_room(self) -> None:
        """Raises LogUnwritable while nothing more can be metered, so that nothing more may begin."""
        ...

    def add(self, usage: Usage) -> None: ...


def short_id(request_id: str) -> str:
    """As a line has it, which must be short however long an id the client chose. The end, which differs, is kept."""
    return request_id if len(request_id) <= MAX_ID_CHARS else f"{request_id[: MAX_ID_CHARS - 32]}…{request_id[-31:]}"
