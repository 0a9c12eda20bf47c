"""Sends the lines of a batch that have no answer yet, and writes the answers to its journals as they come.

run_batch.py does this for the files of `lorafleet run-batch`, and cluster/batches/ for those of a server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from lorafleet.offline.batch.batch_answers import LineAnswer, write_answer
from lorafleet.offline.batch.batch_input import BatchContents, BatchLine
from lorafleet.offline.batch.line_sender import LineSender
from lorafleet.protocol.errors import ConfigError

_THREADS = 2  # One reads lines, and one writes answers.


@dataclass(frozen=True, slots=True)
class BatchProgress:
    """The state of a batch."""

    num_lines: int
    num_answered: int  # Over all runs, with those that failed.
    num_failed: int


OnProgress = Callable[[BatchProgress], None]


@dataclass(frozen=True, slots=True)
class Pace:
    """The bounds on the work of one run."""

    most_lines: int  # Lines that are sent or wait to be sent again.
    most_unwritten: int = 1024  # Answers that wait for the disk.
    gather_s: float = 0.0  # Seconds for which answers are collected before they are written together.
    most_bytes: int = 32 << 20  # Bytes of the lines that are sent or wait; one line of any size is always sent.


class LineJournal(Protocol):
    """The durable record of a batch's answers."""

    @property
    def name(self) -> str:
        """The journal's place, for error messages."""
        ...

    @property
    def answered(self) -> set[int]:
        """The numbers of the lines that were answered when the journal was opened."""
        ...

    @property
    def num_failed(self) -> int:
        """The number of these lines that failed."""
        ...

    def append(self, lines: Sequence[bytes]) -> None:
        """Writes the lines durably, all or none. Raises LorafleetError if that is not possible."""
        ...


class AnswerRecord:
    """The answered lines of a batch, and the journals in which they are.

    Args:
        journals: The journal of the answers, and that of the errors if there is one.
    """

    def __init__(self, contents: BatchContents, journals: Sequence[LineJournal]) -> None:
        self._contents = contents
        self._journals = journals
        done = [number for journal in journals for number in journal.answered]
        if len(done) != len(set(done)) or not contents.numbers.issuperset(done):
            names = " and ".join(journal.name for journal in journals)
            raise ConfigError(f"{names} do not fit the input: a line is answered twice, or is not in it. Remove them.")
        self.left = contents.numbers.difference(done)
        self.now = BatchProgress(len(contents.numbers), len(done), sum(journal.num_failed for journal in journals))

    def record(self, group: list[LineAnswer]) -> None:
        """Writes the answers to the disk."""
        fingerprint = self._contents.fingerprint
        for journal in self._journals:
            takes_all, takes_failed = len(self._journals) == 1, journal is self._journals[-1]
            lines = [write_answer(one, fingerprint) for one in group if takes_all or one.failed == takes_failed]
            if lines:
                journal.append(lines)
        failed = sum(one.failed for one in group)
        now = self.now
        self.now = BatchProgress(now.num_lines, now.num_answered + len(group), now.num_failed + failed)


async def answer_lines(
    sender: LineSender,
    lines: Iterator[BatchLine],
    record: AnswerRecord,
    pace: Pace,
    on_progress: OnProgress,
    until: Callable[[], Coroutine[Any, Any, None]] | None = None,
) -> None:
    """Answers the lines and closes the sender. It ends early, with all answers so far written, when `until` returns.

    Raises LorafleetError if the server no longer answers or a journal cannot be written.
    """
    on_progress(record.now)
    threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="batch-lines")
    run = partial(asyncio.get_running_loop().run_in_executor, threads)
    answered: asyncio.Queue[LineAnswer | None] = asyncio.Queue(pace.most_unwritten)
    places = _Places(pace)

    async def answer(line: BatchLine) -> None:
        try:
            await answered.put(await sender.answer(line))
        finally:
            places.leave(len(line.body))

    async def send_all() -> None:
        async with asyncio.TaskGroup() as tasks:
            while (line := await run(next, lines, None)) is not None:
                await places.take(len(line.body))
                tasks.create_task(answer(line))

    async def send() -> None:
        await (send_all() if until is None else _first_of(send_all(), until()))
        await answered.put(None)

    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(send())
            tasks.create_task(_record_all(answered, partial(run, record.record), record, pace, on_progress))
    except BaseExceptionGroup as group:
        raise _first(group) from None
    finally:
        await sender.close()
        threads.shutdown()  # Nothing may read the lines or write to the journals any more.


class _Places:
    """The places of lines in flight. One task takes them."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._num_lines = self._num_bytes = 0
        self._left = asyncio.Event()

    async def take(self, num_bytes: int) -> None:
        """Waits until there is room for a line."""
        while not self._has_room(num_bytes):
            self._left.clear()
            await self._left.wait()
        self._num_lines += 1
        self._num_bytes += num_bytes

    def leave(self, num_bytes: int) -> None:
        self._num_lines -= 1
        self._num_bytes -= num_bytes
        self._left.set()

    def _has_room(self, num_bytes: int) -> bool:
        if not self._num_lines:
            return True
        return self._num_lines < self._pace.most_lines and self._num_bytes + num_bytes <= self._pace.most_bytes


async def _first_of(*work: Coroutine[Any, Any, None]) -> None:
    """Runs the coroutines until one of them has ended, and then cancels the others."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task


async def _record_all(
    answered: asyncio.Queue[LineAnswer | None],
    write: Callable[[list[LineAnswer]], Awaitable[None]],
    record: AnswerRecord,
    pace: Pace,
    on_progress: OnProgress,
) -> None:
    """Writes the answers until None comes. All that have come meanwhile are written at once."""
    ended = False
    while not ended:
        found = [await answered.get()]
        await _gather(answered, found, pace)
        while not answered.empty():
            found.append(answered.get_nowait())
        ended = found[-1] is None
        group = [one for one in found if one is not None]
        if group:
            await write(group)
            on_progress(record.now)


async def _gather(answered: asyncio.Queue[LineAnswer | None], found: list[LineAnswer | None], pace: Pace) -> None:
    """Collects answers for `gather_s` seconds, but not more than `most_unwritten`."""
    if not pace.gather_s:
        return
    with suppress(TimeoutError):
        async with asyncio.timeout(pace.gather_s):
            while found[-1] is not None and len(found) < pace.most_unwritten:
                found.append(await answered.get())


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Returns the first error of nested groups: the others are consequences."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
