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

import json
import os
import random
import select
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import llguidance
import msgspec
import numpy as np
import tokenizers

from lorafleet.protocol.framing import receive, send
from lorafleet.protocol.lru_cache import LRUCache
from lorafleet.sandbox.confinement import bound_memory, cpu_limit
from lorafleet.sandbox.job_turns import NoRoom, TurnLimits, TurnQueue
from lorafleet.sandbox.program import settings as given_settings
from lorafleet.workers.structured.mask_filler import DEAD_END, MAX_ERROR_CHARS, MaskFiller, first_line

# for the threads that compile and fill; deeper than the main thread's stack, on which trials run
STACK_BYTES = 64 << 20
MAX_GRAMMARS = 256  # compiled grammars that are cached, beside those in use
MAX_REFUSED = 1024  # rejected grammars whose errors are cached
MAX_BLAMED = 500  # parts of a schema that are tried alone, to find which of them is at fault
PROBED_TOKENS = 24  # tokens of a random answer that a trial writes, since some grammars are cheap only to compile
# The number is limited, since an answer of nothing but blanks matches too, and small models get lost in it.
WHITESPACE = r"[ \n\r\t]{1,64}"
LIMITS = llguidance.LLParserLimits(max_lexer_states=50_000, verbose_errors=False)

Socket = socket.socket
Spec = tuple[str, str, bool]  # kind, source, any_whitespace, as in protocol/structured_spec.py


@dataclass
class Settings:
    tokenizer: str  # path of the file that api/text/tokenizer_files.py wrote
    vocab_size: int  # the tokenizer's; the model's may be padded beyond it
    eos_token_ids: list[int]
    rows: int
    mask_fd: int
    num_threads: int
    trial_cpu_s: float
    trial_s: float
    trial_memory_bytes: int
    memory_bytes: int  # for all grammars
    max_trials: int  # trials at a time
    max_waiting: int  # grammars of one group that may wait for a trial
    finds_forced: bool  # whether forced tokens are told with the masks


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


def read_tokenizer(settings: Settings) -> Any:
    with open(settings.tokenizer, "rb") as file:
        written = msgspec.msgpack.decode(file.read())
    tokens: list[bytes] = written["tokens"]
    assert len(tokens) == settings.vocab_size
    spelling = Spelling(tokens, written["special"], settings.eos_token_ids[0], written["json"])
    # Spelling is like the library's wrapper of tokenizers, but not of its class.
    spelling.library = llguidance.LLTokenizer(spelling, eos_token=settings.eos_token_ids)  # type: ignore[arg-type]
    return spelling.library


class Spelling:
    """A vocabulary in the form that the library wants. The library's own reader of tokenizers takes each added token
    in angle brackets for a special one, which no text can spell."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: list[bytes], special: list[int], eos_token_id: int, text: str) -> None:
        self.tokens = tokens
        self.special_token_ids = special
        self.eos_token_id = eos_token_id
        self.library: Any = None
        self._backend = tokenizers.Tokenizer.from_str(text) if text else None
        if self._backend is not None:
            self._backend.encode_special_tokens = True  # encode them as the text that they look like

    def __call__(self, text: str) -> list[int]:
        """Returns the tokens that the model itself would write for the text, where a grammar allows nothing else.

        If its tokenizer could take forever, or adds blanks of its own, the longest tokens are taken first.
        """
        if self._backend is not None:
            ids = list(self._backend.encode(text, add_special_tokens=False).ids)
            if self.library is None or b"".join(self.tokens[i] for i in ids) == text.encode():
                return ids
        return [] if self.library is None else list(self.library.greedy_tokenize(text))


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


TRIED, DROPPED, BUSY, LATE = "tried", "dropped", "busy", "late"  # the result of a trial
ALIVE = "alive"  # the answer to a ping


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


def trial_of(tokenizer: Any, spec: Spec) -> str:
    """Returns what is wrong with the grammar, or "" if it compiles and a random answer can be begun."""
    try:
        text = grammar_of(spec)
    except (ValueError, RecursionError) as error:
        return first_line(str(error))
    matcher = matcher_of(tokenizer, text)
    if matcher.is_error():
        fault = first_line(matcher.get_error())
        if spec[0] == "tagged":
            return blamed_part(tokenizer, spec, fault)
        return blamed(tokenizer, spec, fault) if spec[0] == "json_schema" else fault
    return probe(matcher)


def probe(matcher: Any) -> str:
    draw = random.Random(0)
    for _ in range(PROBED_TOKENS):
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        if matcher.is_error():
            return first_line(matcher.get_error())
        allowed = np.flatnonzero(bits)
        if not len(allowed):
            return DEAD_END
        if not matcher.consume_token(int(draw.choice(allowed))):
            return first_line(matcher.get_error())
        if matcher.is_stopped():
            return ""
    return ""


def grammar_of(spec: Spec) -> str:
    """Returns the grammar in the library's own format. Raises ValueError."""
    kind, source, any_whitespace = spec
    if kind in ("json_schema", "json_object"):
        schema = json.loads(source) if kind == "json_schema" else {"type": "object"}
        return str(llguidance.LLMatcher.grammar_from_json_schema(with_options(schema, any_whitespace)))
    if kind == "tagged":
        lark, parts = json.loads(source)
        rules = [f"{rule}: %json {json.dumps(with_options(schema, blanks))}" for rule, schema, _, blanks in parts]
        return str(llguidance.LLMatcher.grammar_from_lark("\n".join([lark, *rules])))
    if kind == "choice":
        # The library's own Lark writes strings as JSON does.
        return str(llguidance.LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, json.loads(source)))))
    if kind == "regex":
        return str(llguidance.LLMatcher.grammar_from_regex(source))
    assert kind == "grammar"
    return str(llguidance.grammar_from("grammar", source))


