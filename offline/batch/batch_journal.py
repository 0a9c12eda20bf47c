"""The file to which a batch's answers are appended while it runs, and which becomes the output when it is complete.

Each group of lines is synchronized to the disk before the next one is written. So if the process or the machine ends,
only the last group can be torn. The next run cuts what is torn, and answers those lines again.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from lorafleet.offline.batch.batch_answers import AnsweredLine, id_head, read_answer
from lorafleet.protocol.errors import ConfigError, LorafleetError
from lorafleet.resolvers.durable import sync


class BatchJournal:
    """The journal of one output. It is locked while it is open.

    Args:
        fingerprint: The input's, see BatchContents.

    Raises ConfigError if another run has it open, or if the file is not a journal of this input.
    """

    def __init__(self, path: Path, fingerprint: str) -> None:
        self.path = path
        self.name = str(path)
        self._fingerprint = fingerprint
        self.answered: set[int] = set()  # Numbers of the input's lines.
        self.num_failed = 0
        self._descriptor = _open_locked(path)
        try:
            self._size = self._repair()
        except BaseException:
            self.close()
            raise

    def append(self, lines: Sequence[bytes]) -> None:
        """Writes the lines to the disk. Raises LorafleetError, without a part of them, if that is not possible."""
        content = memoryview(b"".join(lines))
        size = self._size + len(content)
        try:
            while content:
                content = content[os.write(self._descriptor, content) :]
            os.fsync(self._descriptor)
        except OSError as error:
            os.ftruncate(self._descriptor, self._size)
            raise LorafleetError(
                f"{self.path} cannot be written: {error.strerror}. Run the same command again when it can; nothing "
                "that was answered before is lost."
            ) from None
        self._size = size

    def close(self) -> None:
        os.close(self._descriptor)

    def _repair(self) -> int:
        """Reads the answers, and cuts the file behind the last whole one. Returns its size."""
        size = 0
        with self.path.open("rb") as file:
            for raw, answer in journal_lines(file, self.path, self._fingerprint):
                if answer.number in self.answered:
                    raise ConfigError(f"{self.path} answers line {answer.number} of the input twice. Remove the file.")
                self.answered.add(answer.number)
                self.num_failed += answer.failed
                size += len(raw)
        os.ftruncate(self._descriptor, size)
        os.fsync(self._descriptor)
        return size


def journal_lines(file: Iterator[bytes], path: Path, fingerprint: str) -> Iterator[tuple[bytes, AnsweredLine]]:
    """Yields the lines of an output or a journal up to the first torn one. Raises ConfigError if it belongs to
    another input or is something else."""
    head = id_head(fingerprint)
    for index, raw in enumerate(file):
        try:
            answer = read_answer(raw) if raw.endswith(b"\n") else None
            is_torn = not raw.endswith(b"\n")
        except (ValueError, RecursionError):
            answer, is_torn = None, True
        if is_torn and (index > 0 or raw.startswith(head) or head.startswith(raw)):
            return
        if answer is None or answer.fingerprint != fingerprint:
            raise ConfigError(
                f"{path} is not an output of this input: the input has changed, or the file is something else. Remove "
                "it, or choose another output."
            )
        yield raw, answer


def _open_locked(path: Path) -> int:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise ConfigError(f"{path} cannot be opened: {error.strerror}. Choose another output.") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not path.exists() or not os.path.samestat(os.fstat(descriptor), path.stat()):
            raise BlockingIOError  # Another run has renamed it since it was opened.
    except BlockingIOError:
        os.close(descriptor)
        raise ConfigError(f"another run is writing {path}. Wait for its end, or choose another output.") from None
    sync(path.absolute().parent)
    return descriptor
