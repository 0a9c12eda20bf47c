"""Runs a batch in which each line of the input is answered exactly once, even over several runs.

The lines are sent as fast as the server takes them. Answers are appended to a journal as they come, and the journal
becomes the output when every line is answered. A run that finds a journal goes on from there.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import BinaryIO

from lorafleet.offline.batch.answering import AnswerRecord, BatchProgress, OnProgress, Pace, answer_lines
from lorafleet.offline.batch.batch_input import BatchLine, read_input, scan_input
from lorafleet.offline.batch.batch_journal import BatchJournal
from lorafleet.offline.batch.batch_places import Output
from lorafleet.offline.batch.line_sender import LineSender
from lorafleet.protocol.errors import ConfigError


class BatchRun:
    """One run of a batch.

    Args:
        errors: The output of the lines that fail; None: they are in `answers` too.
        most_lines: Largest number of lines that are sent or wait to be sent again.
    """

    def __init__(self, file: BinaryIO, answers: Output, errors: Output | None, most_lines: int) -> None:
        self._file = file
        self._answers = answers
        self._errors = errors
        self._most_lines = most_lines
        self._contents = scan_input(file)
        self._stat = _identity(file)

    def was_completed(self) -> bool:
        """Returns whether an earlier run has published the outputs, and removes a journal that it has left.

        Raises ConfigError if there is something else in the output's place.
        """
        if not self._answers.is_published(self._contents.fingerprint):
            return False
        self._remove_journals()  # The earlier run may have ended between its last two operations.
        return True

    def run(self, make_sender: Callable[[], LineSender], on_progress: OnProgress) -> BatchProgress:
        """Answers the lines that are not answered yet, and publishes the outputs. Raises LorafleetError if it cannot go
        on; a later run can."""
        fingerprint = self._contents.fingerprint
        if self._errors is not None and self._errors.is_published(fingerprint):
            self._errors.reopen()
        with ExitStack() as stack:
            journals = [
                stack.enter_context(closing(BatchJournal(output.journal, fingerprint))) for output in self._outputs()
            ]
            if self.was_completed():  # Another run has published it since this one looked.
                raise ConfigError(f"another run has just completed {self._answers.name}.")
            record = AnswerRecord(self._contents, journals)
            if record.left:
                lines, pace = self._left(record), Pace(self._most_lines)
                asyncio.run(answer_lines(make_sender(), lines, record, pace, on_progress))
            self._check_unchanged()
            for output in reversed(self._outputs()):  # The answers are last: their presence says that all is there.
                output.publish(fingerprint)
            self._remove_journals()
        return record.now

    def _left(self, record: AnswerRecord) -> Iterator[BatchLine]:
        left = record.left
        return (line for line in read_input(self._file) if line.number in left)

    def _check_unchanged(self) -> None:
        if _identity(self._file) != self._stat:
            raise ConfigError("the input has changed while it was read. Remove the journal, and run the batch again.")

    def _remove_journals(self) -> None:
        for output in self._outputs():
            output.journal.unlink(missing_ok=True)

    def _outputs(self) -> list[Output]:
        return [self._answers] if self._errors is None else [self._answers, self._errors]


def _identity(file: BinaryIO) -> tuple[int, int]:
    status = os.fstat(file.fileno())
    return status.st_size, status.st_mtime_ns
