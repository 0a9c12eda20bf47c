"""Drafters and paces for tests, which do not depend on how fast the machine is."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Many

from lorafleet.workers.device.draft_verification import DraftVerification
from lorafleet.workers.engine import Engine
from lorafleet.workers.schedule.sequence import UNKNOWN, Sequence
from lorafleet.workers.speculation.ahead_drafts import AheadDrafter, AheadDrafts
from lorafleet.workers.speculation.ahead_pace import AheadPace
from lorafleet.workers.speculation.awaited_drafts import AwaitingDrafter
from lorafleet.workers.speculation.drafter import DeviceDrafts, HostDrafter, Wanted
from lorafleet.workers.speculation.model_drafter import ModelDrafter
from lorafleet.workers.speculation.speculation import Speculation
from lorafleet.workers.speculation.step_pace import StepPace

Drafted = tuple[str, list[int], list[int]]  # A request, its known tokens, and the drafts behind them.


class DraftsPay(StepPace):
    """Takes every draft for worth its time."""

    def best_count(
        self,
        num_decodes: int,  # noqa: ARG002  it is the same for all
        counts: Many[int],
        accepted: Many[float],  # noqa: ARG002
        token_s: float,  # noqa: ARG002
    ) -> int:
        return max(counts)

    def is_faster(self, num_decodes: int, num_drafts: int, num_accepted: float, token_s: float) -> bool:  # noqa: ARG002
        return True


class DraftsCost(DraftsPay):
    """Takes a draft token for worth its time if it is accepted more often than `price`."""

    def __init__(self, price: float) -> None:
        super().__init__()
        self._price = price

    def best_count(
        self,
        num_decodes: int,  # noqa: ARG002  it is the same for all
        counts: Many[int],
        accepted: Many[float],
        token_s: float,  # noqa: ARG002
    ) -> int:
        gains = [(right - self._price * count, count) for count, right in zip(counts, accepted, strict=True)]
        gain, best = max(gains)
        return best if gain > 0 else 0


class AlwaysAhead(AheadPace):
    """Takes drafts behind a step in flight for faster than any other."""

    def is_ahead(self, *_args: object, **_kwargs: object) -> bool:
        return True


class Guesses:
    """Drafts the known answers of requests, with mistakes in some places."""

    def __init__(self, answers: Mapping[str, Many[int]], mistakes: float = 0.3) -> None:
        self._answers = answers
        self._mistakes = mistakes
        self._rng = random.Random(1)

    def propose(self, wanted: Many[Wanted]) -> list[list[int]]:
        return [self._draft(entry) for entry in wanted]

    def read(self, sequences: Iterable[Sequence]) -> None:
        pass

    def release(self, sequence: Sequence) -> None:
        pass

    def _draft(self, entry: Wanted) -> list[int]:
        sequence, num_known, most = entry
        assert UNKNOWN not in sequence.tokens[:num_known]
        first = num_known - sequence.num_prompt
        right = self._answers.get(sequence.request_id, ())[first : first + most]
        return [5 if self._rng.random() < self._mistakes else token for token in right]


def record(drafter: ModelDrafter, drafted: list[Drafted], behind: list[str] | None = None) -> None:
    """Appends to `drafted` what is drafted from now on, behind known tokens and behind steps in flight, and to `behind`
    the requests of the latter."""
    propose, propose_behind = drafter.propose, drafter.propose_behind

    def recorded(wanted: Many[Wanted]) -> list[list[int]]:
        found = propose(wanted)
        for entry, draft in zip(wanted, found, strict=True):
            if draft:
                drafted.append((entry.sequence.request_id, entry.sequence.tokens[: entry.num_known], draft))
        return found

    def recorded_behind(wanted: Many[Wanted], step: DraftVerification) -> DeviceDrafts:
        drawn, accepted = step.drawn_B.tolist(), step.accepted_S.tolist()
        made = propose_behind(wanted, step)
        for entry in wanted:
            if entry.sequence in made.counts:
                rows, draft = step.rows[entry.sequence], made.token_WK[made.row_by_sequence[entry.sequence]].tolist()
                if behind is not None:
                    behind.append(entry.sequence.request_id)
                known = entry.sequence.tokens[: entry.num_known]
                known += drawn[rows.first : rows.first + accepted[rows.index] + 1]
                drafted.append((entry.sequence.request_id, known, draft[: made.counts[entry.sequence]]))
        return made

    drafter.propose = recorded  # type: ignore[method-assign]
    drafter.propose_behind = recorded_behind  # type: ignore[method-assign]


def speculate(
    engine: Engine, drafter: HostDrafter | ModelDrafter | None, most_tokens: int = 4, pace: AheadPace | None = None
) -> Speculation:
    """Has the engine verify the drafts of this drafter, and those that grammars force, wherever there are some. Call it
    before the first request.

    Args:
        pace: Says whether steps behind one with drafts are planned before its tokens are known. None means always.
    """
    rows = len(engine.runner.steps.inputs.sampled_B)
    ahead: AheadDrafter | None = (
        drafter if drafter is None or isinstance(drafter, ModelDrafter) else AwaitingDrafter(drafter)
    )
    made = Speculation(
        ahead,
        engine.scheduler.budget,
        most_tokens,
        rows,
        DraftsPay(),
        is_certain=isinstance(drafter, ModelDrafter),
        ahead=None if ahead is None else AheadDrafts(ahead, pace or AlwaysAhead()),
    )
    engine.scheduler.speculation = made
    return made
