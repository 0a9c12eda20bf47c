"""Which tokens may come next in the answers that have a grammar: asked for when a step is launched, and there when its
tokens are to be chosen. Knows nothing of devices; grammar_process.py does the work beside the engine's own.
"""

# N rows with a grammar · W words of 32 tokens each

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from lorafleet.workers.errors import InvalidRequest, LorafleetError, Overloaded, QueueFull
from lorafleet.workers.messages import TokenizerFile
from lorafleet.workers.sequence import UNKNOWN, Sequence
from lorafleet.workers.structured.grammar_process import GrammarLimits, GrammarProcess, Opened, ProcessEnded

MAX_VOCABULARIES = 4  # processes at a time, each of some 200 MB with a vocabulary of 128 thousand tokens

Bits = np.ndarray[tuple[int, int], np.dtype[np.int32]]
Fault = tuple[Sequence, LorafleetError]


@dataclass(slots=True, eq=False)
class Grammar:
    """One answer's. num_sent: how many of its tokens the process has."""

    process: GrammarProcess
    number: int
    num_sent: int = 0


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """rows: of the step's samples. Bit i of word w of bits_NW: whether token 32 w + i may come; none beyond may. They
    are overwritten after the next start()."""

    rows: list[int]
    bits_NW: Bits


@dataclass(frozen=True, slots=True)
class _Asked:
    process: GrammarProcess
    rows: list[int] = field(default_factory=list)
    sequences: list[Sequence] = field(default_factory=list)
    tokens: list[tuple[int, int, list[int]]] = field(default_factory=list)  # as GrammarProcess.start takes them


