"""Declares what is recorded of one sequence while it runs. sequence_observer.py fills it in and publishes it."""

from __future__ import annotations

from dataclasses import dataclass, field

from lorafleet.api.telemetry.http_metrics import Stopwatch
from lorafleet.protocol.messages import DraftCounts, FinishReason, SequenceTimes


@dataclass(slots=True)
class SequenceRecord:
    """The counts and times of one sequence."""

    index: int  # Among the sequences of its request.
    num_prompt_tokens: int
    counts_prompt: bool  # True for the first sequence of a prompt, with which the usage counts the prompt.
    watch: Stopwatch = field(default_factory=Stopwatch)
    sent_s: float = 0.0  # When it was sent to the engine, in seconds of time.monotonic().
    times: SequenceTimes | None = None  # Set from the first token on, if the request is traced.
    num_tokens: int = 0  # Tokens of the answer, set at the end.
    num_cached_tokens: int = 0  # Prompt tokens that the engine did not compute again.
    drafts: DraftCounts = field(default_factory=DraftCounts)
    fallback_reason: str | None = None  # Why the base model answers in the adapter's place.
    ended: FinishReason = "abort"

    @property
    def num_counted_prompt_tokens(self) -> int:
        return self.num_prompt_tokens if self.counts_prompt else 0
