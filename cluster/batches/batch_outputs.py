"""Writes the output and the error file of a batch whose answers are all in its log.

The files depend on the log and the input only. So a run that repeats the work of one that ended half-way writes the
same bytes under the same ids.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from typing import IO, BinaryIO, Literal

from lorafleet.cluster.batches.batch_log import BatchLog
from lorafleet.cluster.batches.batch_records import BatchRecord, Ending, FileRecord, output_id
from lorafleet.cluster.batches.file_store import BatchFiles
from lorafleet.cluster.batches.log_journal import answer_lines_of
from lorafleet.offline.batch.batch_answers import LineAnswer, read_answer, write_answer
from lorafleet.offline.batch.batch_input import read_input

# The errors of the lines that were not answered, in OpenAI's words.
_UNANSWERED: dict[Ending, tuple[str, str]] = {
    "expired": ("batch_expired", "This request could not be executed before the completion window expired."),
    "cancelled": ("batch_cancelled", "This request was not executed, since the batch was cancelled."),
    "failed": ("batch_failed", "This request was not executed, since the batch failed; see its `errors`."),
}


def write_outputs(
    files: BatchFiles,
    record: BatchRecord,
    log: BatchLog,
    ending: Ending,
    finalizing_s: int,
    opened: BinaryIO,
    mark: str,
) -> tuple[str | None, str | None]:
    """Writes both files and returns their ids; None for one that would be empty.

    Args:
        opened: The batch's input.
        mark: Its fingerprint.
    """
    with ExitStack() as stack:
        answers, errors = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(2))
        answered: set[int] = set()
        for entry in log.entries():
            for raw in answer_lines_of(entry):
                found = read_answer(raw)
                if found is not None:
                    answered.add(found.number)
                    (errors if found.failed else answers).write(raw)
        for raw in _unanswered(opened, answered, ending, mark):
            errors.write(raw)
        return (
            _publish(files, record, "output", finalizing_s, answers),
            _publish(files, record, "errors", finalizing_s, errors),
        )


def _unanswered(opened: BinaryIO, answered: set[int], ending: Ending, mark: str) -> Iterator[bytes]:
    if ending in _UNANSWERED:
        for line in read_input(opened):
            if line.number not in answered:
                yield write_answer(LineAnswer(line, error=_UNANSWERED[ending]), mark)


def _publish(
    files: BatchFiles, record: BatchRecord, kind: Literal["output", "errors"], finalizing_s: int, content: IO[bytes]
) -> str | None:
    num_bytes = content.tell()
    if not num_bytes:
        return None
    file_id = output_id(record.batch_id, kind, finalizing_s)
    files.add(
        FileRecord(
            file_id,
            record.owner,
            num_bytes,
            finalizing_s,
            finalizing_s + record.output_lives_s,
            f"{record.batch_id}_{kind}.jsonl",
            "batch_output",
        ),
        content,
    )
    return file_id
