"""Drafters and paces for tests, which do not depend on how fast the machine is."""

from __future__ import annotations

import random
from collections.abc import Mapping
from collections.abc import Sequence as Many

from lorafleet.workers.engine import Engine
from lorafleet.workers.schedule.sequence import UNKNOWN, Sequence
from lorafleet.workers.speculation.drafter import Drafter, Wanted
from lorafleet.workers.speculation.model_drafter import ModelDrafter
from lorafleet.workers.speculation.speculation import Speculation
from lorafleet.workers.speculation.step_pace import StepPace


class DraftsPay(StepPace):
    """Takes every draft for worth its time."""

    def price(self, num_decodes: int, token_s: float) -> float:  # noqa: ARG002  it is the same for all
        return 0.0

    def is_faster(self, num_decodes: int, num_drafts: int, num_accepted: float, token_s: float) -> bool:  # noqa: ARG002
        return True


class Guesses:
    """Drafts the known answers of requests, with mistakes in some places."""

    def __init__(self, answers: Mapping[str, Many[int]], mistakes: float = 0.3) -> None:
        self._answers = answers
        self._mistakes = mistakes
        self._rng = random.Random(1)

    def propose(self, wanted: Many[Wanted]) -> list[list[int]]:
        return [self._draft(entry) for entry in wanted]

    def release(self, sequence: Sequence) -> None:
        pass

    def _draft(self, entry: Wanted) -> list[int]:
        sequence, num_known, most = entry
        assert UNKNOWN not in sequence.tokens[:num_known]
        first = num_known - sequence.num_prompt
        right = self._answers.get(sequence.request_id, ())[first : first + most]
        return [5 if self._rng.random() < self._mistakes else token for token in right]


def speculate(engine: Engine, drafter: Drafter | None, most_tokens: int = 4) -> Speculation:
    """Has the engine verify the drafts of this drafter, and those that grammars force, wherever there are some. Call it
    before the first request."""
    rows = len(engine.runner.steps.inputs.sampled_B)
    is_certain = isinstance(drafter, ModelDrafter)
    made = Speculation(drafter, engine.scheduler.budget, most_tokens, rows, DraftsPay(), is_certain=is_certain)
    engine.scheduler.speculation = made
    return made