def with_options(schema: Any, any_whitespace: bool) -> dict[str, Any]:
    """Returns the schema with the options for its compilation, which the library reads from a member of the schema
    itself. Raises ValueError."""
    if schema is False:
        raise ValueError("the schema `false` allows no answer")
    options: dict[str, Any] = {"lenient": False, "coerce_one_of": False}  # otherwise keywords would be ignored
    options |= {"whitespace_pattern": WHITESPACE} if any_whitespace else {"whitespace_flexible": False}
    return {**({} if schema is True else schema), "x-guidance": options}


def matcher_of(tokenizer: Any, grammar: str) -> Any:
    return llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)


def blamed(tokenizer: Any, spec: Spec, error: str) -> str:
    """Returns the error with the innermost part of the schema that has it by itself."""
    schema = json.loads(spec[1])
    shared = {name: schema[name] for name in ("$schema", "$defs", "definitions") if name in schema}
    for count, (path, part) in enumerate(parts_of(schema, "")):
        if count == MAX_BLAMED:
            break
        text = json.dumps({**shared, **part})
        matcher = matcher_of(tokenizer, llguidance.LLMatcher.grammar_from_json_schema(text))
        if path and matcher.is_error() and first_line(matcher.get_error()) == error:
            return f"at {path}: {error}"
    return error


def blamed_part(tokenizer: Any, spec: Spec, error: str) -> str:
    """Returns the error of the first of the spec's schemas that has one by itself."""
    for _, schema, where, any_whitespace in json.loads(spec[1])[1]:
        alone = ("json_schema", json.dumps(schema), any_whitespace)
        matcher = matcher_of(tokenizer, grammar_of(alone))
        if matcher.is_error():
            return f"in {where}: {blamed(tokenizer, alone, first_line(matcher.get_error()))}"
    return error


def parts_of(schema: object, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the schemas within this one, the innermost first, with their paths as JSON pointers."""
    if not isinstance(schema, dict):
        return
    for key, value in schema.items():
        if key in ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"):
            inner = value.items() if isinstance(value, dict) else ()
            for name, part in inner:
                yield from parts_of(part, f"{path}/{key}/{name}")
        elif isinstance(value, list) and key in ("anyOf", "oneOf", "allOf", "prefixItems"):
            for i, part in enumerate(value):
                yield from parts_of(part, f"{path}/{key}/{i}")
        elif key in ("items", "additionalProperties", "additionalItems", "not", "if", "then", "else", "contains"):
            yield from parts_of(value, f"{path}/{key}")
    yield path, schema


def send_message(sock: socket.socket, *message: object) -> None:
    send(sock, msgspec.msgpack.encode(message))


if __name__ == "__main__":
    main()
