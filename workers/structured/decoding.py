"""Finds the tokens that may come next in answers that have a grammar. Masks are requested when a step is launched, and
are needed when its tokens are chosen. This file knows nothing of devices; the processes of grammar_process.py work
beside the engine.

No step waits for a process that is slow or stopped. A sequence whose mask is late leaves its step without a token.
poll() returns it when the mask has arrived, and it samples then.
"""

# N rows with a grammar · W words of 32 tokens each

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from lorafleet.protocol.errors import InvalidRequest, LorafleetError, Overloaded, QueueFull
from lorafleet.protocol.messages import TokenizerFile
from lorafleet.workers.schedule.sequence import UNKNOWN, Sequence
from lorafleet.workers.structured.grammar_process import GrammarLimits, GrammarProcess, Opened, ProcessEnded, Unread
from lorafleet.workers.structured.vocabularies import Vocabularies

Bits = np.ndarray[tuple[int, int], np.dtype[np.int32]]
Fault = tuple[Sequence, LorafleetError]


@dataclass(slots=True, eq=False)
class Grammar:
    """The grammar of one answer."""

    process: GrammarProcess
    number: int
    group: str  # group that uses the process
    num_sent: int = 0  # number of answer tokens that the process has
    late_1W: Bits | None = None  # mask of the next token, if it arrived after its step


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """The masks of a step. They are overwritten after the next start()."""

    rows: list[int]  # Indices among the step's samples.
    bits_NW: Bits  # Bit i of word w says whether token 32 w + i may come. Tokens beyond the last word may not.


@dataclass(frozen=True, slots=True)
class Masked:
    """The result of StructuredDecoding.finish()."""

    masks: TokenMasks | None  # None if no row has one.
    late: list[Sequence]  # Sequences whose masks have not arrived; poll() returns them.
    faults: list[Fault]  # Sequences that cannot go on.


@dataclass(frozen=True, slots=True)
class _Asked:
    process: GrammarProcess
    rows: list[int] = field(default_factory=list)
    sequences: list[Sequence] = field(default_factory=list)
    tokens: list[tuple[int, int, list[int]]] = field(default_factory=list)  # as GrammarProcess.start takes them

    def add(self, row: int, sequence: Sequence, grammar: Grammar) -> None:
        new = sequence.tokens[sequence.num_prompt + grammar.num_sent :]
        if new and new[-1] == UNKNOWN:
            new.pop()
        assert UNKNOWN not in new
        grammar.num_sent += len(new)
        self.tokens.append((grammar.number, len(self.rows), new))
        self.rows.append(row)
        self.sequences.append(sequence)

    def faults(self, errors: list[tuple[int, str]]) -> list[Fault]:
        """Returns the sequences that cannot go on. `errors` are the process's, by its numbers."""
        by_number = dict(errors)
        pairs = zip(self.tokens, self.sequences, strict=True)
        return [
            (sequence, _refusal(sequence, by_number[number]))
            for (number, _, _), sequence in pairs
            if number in by_number
        ]

    def store_late_masks(self) -> None:
        """Stores masks that arrived after the step, for the steps in which their sequences will be."""
        for (number, place, _), sequence in zip(self.tokens, self.sequences, strict=True):
            if sequence.grammar is not None and sequence.grammar.number == number:
                sequence.grammar.late_1W = self.process.mask_BW[place : place + 1].copy()


@dataclass(slots=True)
class _Late:
    """A process that has not answered in time, and the sequences that wait for it outside of the steps."""

    asked: _Asked
    sequences: set[Sequence]


