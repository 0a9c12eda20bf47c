"""Runs grammar_program.py for the engine: one process for each vocabulary, whatever its grammars do to it."""

# B rows · W words of 32 tokens each

from __future__ import annotations

import contextlib
import mmap
import os
import queue
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import msgspec
import numpy as np

from lorafleet.protocol.framing import receive
from lorafleet.protocol.messages import TokenizerFile
from lorafleet.protocol.structured_spec import StructuredOutputs
from lorafleet.sandbox.outbox import Outbox
from lorafleet.sandbox.process import command_of, start_program
from lorafleet.workers.structured.answer_clock import AnswerClock
from lorafleet.workers.structured.filled_masks import FilledMasks, FollowedDrafts
from lorafleet.workers.structured.grammar_settings import STACK_BYTES, Settings
from lorafleet.workers.structured.mask_filler import MaskRequest

PROGRAM = "lorafleet.workers.structured.grammar_program"
MAX_THREADS = 8
MAX_TRIALS = 3  # grammars that are compiled for the first time, at the same time
MAX_GRAMMARS_WAITING = 128  # grammars of one tenant that may wait to be compiled
MAX_UNSENT_BYTES = 16 << 20  # unread by one process, beyond which it is sent no more grammars
_END_S = 0.5  # how long the process may take to end its own processes


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """Limits of the processes that hold grammars. A trial compiles one grammar and begins an answer."""

    trial_cpu_s: float = 5.0  # Processor time of a trial.
    trial_s: float = 60.0  # Total time of a trial, for machines whose processors are busy.
    trial_memory_bytes: int = 512 << 20  # Memory of a trial.
    memory_bytes: int = 8 << 30  # Memory of all grammars of one process.
    # Masks take milliseconds. Sequences with late masks wait outside of the steps, where the others go on.
    step_wait_s: float = 0.1  # How long one step waits for the masks of all its sequences together.
    mask_s: float = 30.0  # How long a process may take for the masks of one step before it is ended.
    # How long a process that compiles may leave a ping unanswered before it is ended. It reads its vocabulary first.
    ping_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Opened:
    number: int
    fault: str  # What is wrong with the grammar; "" if it may be used.
    is_busy: bool  # The fault is that too many of its group wait.


class ProcessEnded(Exception):
    """Raised because the process has ended and answers nothing more."""


class Unread(Exception):
    """Raised because the process has left too much unread."""


