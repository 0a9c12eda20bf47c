"""Runs one batch, from its validation to its output files, or continues where an earlier run has ended.

It blocks, and runs in a thread of its own: reading files and writing the log must not delay the replica's requests.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import BinaryIO

from msgspec.structs import replace

from lorafleet.cluster.batches import batch_bounds as bounds
from lorafleet.cluster.batches.batch_outputs import write_outputs
from lorafleet.cluster.batches.batch_records import BatchFault, BatchRecord, BatchStage, Ending
from lorafleet.cluster.batches.batch_store import BatchStore
from lorafleet.cluster.batches.log_journal import LogJournal
from lorafleet.offline.batch.answering import AnswerRecord, Pace, answer_lines
from lorafleet.offline.batch.batch_input import BatchContents, BatchLine, read_input, scan_input
from lorafleet.offline.batch.line_sender import LineSender
from lorafleet.protocol.errors import InvalidRequest

logger = logging.getLogger("lorafleet.cluster")


@dataclass(frozen=True, slots=True)
class BatchTiming:
    poll_s: float = 2.0  # Interval between checks whether the batch has been canceled or has expired.
    gather_s: float = 3.0  # Time for which answers are collected before they are written. A kill loses so much work.
    most_unwritten: int = 32  # Answers that are collected at most.
    look_s: float = 3.0  # Interval between renewals of the lease, and looks for new batches.
    again_s: float = 60.0  # Time after which a batch is run again whose run has ended with an error.


BATCH_TIMING = BatchTiming()


class BatchWork:
    """One run of a batch.

    Args:
        may_go_on: Returns whether the API key of the batch is still valid.
        make_sender: Makes a sender that gives up on a line after a number of seconds.
        most_lines: Lines that are sent at a time.
        most_bytes: Returns the bytes that the answers may have; it is called once, when the run begins.
        finishing: Held while output files are written.
    """

    def __init__(
        self,
        store: BatchStore,
        record: BatchRecord,
        may_go_on: Callable[[], bool],
        make_sender: Callable[[float], LineSender],
        most_lines: int,
        most_bytes: Callable[[], int],
        finishing: threading.Lock,
        timing: BatchTiming = BATCH_TIMING,
    ) -> None:
        self.stopped = threading.Event()  # Set to make the run end soon, without an end of the batch.
        self._store = store
        self._record = record
        self._may_go_on = may_go_on
        self._make_sender = make_sender
        self._most_lines = most_lines
        self._most_bytes = most_bytes
        self._finishing = finishing
        self._timing = timing
        self._faults: tuple[BatchFault, ...] = ()
        self._output_bytes = 0  # As of the run's beginning.

    def run(self) -> Ending | None:
        """Returns how the batch has ended, or None if it must be continued by a later run. Raises LorafleetError if
        the store does not answer, or if another run is writing."""
        record, ended = self._record, self._store.ended(self._record.batch_id)
        if ended is not None:  # The run that has ended it was ended itself before it had cleared up.
            self._store.end(record, ended)
            return ended.ending
        journal = LogJournal(self._store.log(record.batch_id), uuid.uuid4().hex)
        if journal.stage.has_ended:
            self._store.end(record, journal.stage)
            return journal.stage.ending
        self._output_bytes = self._most_bytes()
        with tempfile.TemporaryFile() as file:
            ending = self._fetch_input(file)
            contents = None if ending is not None else self._validate(journal, file)
            if contents is None:
                ending = "cancelled" if ending is None and journal.poll() else "failed"
                self._end(journal, ending, None, None)
                return ending
            if journal.stage.ending is None:
                ending = self._answer(journal, file, contents)
                if ending is None:
                    return None
                decided = ending
                journal.change(lambda stage: self._closed(stage, decided))
            ending, finalizing_s = journal.stage.ending, journal.stage.finalizing_s
            assert ending is not None and finalizing_s is not None
            with self._finishing:
                log = self._store.log(record.batch_id)
                ids = write_outputs(self._store.files, record, log, ending, finalizing_s, file, contents.fingerprint)
                self._end(journal, ending, *ids)
            return ending

    # -- validation ---------------------------------------------------------------------------------------------------

    def _fetch_input(self, file: BinaryIO) -> Ending | None:
        """Copies the input to a local file. Returns "failed" if it is not there."""
        found = self._store.files.find(self._record.owner, self._record.input_file_id, or_expired=True)
        if found is None:
            self._faults = (BatchFault("input_file_missing", "The input file was deleted."),)
            return "failed"
        for piece in self._store.files.pieces(found):
            file.write(piece)
        file.flush()
        return None

    def _validate(self, journal: LogJournal, file: BinaryIO) -> BatchContents | None:
        """Returns the contents of the input, or None if the batch ends here: it was canceled, or has faults."""
        if journal.stage.in_progress_s is None and journal.poll():
            return None
        faults: list[BatchFault] = []

        def check(line: BatchLine) -> None:
            if len(faults) < bounds.MAX_ERRORS:
                faults.extend(_faults_of(line, self._record.endpoint))

        try:
            contents = scan_input(file, bounds.MAX_LINES, check)
        except InvalidRequest as error:
            faults.append(BatchFault("invalid_input", error.message))
        if faults:
            self._faults = tuple(faults[: bounds.MAX_ERRORS])
            return None
        if journal.stage.in_progress_s is None:
            journal.change(lambda stage: self._begun(stage, len(contents.numbers)))
        return contents

    # -- answers ------------------------------------------------------------------------------------------------------

    def _answer(self, journal: LogJournal, file: BinaryIO, contents: BatchContents) -> Ending | None:
        """Answers the lines that have no answer. Returns the status in which the batch ends, or None if the run was
        stopped."""
        found: list[Ending | None] = []
        polling = ThreadPoolExecutor(1, thread_name_prefix="batch-end")
        record = AnswerRecord(contents, [journal])

        def has_reason() -> bool:
            reason = self._reason_to_end(journal)
            if reason is not None or self.stopped.is_set():
                found.append(reason)
            return bool(found)

        async def until_reason() -> None:
            while True:
                if await asyncio.get_running_loop().run_in_executor(polling, has_reason):
                    return
                await asyncio.sleep(self._timing.poll_s)

        if record.left and not has_reason():
            left_s = max(1.0, self._record.expires_s - self._store.clock())
            pace = Pace(self._most_lines, self._timing.most_unwritten, self._timing.gather_s)
            lines = _unanswered(file, record.left)
            sending = answer_lines(self._make_sender(left_s), lines, record, pace, lambda _: None, until_reason)
            with polling:  # It has ended when nobody waits for an answer any more.
                asyncio.run(sending)
        is_complete = record.now.num_answered == record.now.num_lines
        return "completed" if is_complete and found != ["cancelled"] else found[0]

    def _reason_to_end(self, journal: LogJournal) -> Ending | None:
        if journal.poll():
            return "cancelled"
        if self._store.clock() >= self._record.expires_s:
            return "expired"
        if not self._may_go_on():
            self._faults = (
                BatchFault(
                    "invalid_api_key",
                    "The API key of the batch was revoked, was given to another tenant, has expired, or has lost the "
                    "scope infer.",
                ),
            )
            return "failed"
        if journal.stage.num_bytes > self._output_bytes:
            message = (
                f"The answers have more than {self._output_bytes} bytes, the most that one batch may write now. Split "
                "the input, or delete files that are not needed."
            )
            self._faults = (BatchFault("output_too_large", message),)
            return "failed"
        return None

    # -- stages -------------------------------------------------------------------------------------------------------

    def _begun(self, stage: BatchStage, num_lines: int) -> BatchStage:
        status = "cancelling" if stage.status == "cancelling" else "in_progress"
        return replace(stage, status=status, num_lines=num_lines, in_progress_s=self._now_s())

    def _closed(self, stage: BatchStage, ending: Ending) -> BatchStage:
        """The stage that says how the batch will end. From then on, no run adds answers."""
        is_canceled = stage.status == "cancelling"
        return replace(
            stage,
            status="cancelling" if is_canceled else "finalizing",
            ending="cancelled" if is_canceled else ending,
            finalizing_s=self._now_s(),
            errors=self._faults,
        )

    def _end(self, journal: LogJournal, ending: Ending, output_file_id: str | None, error_file_id: str | None) -> None:
        """Records how the batch has ended, first in its log, so that of two runs only one ends it."""

        def ended(stage: BatchStage) -> BatchStage:
            return replace(
                stage,
                status=ending,
                ending=ending,
                ended_s=self._now_s(),
                errors=self._faults or stage.errors,
                output_file_id=output_file_id,
                error_file_id=error_file_id,
            )

        journal.change(ended)
        self._store.end(self._record, journal.stage)
        logger.info("batch %s ended as %s", self._record.batch_id, ending)

    def _now_s(self) -> int:
        return int(self._store.clock())


def _unanswered(file: BinaryIO, left: frozenset[int]) -> Iterator[BatchLine]:
    return (line for line in read_input(file) if line.number in left)


def _faults_of(line: BatchLine, endpoint: str) -> Iterator[BatchFault]:
    if line.fault is not None:
        yield BatchFault("invalid_line", line.fault, line.number)
    elif line.url != endpoint:
        message = f"The URL {line.url} is not the endpoint of the batch, {endpoint}."
        yield BatchFault("mismatched_endpoint", message, line.number, "url")
