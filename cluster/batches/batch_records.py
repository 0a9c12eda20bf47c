"""Declares the records of files and batches in the batch store, and makes their ids."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Callable
from typing import Literal

import msgspec

from lorafleet.api.access.caller import Caller
from lorafleet.api.access.gate import Gate

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
Ending = Literal["completed", "failed", "expired", "cancelled"]

_ID = re.compile(r"(?:file-|batch_)[0-9a-f]{32}")
_TIME_DIGITS = 12  # Hexadecimal digits of milliseconds since 1970 with which ids begin, so that they sort by time.


class FileRecord(msgspec.Struct, frozen=True):
    """One file of a tenant: the input of batches, or the output of one."""

    file_id: str
    owner: str  # See owner_of().
    num_bytes: int
    created_s: int  # Seconds since 1970, as are all times here.
    expires_s: int
    filename: str
    purpose: Literal["batch", "batch_output"]


class BatchRecord(msgspec.Struct, frozen=True):
    """One batch as it was created."""

    batch_id: str
    owner: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_s: int
    expires_s: int  # End of the completion window.
    metadata: dict[str, str] | None
    output_lives_s: int  # Seconds for which the output files are stored.
    # Identity of the API key whose tenant and limits the lines have (Caller.key_mark); "" without a key, and in records
    # of former versions, which had the key's public name instead. A batch of such a record ends like one whose key was
    # revoked.
    key_mark: str = ""

    @property
    def caller(self) -> BatchCaller:
        return BatchCaller(self.key_mark, self.owner)


class BatchCaller(msgspec.Struct, frozen=True):
    """Says who sends the lines of a batch."""

    key_mark: str
    owner: str  # See owner_of().


# Returns the caller, or None if the key may no longer send requests, or now belongs to somebody else.
FindCaller = Callable[[BatchCaller], Caller | None]


class BatchFault(msgspec.Struct, frozen=True):
    """A reason why a batch failed, in OpenAI's form."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchUsage(msgspec.Struct, frozen=True):
    """The tokens of all answers of a batch."""

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0

    def plus(self, other: BatchUsage) -> BatchUsage:
        return BatchUsage(
            self.input_tokens + other.input_tokens,
            self.cached_tokens + other.cached_tokens,
            self.output_tokens + other.output_tokens,
            self.reasoning_tokens + other.reasoning_tokens,
        )


class BatchStage(msgspec.Struct, frozen=True):
    """The state of a batch at one time. A time is None if the batch has not been in that status."""

    status: Status = "validating"
    writer: str = ""  # Id of the run that has written this; "" for a front that cancels.
    num_lines: int = 0
    num_completed: int = 0
    num_failed: int = 0
    num_bytes: int = 0  # Of all answers.
    usage: BatchUsage = BatchUsage()
    errors: tuple[BatchFault, ...] = ()
    ending: Ending | None = None  # The status in which the batch will end; no answer follows once it is set.
    in_progress_s: int | None = None
    finalizing_s: int | None = None
    cancelling_s: int | None = None
    ended_s: int | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None

    @property
    def has_ended(self) -> bool:
        return self.ended_s is not None


def owner_of(caller: Caller) -> str:
    """Returns the part of a key in the store that separates the files and batches of tenants (or of keys without a
    tenant)."""
    return hashlib.sha256(caller.owner.encode()).hexdigest()[:32]


def callers_of(gate: Gate) -> FindCaller:
    """Returns what finds the callers of batches' lines among the keys that are valid now."""

    def find(wanted: BatchCaller) -> Caller | None:
        caller = gate.caller_with(wanted.key_mark)
        return caller if caller is not None and owner_of(caller) == wanted.owner else None

    return find


def new_id(prefix: Literal["file-", "batch_"], now_s: float) -> str:
    return f"{prefix}{_time_part(now_s)}{secrets.token_hex(10)}"


def output_id(batch_id: str, kind: Literal["output", "errors"], finalizing_s: float) -> str:
    """Returns the id of a batch's output file. It is the same whichever run writes the file, and how often."""
    digest = hashlib.sha256(f"{batch_id} {kind}".encode()).hexdigest()[:20]
    return f"file-{_time_part(finalizing_s)}{digest}"


def is_id(text: str) -> bool:
    return _ID.fullmatch(text) is not None


def id_time_s(an_id: str) -> float:
    """Returns the seconds since 1970 at which an id was made."""
    return int(an_id.rpartition("-")[2].rpartition("_")[2][:_TIME_DIGITS], 16) / 1000


def _time_part(now_s: float) -> str:
    return f"{int(now_s * 1000):0{_TIME_DIGITS}x}"