class GrammarProcess:
    """One process that holds grammars.

    The process is available at once, and its vocabulary after a second. Grammars that are opened meanwhile wait for it
    too. Only finish() and join() wait for the process, which may be stopped.

    Args:
        rows: Number of rows of the largest step.
        wake: Called in another thread when opened() or finish() has something new.
        finds_forced: Whether finish() returns forced tokens.
    """

    def __init__(
        self,
        tokenizer: TokenizerFile,
        eos_token_ids: Sequence[int],
        rows: int,
        wake: Callable[[], None],
        limits: GrammarLimits | None = None,
        finds_forced: bool = False,
    ) -> None:
        limits = limits or GrammarLimits()
        self._wake = wake
        self._opened: deque[Opened] = deque()
        self._filled: queue.SimpleQueue[FilledMasks | None] = queue.SimpleQueue()
        self.dead = False
        self.failure = ""  # why it could not begin
        self.clock = AnswerClock(limits.mask_s, limits.ping_s)
        self._compiling: set[int] = set()  # numbers passed to open(), until they are answered or closed
        words = -(-tokenizer.vocab_size // 32)
        memory = os.memfd_create("lorafleet-masks")
        try:
            os.ftruncate(memory, 4 * words * rows)
            self.mask_BW = np.frombuffer(mmap.mmap(memory, 4 * words * rows), np.int32).reshape(rows, words)
            settings = Settings(
                tokenizer=tokenizer.path,
                vocab_size=tokenizer.vocab_size,
                eos_token_ids=list(eos_token_ids),
                rows=rows,
                mask_fd=memory,
                num_threads=min(MAX_THREADS, max(1, len(os.sched_getaffinity(0)) // 2)),
                trial_cpu_s=limits.trial_cpu_s,
                trial_s=limits.trial_s,
                trial_memory_bytes=limits.trial_memory_bytes,
                memory_bytes=limits.memory_bytes,
                max_trials=MAX_TRIALS,
                max_waiting=MAX_GRAMMARS_WAITING,
                finds_forced=finds_forced,
            )
            self.program = start_program(
                command_of(PROGRAM),
                asdict(settings),
                pass_fds=(memory,),
                environment={"OMP_NUM_THREADS": "1", "RUST_MIN_STACK": str(STACK_BYTES)},
            )
        finally:
            os.close(memory)
        self._outbox = Outbox(self.program.socket)
        self._receiver = threading.Thread(target=self._receive, name="grammars", daemon=True)
        self._receiver.start()

    @property
    def is_busy(self) -> bool:
        """Whether finish() has yet to return the answer to the last start(). A process that has ended gives none."""
        return self.clock.awaits_masks and not self.dead

    @property
    def is_overdue(self) -> bool:
        """Whether the process exceeds its limit for masks, or for the answer to a ping."""
        return not self.dead and self.clock.is_overdue

    def ping(self) -> None:
        """Asks the process whether it goes on, if grammars wait to be compiled. Nobody else would notice that it has
        stopped. Call it regularly."""
        if self._compiling and not self.dead and self.clock.start_ping():
            self._send("ping")

    def open(self, number: int, spec: StructuredOutputs, group: str) -> None:
        """Sends a grammar, which is answered in opened(). `group` is the group in whose queue it waits to be compiled.
        Raises Unread."""
        if self._outbox.num_unsent_bytes > MAX_UNSENT_BYTES:
            raise Unread
        self._compiling.add(number)
        self._send("open", number, (spec.kind, spec.source, spec.any_whitespace), group)

    def opened(self) -> list[Opened]:
        """Returns the answers since the last call."""
        return [self._opened.popleft() for _ in range(len(self._opened))]

    def start(self, rows: Sequence[MaskRequest]) -> None:
        """Requests the masks of a step."""
        assert not self.is_busy, "mask_BW belongs to the process until finish() has given its answer"
        self.clock.start_masks()
        self._send("fill", rows)

    def finish(self, wait_s: float) -> FilledMasks | None:
        """Returns what mask_BW has once it has what start() requested. Returns None if it has not after wait_s.

        A process that was late the last time is waited for only a fraction of that time. Raises ProcessEnded.
        """
        try:
            filled = self._filled.get(timeout=self.clock.patience_s(wait_s))
        except queue.Empty:
            if self.dead:
                raise ProcessEnded from None
            self.clock.miss_masks()
            return None
        if filled is None:
            raise ProcessEnded
        self.clock.take_masks()
        return filled

    def close(self, number: int) -> None:
        self._compiling.discard(number)
        self._send("close", [number])

    def end(self) -> None:
        """Ends the process, which first ends those that it has started, so that none is orphaned. A stuck process is
        killed after a while."""
        self.dead = True
        with contextlib.suppress(OSError):  # it may have ended
            self.program.socket.shutdown(socket.SHUT_RDWR)

    def join(self) -> None:
        """Waits until the process has ended."""
        self._receiver.join()

    @property
    def has_ended(self) -> bool:
        return not self._receiver.is_alive()

    def _send(self, *message: object) -> None:
        self._outbox.send(msgspec.msgpack.encode(message))

    def _receive(self) -> None:
        """Handles the process's messages, in a thread, until it ends."""
        with contextlib.suppress(OSError):
            while (message := receive(self.program.socket)) is not None:
                said: Any = msgspec.msgpack.decode(message)
                if said[0] == "alive":
                    self.clock.take_pong()
                    continue
                if said[0] == "opened":
                    opened = Opened(*said[1:])
                    self._compiling.discard(opened.number)
                    self._opened.append(opened)
                elif said[0] == "filled":
                    faults, followed = said[1]
                    self._filled.put(FilledMasks(faults, [FollowedDrafts(*found) for found in followed]))
                else:
                    self.failure = said[1]
                self._wake()
        self.program.stop(_END_S)  # a stuck process does not read the outbox
        self._outbox.close()
        self.program.socket.close()
        self.dead = True
        self._filled.put(None)
        self._wake()
