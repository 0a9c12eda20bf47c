"""The engine's end of grammar_program.py: one process for each vocabulary, whatever its grammars do to it."""

# B rows · W words of 32 tokens each

from __future__ import annotations

import contextlib
import json
import mmap
import os
import queue
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from lorafleet.workers.messages import TokenizerFile
from lorafleet.workers.structured.grammar_program import LENGTH, STACK_BYTES, Settings, receive
from lorafleet.workers.structured.spec import StructuredOutputs

PROGRAM = Path(__file__).resolve().with_name("grammar_program.py")
MAX_THREADS = 8


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """trial_*: of compiling one grammar and beginning an answer. mask_s: how long a step waits for its masks, which
    take milliseconds: for machines whose processors are all taken."""

    trial_cpu_s: float = 5.0
    trial_memory_bytes: int = 512 << 20
    memory_bytes: int = 8 << 30
    mask_s: float = 30.0


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
        self._opened: deque[tuple[int, str]] = deque()
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
                max_trials=2,
            )
            self._socket, theirs = socket.socketpair()
            with theirs:
                # -I: nothing of this process's folder, environment or site is imported there.
                self._process = subprocess.Popen(
                    [sys.executable, "-I", str(PROGRAM)],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    pass_fds=(memory,),
                    env={
                        "LORAFLEET_GRAMMARS": json.dumps(asdict(settings)),
                        "LC_ALL": "C.UTF-8",
                        "OMP_NUM_THREADS": "1",
                        "RUST_MIN_STACK": str(STACK_BYTES),
                    },
                    cwd="/",
                )
        finally:
            os.close(memory)
        self._receiver = threading.Thread(target=self._receive, name="grammars", daemon=True)
        self._receiver.start()

    def open(self, number: int, spec: StructuredOutputs) -> None:
        """Answered in opened()."""
        self._send("open", number, (spec.kind, spec.source, spec.any_whitespace))

    def opened(self) -> list[tuple[int, str]]:
        """Since the last call: numbers, each with what is wrong with its grammar, or ""."""
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
        self._process.kill()
        self._process.wait()
        self._receiver.join()
        self._socket.close()

    def _send(self, *message: object) -> None:
        data = msgspec.msgpack.encode(message)
        with contextlib.suppress(OSError):  # it has ended, which the receiver tells
            self._socket.sendall(LENGTH.pack(len(data)) + data)

    def _receive(self) -> None:
        """In a thread, until the process ends."""
        with contextlib.suppress(OSError):
            while (message := receive(self._socket)) is not None:
                said: Any = msgspec.msgpack.decode(message)
                if said[0] == "opened":
                    self._opened.append((said[1], said[2]))
                    self._wake()
                elif said[0] == "filled":
                    self._filled.put(said[1])
                else:
                    self.failure = said[1]
        self.dead = True
        self._filled.put(None)
        self._wake()
