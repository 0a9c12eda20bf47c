"""Tries grammars in forks with limits on time and memory, in a process of grammar_program.py that never has threads."""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from dataclasses import dataclass, field
from typing import Any

import msgspec

from lorafleet.protocol.framing import receive, send
from lorafleet.sandbox.confinement import bound_memory, cpu_limit
from lorafleet.sandbox.job_turns import NoRoom, TurnLimits, TurnQueue
from lorafleet.workers.structured.grammar_compiler import Spec, trial_of
from lorafleet.workers.structured.grammar_settings import Settings
from lorafleet.workers.structured.mask_filler import MAX_ERROR_CHARS

TRIED, DROPPED, BUSY, LATE = "tried", "dropped", "busy", "late"  # the result of a trial
ALIVE = "alive"  # the answer to a ping

Socket = socket.socket


@dataclass
class Trial:
    number: int
    group: str
    pid: int
    pipe: int
    ends_s: float  # monotonic
    is_late: bool = False
    answer: bytes = b""


@dataclass
class Trials:
    """The process that forks. Its messages are:

    - In: [number, spec, group], or [number] to drop one that waits, or [] to ask whether it goes on
    - Out: [number, what is wrong with it, state], with "" for a grammar that compiles
    """

    socket: Socket
    settings: Settings
    tokenizer: Any
    waiting: dict[int, tuple[str, Spec]] = field(default_factory=dict)
    running: dict[int, Trial] = field(default_factory=dict)  # by pipe

    def __post_init__(self) -> None:
        self.turns: TurnQueue[int] = TurnQueue(TurnLimits(self.settings.max_trials, self.settings.max_waiting))

    def run(self) -> None:
        """Runs until the other process closes its socket, or ends."""
        while True:
            found, _, _ = select.select([self.socket.fileno(), *self.running], [], [], self.left_s())
            for ready in found:
                if ready in self.running:
                    self.read(self.running[ready])
                elif (message := receive(self.socket)) is not None:
                    self.handle(*msgspec.msgpack.decode(message))
                else:
                    self.end()
                    return
            self.end_late()
            while (taken := self.turns.take()) is not None:
                self.start(taken[1])

    def left_s(self) -> float | None:
        """Returns the seconds until the first of the running trials is late, or None if none runs."""
        ends_s = min((trial.ends_s for trial in self.running.values() if not trial.is_late), default=None)
        return None if ends_s is None else max(0.0, ends_s - time.monotonic())

    def end_late(self) -> None:
        """Kills the trials that are late. The rest of their pipes is read in the next iteration of the loop."""
        for trial in self.running.values():
            if not trial.is_late and trial.ends_s <= time.monotonic():
                trial.is_late = True
                os.kill(trial.pid, signal.SIGKILL)

    def handle(self, number: int | None = None, spec: list[Any] | None = None, group: str = "") -> None:
        if number is None:
            send_message(self.socket, 0, "", ALIVE)
            return
        if spec is None:
            group, _ = self.waiting.get(number, ("", None))
            if self.turns.remove(group, number):
                del self.waiting[number]
                send_message(self.socket, number, "", DROPPED)
            return
        kind, source, any_whitespace = spec
        try:
            self.turns.put(group, number)
        except NoRoom as full:
            send_message(self.socket, number, str(full), BUSY)
        else:
            self.waiting[number] = group, (kind, source, any_whitespace)

    def start(self, number: int) -> None:
        group, spec = self.waiting.pop(number)
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            try_alone(self.tokenizer, spec, writer, self.settings)
        os.close(writer)
        self.running[reader] = Trial(number, group, pid, reader, time.monotonic() + self.settings.trial_s)

    def read(self, trial: Trial) -> None:
        part = os.read(trial.pipe, 65536)
        trial.answer += part
        if part:
            return
        os.close(trial.pipe)
        del self.running[trial.pipe]
        _, status = os.waitpid(trial.pid, 0)
        self.turns.done(trial.group)
        if trial.is_late:
            send_message(self.socket, trial.number, f"it did not compile within {self.settings.trial_s:g} s", LATE)
            return
        fault = trial.answer.decode() if status == 0 else how_it_ended(status, self.settings)
        send_message(self.socket, trial.number, fault, TRIED)

    def end(self) -> None:
        for trial in self.running.values():
            os.kill(trial.pid, signal.SIGKILL)
            os.waitpid(trial.pid, 0)


def try_alone(tokenizer: Any, spec: Spec, writer: int, settings: Settings) -> None:
    """Tries the grammar in a fork, which ends here."""
    try:
        bound_memory(settings.trial_memory_bytes)
        with cpu_limit(settings.trial_cpu_s):
            os.write(writer, trial_of(tokenizer, spec).encode()[: 4 * MAX_ERROR_CHARS])
    except MemoryError:
        os.write(writer, b"it needs too much memory")
    except Exception as error:
        os.write(writer, f"{type(error).__name__}: {error}".encode()[:MAX_ERROR_CHARS])
    finally:
        os._exit(0)


def how_it_ended(status: int, settings: Settings) -> str:
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF:
        return f"it took more than {settings.trial_cpu_s:g} s of processor time to compile"
    return f"it needs more than {settings.trial_memory_bytes >> 20} MiB of memory, or is nested too deeply, to compile"


def send_message(sock: socket.socket, *message: object) -> None:
    send(sock, msgspec.msgpack.encode(message))