class StructuredDecoding:
    """most_rows: of a step. wake: called from other threads when poll() has something."""

    def __init__(self, most_rows: int, wake: Callable[[], None], limits: GrammarLimits | None = None) -> None:
        self._most_rows = most_rows
        self._wake = wake
        self._limits = limits
        self._processes: OrderedDict[tuple[str, tuple[int, ...]], GrammarProcess] = OrderedDict()
        self._users: dict[GrammarProcess, int] = {}
        self._opening: dict[int, Sequence] = {}
        self._asked: list[_Asked] = []
        self._numbers = count()

    def open(
        self, sequence: Sequence, tokenizer: TokenizerFile, eos_token_ids: Many[int], turn_group: str = ""
    ) -> None:
        """It may start once poll() has given it. Raises LorafleetError."""
        spec = sequence.params.structured_outputs
        assert spec is not None
        if not eos_token_ids:
            raise InvalidRequest("this model has no token that ends an answer, which structured output needs.")
        process = self._process(tokenizer, tuple(sorted(eos_token_ids)))
        if process.failure:
            raise _ended(process)
        sequence.grammar = Grammar(process, next(self._numbers))
        self._opening[sequence.grammar.number] = sequence
        self._users[process] += 1
        process.open(sequence.grammar.number, spec, turn_group)

    def poll(self) -> list[tuple[Sequence, LorafleetError | None]]:
        """Sequences that may start now, or never."""
        found: list[tuple[Sequence, LorafleetError | None]] = []
        for process in self._processes.values():
            # Asked first: what a process says before it ends is heard before.
            dead = process.dead
            for opened in process.opened():
                sequence = self._opening.pop(opened.number, None)
                if sequence is not None:
                    found.append((sequence, _fault_of(sequence, opened)))
            if dead:
                for sequence in [s for s in self._opening.values() if s.grammar and s.grammar.process is process]:
                    assert sequence.grammar is not None
                    del self._opening[sequence.grammar.number]
                    found.append((sequence, _ended(process)))
        return found

    def leave(self, sequence: Sequence) -> None:
        """Its answer has ended, or been given up."""
        grammar, sequence.grammar = sequence.grammar, None
        if grammar is not None:
            self._opening.pop(grammar.number, None)
            self._users[grammar.process] -= 1
            grammar.process.close(grammar.number)

    def start(self, sampling: Many[Sequence]) -> None:
        """Begins to find the next tokens of those of a step's sequences, in the order of its rows, that have a grammar.
        All their tokens are known but for those of that step."""
        by_process: dict[GrammarProcess, _Asked] = {}
        for row, sequence in enumerate(sampling):
            grammar = sequence.grammar
            if grammar is None:
                continue
            asked = by_process.setdefault(grammar.process, _Asked(grammar.process))
            new = sequence.tokens[sequence.num_prompt + grammar.num_sent :]
            if new and new[-1] == UNKNOWN:
                new.pop()
            assert UNKNOWN not in new
            grammar.num_sent += len(new)
            asked.tokens.append((grammar.number, len(asked.rows), new))
            asked.rows.append(row)
            asked.sequences.append(sequence)
        self._asked = list(by_process.values())
        for asked in self._asked:
            asked.process.start(asked.tokens)

    def finish(self) -> tuple[TokenMasks | None, list[Fault]]:
        """Of the last start(): None where no row has a mask. Waits for it; the sequences with a fault cannot go on."""
        rows: list[int] = []
        parts: list[Bits] = []
        faults: list[Fault] = []
        for asked in self._asked:
            try:
                wrong = dict(asked.process.finish())
            except ProcessEnded:
                faults += [(sequence, _ended(asked.process)) for sequence in asked.sequences]
                continue
            for (number, _, _), sequence in zip(asked.tokens, asked.sequences, strict=True):
                if number in wrong:
                    faults.append((sequence, _refusal(sequence, wrong[number])))
            rows += asked.rows
            parts.append(asked.process.mask_BW[: len(asked.rows)])
        self._asked = []
        return TokenMasks(rows, _stacked(parts)) if parts else None, faults

    def close(self) -> None:
        for process in self._processes.values():
            process.end()
        self._processes.clear()

    def _process(self, tokenizer: TokenizerFile, eos_token_ids: tuple[int, ...]) -> GrammarProcess:
        key = tokenizer.digest, eos_token_ids
        process = self._processes.get(key)
        if process is not None and (not process.dead or process.failure):
            self._processes.move_to_end(key)
            return process
        if process is not None:
            self._forget(key)
        elif len(self._processes) >= MAX_VOCABULARIES:
            idle = next((k for k, p in self._processes.items() if not self._users[p]), None)
            if idle is None:
                raise Overloaded(
                    f"structured output runs with {MAX_VOCABULARIES} tokenizers at once, and all are in use; try "
                    "again when their requests are answered."
                )
            self._forget(idle)
        made = self._processes[key] = GrammarProcess(
            tokenizer, eos_token_ids, self._most_rows, self._wake, self._limits
        )
        self._users[made] = 0
        return made

    def _forget(self, key: tuple[str, tuple[int, ...]]) -> None:
        process = self._processes.pop(key)
        process.end()
        if not self._users[process]:
            del self._users[process]


def _stacked(parts: list[Bits]) -> Bits:
    """Narrower vocabularies end before."""
    if len(parts) == 1:
        return parts[0]
    width = max(part.shape[1] for part in parts)
    bits_NW: Bits = np.zeros((sum(map(len, parts)), width), np.int32)
    at = 0
    for part in parts:
        bits_NW[at : at + len(part), : part.shape[1]] = part
        at += len(part)
    return bits_NW


def _fault_of(sequence: Sequence, opened: Opened) -> LorafleetError | None:
    if opened.is_busy:
        return QueueFull(f"Structured output cannot be prepared now: {opened.fault}. Try again later.")
    return _refusal(sequence, opened.fault) if opened.fault else None


def _refusal(sequence: Sequence, fault: str) -> InvalidRequest:
    spec = sequence.params.structured_outputs
    assert spec is not None
    return InvalidRequest(f"`{spec.param}` cannot be kept to: {fault}. Change or remove that part.", spec.param)


def _ended(process: GrammarProcess) -> LorafleetError:
    if process.failure:
        return InvalidRequest(f"structured output does not know this model's tokenizer: {process.failure}.")
    return Overloaded("The process that holds the grammars has ended and is started anew; try again.")