class StructuredDecoding:
    """Manages the grammars of one engine.

    Args:
        most_rows: Largest number of rows in a step.
        wake: Called from other threads when poll() has something to return.
    """

    def __init__(self, most_rows: int, wake: Callable[[], None], limits: GrammarLimits | None = None) -> None:
        self._wake = wake
        self._limits = bounds = limits or GrammarLimits()
        self._vocabularies = Vocabularies(
            lambda tokenizer, eos: GrammarProcess(tokenizer, eos, most_rows, wake, bounds)
        )
        self._opening: dict[int, Sequence] = {}
        self._asked: list[_Asked] = []
        self._late_masks: list[tuple[int, Bits]] = []  # rows of the step whose masks came too late for the step before
        self._refrained: list[Sequence] = []  # sequences of the step whose process has yet to answer for an earlier one
        self._late: dict[GrammarProcess, _Late] = {}
        self._resumable: list[Sequence] = []  # sequences that poll() returns next, since they wait for nothing any more
        self._numbers = count()

    def open(
        self,
        sequence: Sequence,
        tokenizer: TokenizerFile,
        eos_token_ids: Many[int],
        turn_group: str = "",
        *,
        base: bool = False,
    ) -> None:
        """Opens a sequence's grammar. The sequence may start once poll() has returned it.

        `base` says that the tokenizer is the base model's. Raises LorafleetError.
        """
        spec = sequence.params.structured_outputs
        assert spec is not None
        if not eos_token_ids:
            raise InvalidRequest("this model has no end-of-sequence token, which structured output needs.")
        process = self._vocabularies.join(tokenizer, tuple(sorted(eos_token_ids)), turn_group, base=base)
        number = next(self._numbers)
        try:
            if process.failure:
                raise _ended(process)
            process.open(number, spec, turn_group)
        except Unread:
            self._vocabularies.leave(process, turn_group)
            raise Overloaded("The process that holds the grammars does not read its messages; try again.") from None
        except LorafleetError:
            self._vocabularies.leave(process, turn_group)
            raise
        sequence.grammar = Grammar(process, number, turn_group)
        self._opening[number] = sequence

    def poll(self) -> list[tuple[Sequence, LorafleetError | None]]:
        """Returns the sequences that may start or go on now, with None, and those that never can, with the error."""
        found: list[tuple[Sequence, LorafleetError | None]] = []
        for process in self._vocabularies.processes:
            process.ping()
            if process.is_overdue:
                process.end()
            # `dead` is read first, so that everything that a process sent before it ended is handled first.
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
            found += self._late_answers(process)
        found += [(sequence, None) for sequence in self._resumable if sequence.grammar is not None]
        self._resumable = []
        return found

    def leave(self, sequence: Sequence) -> None:
        """Closes the grammar of a sequence whose answer has ended or been aborted."""
        grammar, sequence.grammar = sequence.grammar, None
        if grammar is not None:
            self._opening.pop(grammar.number, None)
            if grammar.process in self._late:
                self._late[grammar.process].sequences.discard(sequence)
            grammar.process.close(grammar.number)
            self._vocabularies.leave(grammar.process, grammar.group)

    def start(self, sampling: Many[Sequence]) -> None:
        """Requests the next masks of a step's sequences that have a grammar. `sampling` is in the order of its rows.

        All tokens of these sequences must be known, except those of that step.
        """
        self._late_masks, self._refrained = [], []
        by_process: dict[GrammarProcess, _Asked] = {}
        for row, sequence in enumerate(sampling):
            grammar = sequence.grammar
            if grammar is None:
                continue
            if grammar.late_1W is not None:
                self._late_masks.append((row, grammar.late_1W))
                grammar.late_1W = None
            elif grammar.process.is_busy:
                self._refrained.append(sequence)
            else:
                by_process.setdefault(grammar.process, _Asked(grammar.process)).add(row, sequence, grammar)
        self._asked = list(by_process.values())
        for asked in self._asked:
            asked.process.start(asked.tokens)

    def finish(self) -> Masked:
        """Returns the result of the last start(). Waits for all processes together for at most step_wait_s."""
        until_s = time.monotonic() + self._limits.step_wait_s
        rows = [row for row, _ in self._late_masks]
        parts = [bits_1W for _, bits_1W in self._late_masks]
        faults: list[Fault] = []
        late: list[Sequence] = []
        for asked in self._asked:
            try:
                errors = asked.process.finish(until_s - time.monotonic())
            except ProcessEnded:
                faults += [(sequence, _ended(asked.process)) for sequence in asked.sequences]
                continue
            if errors is None:
                waiting = [sequence for sequence in asked.sequences if sequence.grammar is not None]
                self._late[asked.process] = _Late(asked, set(waiting))
                late += waiting
                continue
            faults += asked.faults(errors)
            rows += asked.rows
            parts.append(asked.process.mask_BW[: len(asked.rows)])
        late += self._hold_refrained()
        self._asked, self._late_masks = [], []
        return Masked(TokenMasks(rows, _stacked(parts)) if parts else None, late, faults)

    def close(self) -> None:
        self._vocabularies.close()

    def _hold_refrained(self) -> list[Sequence]:
        """Returns the step's sequences that wait for the answer to an earlier one, unless they have ended meanwhile."""
        held: list[Sequence] = []
        for sequence in self._refrained:
            if sequence.grammar is None:
                continue
            held.append(sequence)
            late = self._late.get(sequence.grammar.process)
            if late is not None:
                late.sequences.add(sequence)
            else:  # the answer has arrived meanwhile
                self._resumable.append(sequence)
                self._wake()
        self._refrained = []
        return held

    def _late_answers(self, process: GrammarProcess) -> list[tuple[Sequence, LorafleetError | None]]:
        late = self._late.get(process)
        if late is None:
            return []
        try:
            errors = process.finish(0)
        except ProcessEnded:
            del self._late[process]
            return [(sequence, _ended(process)) for sequence in late.sequences]
        if errors is None:
            return []
        del self._late[process]
        late.asked.store_late_masks()
        faults = dict(late.asked.faults(errors))
        return [(sequence, faults.get(sequence)) for sequence in late.sequences]


def _stacked(parts: list[Bits]) -> Bits:
    """Stacks the masks of all processes. Narrower vocabularies are padded with zeros."""
    if len(parts) == 1:
        return parts[0]
    width = max(part.shape[1] for part in parts)
    bits_NW: Bits = np.zeros((sum(map(len, parts)), width), np.int32)
    row = 0
    for part in parts:
        bits_NW[row : row + len(part), : part.shape[1]] = part
        row += len(part)
    return bits_NW


def _fault_of(sequence: Sequence, opened: Opened) -> LorafleetError | None:
    if opened.is_busy:
        return QueueFull(f"Structured output cannot be prepared now: {opened.fault}. Try again later.")
    return _refusal(sequence, opened.fault) if opened.fault else None


def _refusal(sequence: Sequence, fault: str) -> InvalidRequest:
    spec = sequence.params.structured_outputs
    assert spec is not None
    return InvalidRequest(f"`{spec.param}` cannot be enforced: {fault}. Change or remove that part.", spec.param)


def _ended(process: GrammarProcess) -> LorafleetError:
    if process.failure:
        return InvalidRequest(f"structured output does not support this model's tokenizer: {process.failure}.")
    return Overloaded("The process that holds the grammars has ended and is being restarted; try again.")
