"""The journal of a batch's answers (offline/batch/answering.py) in the batch's log."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from lorafleet.cluster.batches.batch_log import BatchLog, LogEntry
from lorafleet.cluster.batches.batch_records import BatchStage, BatchUsage
from lorafleet.offline.batch.batch_answers import read_answer
from lorafleet.protocol.errors import LorafleetError, StoreError

WRITE_AGAIN_S = 2.0
MAX_WRITES = 30  # Attempts to write one entry while the store does not answer.


class TurnLost(LorafleetError):
    """Another run has written to the log of the batch."""


class LogJournal:
    """The journal of one batch, for one run of it. Threads may share it.

    Args:
        writer: Unique id of the run.
    """

    def __init__(self, log: BatchLog, writer: str, sleep: Callable[[float], None] = time.sleep) -> None:
        self.name = "the log of the batch"
        self.answered: set[int] = set()
        self.stage = BatchStage(writer=writer)
        self._log = log
        self._writer = writer
        self._sleep = sleep
        self._number = 0  # Of the last entry that is known.
        self._lock = threading.Lock()
        for entry in log.entries():
            self._number, self.stage = entry.number, entry.stage
            self.answered.update(found.number for raw in answer_lines_of(entry) if (found := read_answer(raw)))

    @property
    def num_failed(self) -> int:
        return self.stage.num_failed

    def append(self, lines: Sequence[bytes]) -> None:
        """Writes answers to the log. Raises TurnLost, or StoreError if the store does not answer for a minute."""
        failed, usage = 0, BatchUsage()
        for raw in lines:
            found = read_answer(raw)
            failed += found is None or found.failed
            usage = usage.plus(usage_of(raw))
        content = b"".join(lines)

        def count(stage: BatchStage) -> BatchStage:
            return msgspec.structs.replace(
                stage,
                num_completed=stage.num_completed + len(lines) - failed,
                num_failed=stage.num_failed + failed,
                num_bytes=stage.num_bytes + len(content),
                usage=stage.usage.plus(usage),
            )

        self.change(count, content)

    def change(self, change: Callable[[BatchStage], BatchStage], answers: bytes = b"") -> None:
        """Writes a new stage. `change` makes it of the present one, which may just have become "cancelling". Raises as
        append() does."""
        with self._lock:
            while True:
                stage = msgspec.structs.replace(change(self.stage), writer=self._writer)
                entry = LogEntry(self._number + 1, stage, answers)
                if self._append(entry):
                    self._number, self.stage = entry.number, stage
                    return
                other = self._log.read(entry.number)
                if other is None:
                    raise TurnLost("The log of the batch was deleted, since another run has ended the batch.")
                self._adopt(other)

    def poll(self) -> bool:
        """Reads whether a front has asked to cancel the batch. Raises TurnLost or StoreError."""
        with self._lock:
            entry = self._log.read(self._number + 1)
            if entry is not None:
                self._adopt(entry)
            return self.stage.status == "cancelling"

    def _append(self, entry: LogEntry) -> bool:
        for attempt in range(1, MAX_WRITES + 1):
            try:
                return self._log.append(entry)
            except StoreError:
                if attempt == MAX_WRITES:
                    raise
            self._sleep(WRITE_AGAIN_S)
        raise AssertionError("the last attempt returns or raises")

    def _adopt(self, entry: LogEntry) -> None:
        """Accepts a cancellation, which a front has written. Any other entry is of another run."""
        if entry.stage.writer or entry.stage.status != "cancelling":
            raise TurnLost(f"Another run has written entry {entry.number} of the batch's log.")
        self._number, self.stage = entry.number, entry.stage


def answer_lines_of(entry: LogEntry) -> list[bytes]:
    return [raw + b"\n" for raw in entry.answers.split(b"\n") if raw]


class _Details(msgspec.Struct):
    cached_tokens: int = 0
    reasoning_tokens: int = 0


class _Usage(msgspec.Struct):
    """The usage of any endpoint's answer: /v1/responses has other names than the others."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    prompt_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None
    output_tokens_details: _Details | None = None


class _Body(msgspec.Struct):
    usage: _Usage | None = None


class _Response(msgspec.Struct):
    body: _Body


class _Line(msgspec.Struct):
    response: _Response | None = None


_line = msgspec.json.Decoder(_Line)


def usage_of(raw: bytes) -> BatchUsage:
    """Returns the tokens of one answer, or none if it says nothing about them."""
    try:
        line = _line.decode(raw)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return BatchUsage()
    usage = None if line.response is None else line.response.body.usage
    if usage is None:
        return BatchUsage()
    of_input = usage.prompt_tokens_details or usage.input_tokens_details or _Details()
    of_output = usage.completion_tokens_details or usage.output_tokens_details or _Details()
    return BatchUsage(
        usage.prompt_tokens + usage.input_tokens,
        of_input.cached_tokens,
        usage.completion_tokens + usage.output_tokens,
        of_output.reasoning_tokens,
    )
