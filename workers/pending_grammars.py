"""Holds back the sequences whose grammars are being compiled, so that no other sequence waits for a grammar."""

from __future__ import annotations

from lorafleet.protocol.lora_request import turn_group
from lorafleet.protocol.messages import EngineRequest
from lorafleet.workers.schedule.scheduler import Scheduler
from lorafleet.workers.schedule.sequence import Sequence
from lorafleet.workers.structured.decoding import Fault, StructuredDecoding


class PendingGrammars:
    """The sequences of one engine that are in no queue yet, because their grammars are not ready."""

    def __init__(self, structured: StructuredDecoding, scheduler: Scheduler) -> None:
        self._structured = structured
        self._scheduler = scheduler
        self._sequences: set[Sequence] = set()

    def __len__(self) -> int:
        return len(self._sequences)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._sequences

    def add(self, sequence: Sequence, request: EngineRequest, eos_token_ids: list[int]) -> None:
        """Requests the sequence's grammar. Raises LorafleetError if that is impossible now."""
        assert request.tokenizer is not None, "a request with structured output says how the model spells its answers"
        base = request.vocabulary is None and not request.language
        group = turn_group(request.tenant, request.lora)
        self._structured.open(sequence, request.tokenizer, eos_token_ids, group, base=base)
        self._sequences.add(sequence)

    def discard(self, sequence: Sequence) -> bool:
        """Removes a sequence that has ended. Returns whether it was here."""
        if sequence not in self._sequences:
            return False
        self._sequences.remove(sequence)
        return True

    def poll(self) -> list[Fault]:
        """Hands the sequences that may start, or go on after a late mask, to the scheduler. Returns those that never
        can."""
        faults: list[Fault] = []
        for sequence, error in self._structured.poll():
            if error is not None:
                faults.append((sequence, error))
            elif self.discard(sequence):
                self._scheduler.add(sequence)
            else:
                self._scheduler.resume(sequence)
        return faults
