"""The engine's end of grammar_program.py: one process for each vocabulary, whatever its grammars do to it."""

# B rows · W words of 32 tokens each

from __future__ import annotations

import contextlib
import mmap
import os
import queue
import socket
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import msgspec
import numpy as np

from lorafleet.workers.messages import TokenizerFile
from lorafleet.workers.sandbox.framing import receive, send
from lorafleet.workers.sandbox.process import command_of, start_program
from lorafleet.workers.structured.grammar_program import STACK_BYTES, Settings
from lorafleet.workers.structured.spec import StructuredOutputs

PROGRAM = "lorafleet.workers.structured.grammar_program"
MAX_THREADS = 8
MAX_TRIALS = 3  # grammars that are compiled for the first time, at a time
MAX_GRAMMARS_WAITING = 128  # to be compiled, of one tenant
_END_S = 0.5  # how long the process may take to end its own


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """trial_*: of compiling one grammar and beginning an answer. mask_s: how long a step waits for its masks, which
    take milliseconds: for machines whose processors are all taken."""

    trial_cpu_s: float = 5.0
    trial_memory_bytes: int = 512 << 20
    memory_bytes: int = 8 << 30
    mask_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Opened:
    number: int
    fault: str  # What is wrong with the grammar; "" where it may be used.
    is_busy: bool  # The fault is that too many of its group wait.


class ProcessEnded(Exception):
    """Nothing more can be asked of it."""


class GrammarProcess:
    """rows: of the largest step. wake: called in another thread when opened() has something new.

    The process is there at once, its vocabulary after a second: who opens a grammar meanwhile waits for it too.
    """

    def __init__(
        self,
        tokenizer: TokenizerFile,
        eos_token_ids: Sequence[int],
        rows: int,
        wake: Callable[[], None],
        limits: GrammarLimits | None = None,
    ) -> None:
        self._limits = limits or GrammarLimits()
        self._wake = wake
        self._opened: deque[Opened] = deque()
        self._filled: queue.SimpleQueue[list[tuple[int, str]] | None] = queue.SimpleQueue()
        self.dead = False
        self.failure = ""  # why it could not begin
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
                trial_cpu_s=self._limits.trial_cpu_s,
                trial_memory_bytes=self._limits.trial_memory_bytes,
                memory_bytes=self._limits.memory_bytes,
                max_trials=MAX_TRIALS,
                max_waiting=MAX_GRAMMARS_WAITING,
            )
            self._process, self._socket = start_program(
                command_of(PROGRAM),
                asdict(settings),
                pass_fds=(memory,),
                environment={"OMP_NUM_THREADS": "1", "RUST_MIN_STACK": str(STACK_BYTES)},
            )
        finally:
            os.close(memory)
        self._receiver = threading.Thread(target=self._receive, name="grammars", daemon=True)
        self._receiver.start()

    def open(self, number: int, spec: StructuredOutputs, group: str) -> None:
        """Answered in opened(). group: whose turn it takes where others' grammars are compiled too."""
        self._send("open", number, (spec.kind, spec.source, spec.any_whitespace), group)

    def opened(self) -> list[Opened]:
        """Since the last call."""
        return [self._opened.popleft() for _ in range(len(self._opened))]

    def start(self, rows: Sequence[tuple[int, int, Sequence[int]]]) -> None:
        """(number, row of mask_BW, the tokens answered since the last time) of each sequence of a step."""
        self._send("fill", rows)

    def finish(self) -> list[tuple[int, str]]:
        """Waits until mask_BW has what start() asked for. Gives the sequences that cannot go on, and why.

        Raises ProcessEnded.
        """
        try:
            faults = self._filled.get(timeout=self._limits.mask_s)
        except queue.Empty:
            self.end()
            faults = None
        if faults is None:
            raise ProcessEnded
        return faults

    def close(self, number: int) -> None:
        self._send("close", [number])

    def end(self) -> None:
        """The process ends those that it has started, so that none of them is left to nobody; a stuck one is killed."""
        with contextlib.suppress(OSError):  # it may have ended
            self._socket.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        self._process.kill()
        self._process.wait()
        self._receiver.join()
        self._socket.close()

    def _send(self, *message: object) -> None:
        with contextlib.suppress(OSError):  # it has ended, which the receiver tells
            send(self._socket, msgspec.msgpack.encode(message))

    def _receive(self) -> None:
        """In a thread, until the process ends."""
        with contextlib.suppress(OSError):
            while (message := receive(self._socket)) is not None:
                said: Any = msgspec.msgpack.decode(message)
                if said[0] == "opened":
                    self._opened.append(Opened(*said[1:]))
                    self._wake()
                elif said[0] == "filled":
                    self._filled.put(said[1])
                else:
                    self.failure = said[1]
        with contextlib.suppress(subprocess.TimeoutExpired):  # of one that ends by itself nothing is left either
            self._process.wait(_END_S)
        self.dead = True
        self._filled.put(None)
        self._wake()
