"""Holds the grammars of one vocabulary. It is run as a process of its own by grammar_process.py.

A schema or regex is a program of a stranger. It may compile for minutes, take all memory, or overflow the compiler's
stack, which ends its process. So each is compiled here and not in the engine, and first in a fork with limits on time
and memory. If it survives that, it is compiled once more, beside the masks of others. The forks come from a second
process, which has read the vocabulary and never has threads: a fork inherits the locks that other threads hold, and
would wait for them forever.

In: ["open", number, spec, group] · ["fill", [[number, row, tokens, drafts], …]] · ["close", [number, …]] · ["ping"]

Out:
- ["opened", number, error, whether it may be tried again]
- ["filled", FilledMasks]
- ["alive"], once the process that forks has answered too
- ["failed", why], before it ends because it cannot begin

An error is "" if there is none. A row has a mask's bits, in memory that both processes share.
"""

from __future__ import annotations

import os
import select
import socket
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import msgspec

from lorafleet.protocol.framing import receive
from lorafleet.protocol.lru_cache import LRUCache
from lorafleet.sandbox.confinement import bound_memory
from lorafleet.sandbox.program import settings as given_settings
from lorafleet.workers.structured.grammar_compiler import Spec, grammar_of, matcher_of, read_tokenizer
from lorafleet.workers.structured.grammar_settings import STACK_BYTES, Settings
from lorafleet.workers.structured.grammar_trials import ALIVE, BUSY, DROPPED, LATE, Socket, Trials, send_message
from lorafleet.workers.structured.mask_filler import MaskFiller, first_line

MAX_GRAMMARS = 256  # compiled grammars that are cached, beside those in use
MAX_REFUSED = 1024  # rejected grammars whose errors are cached


def main() -> None:
    settings = Settings(**given_settings())
    threading.stack_size(STACK_BYTES)
    bound_memory(settings.memory_bytes)
    server = socket.socket(fileno=0)
    try:
        tokenizer = read_tokenizer(settings)
    except Exception as error:  # raised by the library for a tokenizer that it cannot read
        send_message(server, "failed", first_line(str(error)))
        return
    tried, trying = socket.socketpair()
    child = os.fork()
    if child == 0:
        server.close()
        tried.close()
        Trials(trying, settings, tokenizer).run()
        os._exit(0)
    trying.close()
    Server(server, tried, settings, tokenizer).run()
    tried.close()
    os.waitpid(child, 0)
    os._exit(0)  # whatever the threads are doing


@dataclass
class Server:
    """Answers the messages of the engine, and compiles the grammars that have passed their trial."""

    socket: Socket
    trials: Socket  # The other end of Trials' socket.
    settings: Settings
    tokenizer: Any
    compiled: LRUCache[Spec, Any] = field(default_factory=lambda: LRUCache(MAX_GRAMMARS))
    refused: LRUCache[Spec, str] = field(default_factory=lambda: LRUCache(MAX_REFUSED))
    waiting: dict[Spec, list[int]] = field(default_factory=dict)  # Numbers that wait until the spec is compiled.
    trying: dict[int, Spec] = field(default_factory=dict)  # By the number that first requested it.
    opening: dict[int, tuple[Spec, str]] = field(default_factory=dict)  # Spec and group, by every number that waits.
    done: deque[tuple[Spec, Any]] = field(default_factory=deque)  # Compiled in a thread.

    def __post_init__(self) -> None:
        given = self.settings
        self.masks = MaskFiller(given.mask_fd, given.rows, given.vocab_size, given.num_threads, given.finds_forced)
        self.wake_receiver, self.wake_sender = os.pipe()

    def run(self) -> None:
        while True:
            found, _, _ = select.select([self.socket.fileno(), self.trials.fileno(), self.wake_receiver], [], [])
            if self.wake_receiver in found:
                os.read(self.wake_receiver, 4096)
                self.take_compiled()
            if self.trials.fileno() in found:
                message = receive(self.trials)
                if message is None:
                    return
                number, error, state = msgspec.msgpack.decode(message)
                self.take_tried(number, error, state)
            if self.socket.fileno() in found:
                message = receive(self.socket)
                if message is None:
                    return
                self.handle(msgspec.msgpack.decode(message))

    def handle(self, message: Any) -> None:
        match message:
            case ["open", number, [kind, source, any_whitespace], group]:
                self.open(number, (kind, source, any_whitespace), group)
            case ["fill", rows]:
                send_message(self.socket, "filled", self.masks.fill(rows))
            case ["ping"]:
                send_message(self.trials)
            case ["close", numbers]:
                for number in numbers:
                    self.close(number)

    def open(self, number: int, spec: Spec, group: str) -> None:
        if (error := self.refused.get(spec)) is not None:
            self.send_opened(number, error)
        elif (compiled := self.compiled.get(spec)) is not None:
            self.begin(number, compiled)
        elif spec in self.waiting:
            self.waiting[spec].append(number)
            self.opening[number] = spec, group
        else:
            self.waiting[spec] = [number]
            self.opening[number] = spec, group
            self.try_first(spec)

    def try_first(self, spec: Spec) -> None:
        """Starts a trial of the grammar. The group of the first number that waits for it is charged for the trial."""
        number = self.waiting[spec][0]
        self.trying[number] = spec
        send_message(self.trials, number, spec, self.opening[number][1])

    def close(self, number: int) -> None:
        self.masks.end(number)
        spec, _ = self.opening.pop(number, (None, ""))
        if spec is not None:
            self.waiting[spec].remove(number)
            if number in self.trying:
                send_message(self.trials, number)  # cancels the trial if it still waits

    def begin(self, number: int, compiled: Any) -> None:
        self.masks.begin(number, compiled)
        self.send_opened(number, "")

    def send_opened(self, number: int, error: str, *, is_busy: bool = False) -> None:
        self.opening.pop(number, None)
        send_message(self.socket, "opened", number, error, is_busy)

    def take_tried(self, number: int, error: str, state: str) -> None:
        if state == ALIVE:
            send_message(self.socket, "alive")
            return
        spec = self.trying.pop(number)
        if state == BUSY and number in self.waiting[spec]:
            self.waiting[spec].remove(number)
            self.send_opened(number, error, is_busy=True)
        if state in (BUSY, DROPPED):
            if self.waiting[spec]:
                self.try_first(spec)
            else:
                del self.waiting[spec]
        elif state == LATE:
            for waiting in self.waiting.pop(spec):
                self.send_opened(waiting, error, is_busy=True)
        elif error:
            self.refuse(spec, error)
        else:
            threading.Thread(target=self.compile, args=(spec,), daemon=True).start()

    def compile(self, spec: Spec) -> None:
        """Compiles a grammar in a thread. The library lets other threads run meanwhile."""
        self.done.append((spec, matcher_of(self.tokenizer, grammar_of(spec))))
        os.write(self.wake_sender, b"\0")

    def take_compiled(self) -> None:
        while self.done:
            spec, compiled = self.done.popleft()
            if compiled.is_error():
                self.refuse(spec, first_line(compiled.get_error()))
                continue
            self.compiled.put(spec, compiled)
            for number in self.waiting.pop(spec):
                self.begin(number, compiled)

    def refuse(self, spec: Spec, error: str) -> None:
        self.refused.put(spec, error)
        for number in self.waiting.pop(spec):
            self.send_opened(number, error)


if __name__ == "__main__":
    main()
