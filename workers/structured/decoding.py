"""Finds the tokens that may come next in answers that have a grammar. Masks are requested when a step is launched, and
are needed when its tokens are chosen. This file knows nothing of devices; the processes of grammar_process.py work
beside the engine.

No step waits for a process that is slow or stopped. A sequence whose mask is late leaves its step without a token.
poll() returns it when the mask has arrived, and it samples then.
"""

# N rows with a grammar · W words of 32 tokens each

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from lorafleet.protocol.errors import InvalidRequest, LorafleetError, Overloaded, QueueFull
from lorafleet.protocol.messages import TokenizerFile
from lorafleet.workers.schedule.sequence import UNKNOWN, Sequence
from lorafleet.workers.structured.filled_masks import FilledMasks, FollowedDrafts
from lorafleet.workers.structured.forced_tokens import ForcedTokens
from lorafleet.workers.structured.grammar_process import GrammarLimits, GrammarProcess, Opened, ProcessEnded, Unread
from lorafleet.workers.structured.mask_filler import MaskRequest
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
    forced: ForcedTokens = field(default_factory=ForcedTokens)  # what it allowed no alternative to, the last time
    late_1W: Bits | None = None  # mask of the next token, if it arrived after its step


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """The masks of a step. They are overwritten after the next start()."""

    rows: list[int]  # Indices among the tokens that the step samples.
    bits_NW: Bits  # Bit i of word w says whether token 32 w + i may come. Tokens beyond the last word may not.
    # Number of the first drafts of a sequence that may be accepted, since there is a mask behind them. A sequence that
    # is not in it has no drafts, or no grammar.
    num_masked: dict[Sequence, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Masked:
    """The result of StructuredDecoding.finish()."""

    masks: TokenMasks | None  # None if no row has one.
    late: list[Sequence]  # Sequences whose masks have not arrived; poll() returns them.
    faults: list[Fault]  # Sequences that cannot go on.


@dataclass(frozen=True, slots=True)
class _Row:
    """A sequence in a request for masks. Its drafts have the rows behind its own."""

    sequence: Sequence
    row: int  # As in TokenMasks.
    place: int  # Row of the process's masks.
    num_tokens: int  # Number of its tokens.
    drafts: Many[int]


@dataclass(frozen=True, slots=True)
class _Asked:
    process: GrammarProcess
    rows: dict[int, _Row] = field(default_factory=dict)  # By the number of the grammar.
    requests: list[MaskRequest] = field(default_factory=list)

    def add(self, row: int, sequence: Sequence, grammar: Grammar, drafts: Many[int]) -> None:
        new = sequence.tokens[sequence.num_prompt + grammar.num_sent :]
        if new and new[-1] == UNKNOWN:
            new.pop()
        assert UNKNOWN not in new
        grammar.num_sent += len(new)
        place = 0
        if self.requests:
            _, last, _, before = self.requests[-1]
            place = last + 1 + len(before)
        self.requests.append((grammar.number, place, new, list(drafts)))
        num_tokens = sequence.num_prompt + grammar.num_sent
        self.rows[grammar.number] = _Row(sequence, row, place, num_tokens, drafts)

    def faults(self, filled: FilledMasks) -> list[Fault]:
        """Returns the sequences that cannot go on."""
        return [
            (self.rows[number].sequence, _refusal(self.rows[number].sequence, error)) for number, error in filled.faults
        ]

    def store_forced(self, filled: FilledMasks) -> dict[int, FollowedDrafts]:
        """Stores the tokens that are forced now. Returns what is known of drafts, by the number of the grammar."""
        followed = {found.number: found for found in filled.followed}
        for number, asked in self.rows.items():
            grammar = asked.sequence.grammar
            if grammar is not None and grammar.number == number:
                found = followed.get(number)
                grammar.forced.replace(asked.num_tokens, asked.drafts, () if found is None else found.forced)
        return followed

    def store_late_masks(self) -> None:
        """Stores masks that arrived after the step, for the steps in which their sequences will be."""
        for number, asked in self.rows.items():
            grammar, place = asked.sequence.grammar, asked.place
            if grammar is not None and grammar.number == number:
                grammar.late_1W = self.process.mask_BW[place : place + 1].copy()


@dataclass(slots=True)
class _Late:
    """A process that has not answered in time, and the sequences that wait for it outside of the steps."""

    asked: _Asked
    sequences: set[Sequence]


class StructuredDecoding:
    """Manages the grammars of one engine.

    Args:
        most_rows: Largest number of tokens that a step samples.
        wake: Called from other threads when poll() has something to return.
        finds_forced: Whether Grammar.forced is wanted.
    """

    def __init__(
        self,
        most_rows: int,
        wake: Callable[[], None],
        limits: GrammarLimits | None = None,
        finds_forced: bool = False,
    ) -> None:
        self._wake = wake
        self._limits = bounds = limits or GrammarLimits()
        self._vocabularies = Vocabularies(
            lambda tokenizer, eos: GrammarProcess(tokenizer, eos, most_rows, wake, bounds, finds_forced)
        )
        self._opening: dict[int, Sequence] = {}
        self._asked: list[_Asked] = []
        # Sequences whose masks came too late for the step before, with their rows of the step.
        self._late_masks: list[tuple[Sequence, int, Bits]] = []
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

    def start(self, sampling: Many[Sequence], drafts: Mapping[Sequence, Many[int]] | None = None) -> None:
        """Requests the next masks of a step's sequences that have a grammar, and those behind their drafts.

        All tokens of these sequences must be known, except those of that step.

        Args:
            sampling: The sequences in the order of their rows. A sequence with drafts has a row for each behind its
                own.
        """
        self._late_masks, self._refrained = [], []
        by_process: dict[GrammarProcess, _Asked] = {}
        for row, sequence, own_drafts in _rows_of(sampling, drafts or {}):
            grammar = sequence.grammar
            if grammar is None:
                continue
            if grammar.late_1W is not None:
                self._late_masks.append((sequence, row, grammar.late_1W))
                grammar.late_1W = None
            elif grammar.process.is_busy:
                self._refrained.append(sequence)
            else:
                asked = by_process.setdefault(grammar.process, _Asked(grammar.process))
                asked.add(row, sequence, grammar, own_drafts)
        self._asked = list(by_process.values())
        for asked in self._asked:
            asked.process.start(asked.requests)

    def finish(self) -> Masked:
        """Returns the result of the last start(). Waits for all processes together for at most step_wait_s."""
        until_s = time.monotonic() + self._limits.step_wait_s
        rows = [row for _, row, _ in self._late_masks]
        num_masked = {sequence: 0 for sequence, _, _ in self._late_masks}
        parts = [bits_1W for _, _, bits_1W in self._late_masks]
        faults: list[Fault] = []
        late: list[Sequence] = []
        for asked in self._asked:
            sequences = [own.sequence for own in asked.rows.values()]
            try:
                filled = asked.process.finish(until_s - time.monotonic())
            except ProcessEnded:
                faults += [(sequence, _ended(asked.process)) for sequence in sequences]
                continue
            if filled is None:
                waiting = [sequence for sequence in sequences if sequence.grammar is not None]
                self._late[asked.process] = _Late(asked, set(waiting))
                late += waiting
                continue
            faults += asked.faults(filled)
            followed = asked.store_forced(filled)
            places: list[int] = []
            for number, own in asked.rows.items():
                count = followed[number].num_masked if number in followed else 0
                rows += range(own.row, own.row + 1 + count)
                places += range(own.place, own.place + 1 + count)
                if own.drafts:
                    num_masked[own.sequence] = count
            is_dense = len(places) == places[-1] + 1  # Otherwise some drafts have no masks.
            parts.append(asked.process.mask_BW[: len(places)] if is_dense else asked.process.mask_BW[places])
        late += self._hold_refrained()
        self._asked, self._late_masks = [], []
        return Masked(TokenMasks(rows, _stacked(parts), num_masked) if parts else None, late, faults)

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
            filled = process.finish(0)
        except ProcessEnded:
            del self._late[process]
            return [(sequence, _ended(process)) for sequence in late.sequences]
        if filled is None:
            return []
        del self._late[process]
        late.asked.store_late_masks()
        late.asked.store_forced(filled)
        faults = dict(late.asked.faults(filled))
        return [(sequence, faults.get(sequence)) for sequence in late.sequences]


def _rows_of(
    sampling: Many[Sequence], drafts: Mapping[Sequence, Many[int]]
) -> Iterator[tuple[int, Sequence, Many[int]]]:
    """Yields the first row of each sequence among the tokens that a step samples, the sequence and its drafts."""
    row = 0
    for sequence in sampling:
        own_drafts = drafts.get(sequence, ())
        yield row, sequence, own_drafts
        row += 1 + len(own_drafts)


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
