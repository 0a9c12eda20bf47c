"""Collects the answers that each draft is trained and measured on, from the traffic and from the target."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass

from lorafleet.protocol.errors import InvalidRequest
from lorafleet.tools.base_checkpoint import BaseModel
from lorafleet.tools.comparison_runner import BASE
from lorafleet.tools.drafts.draft_checkpoint import context_of
from lorafleet.tools.drafts.draft_job import DraftJob
from lorafleet.tools.drafts.draft_split import TrafficSplit, split_traffic
from lorafleet.tools.drafts.draft_target import DraftTarget, TargetAnswer
from lorafleet.tools.reading import largest_rank, read_forms


@dataclass(frozen=True, slots=True)
class Lesson:
    """The answers of one model. None is empty or too long."""

    train: list[TargetAnswer]
    held_out: list[TargetAnswer]  # Greedy ones.
    num_left_out: int  # Answers that were empty, or too long together with their prompts.


def collect_lessons(job: DraftJob, vocab_size: int, report: Callable[[str], None]) -> dict[str, Lesson]:
    """Returns the answers of each model by its name. The engine has ended when this returns.

    Args:
        vocab_size: The draft's. Answers with other tokens are refused.
    """
    splits = {name: _split(job, name) for name in job.trained}
    max_length = min(job.answers.max_length, context_of(job.model))
    with closing(
        DraftTarget(
            job.model,
            job.adapters,
            max_lora_rank=_largest_rank(job),
            max_length=max_length,
            device=job.device,
            dtype=job.dtype,
        )
    ) as target:
        lessons: dict[str, Lesson] = {}
        for name, split in splits.items():
            report(f"{name}: the target answers {len(split.train)} prompts, and {len(split.held_out)} to measure on")
            lessons[name] = _lesson(job, target, name, split, max_length)
            _check_tokens(name, lessons[name], vocab_size)
        return lessons


def _split(job: DraftJob, name: str) -> TrafficSplit:
    return split_traffic(
        name,
        job.lines,
        job.held_out,
        base_names=(BASE, job.model.name, str(job.model), *job.base_names),
        is_only_model=len(job.trained) == 1,
    )


def _largest_rank(job: DraftJob) -> int:
    with BaseModel.opened(job.model) as base:
        return max((largest_rank(read_forms(path, base, name).forms) for name, path in job.adapters.items()), default=1)


def _lesson(job: DraftJob, target: DraftTarget, name: str, split: TrafficSplit, max_length: int) -> Lesson:
    options = job.answers
    known = [line for line in split.train if line.is_answered]
    unanswered = [line for line in split.train if not line.is_answered]
    train = target.known_answers(name, known)
    for number in range(options.num_samples):
        seed = options.seed + number * len(unanswered)
        train += target.answers(name, unanswered, options.max_tokens, temperature=options.temperature, seed=seed)
    held_out = target.answers(name, split.held_out, options.max_tokens, temperature=0, seed=0)
    num_asked = len(known) + options.num_samples * len(unanswered) + len(held_out)
    train, held_out = (
        [answer for answer in answers if answer.answer and answer.num_tokens <= max_length]
        for answers in (train, held_out)
    )
    if not train or not held_out:
        raise InvalidRequest(
            f"{name}: {len(train)} answers remain to train on and {len(held_out)} to measure on, since prompts and "
            f"answers may have {max_length} tokens. Raise --max-length, up to the model's context, or shorten them."
        )
    return Lesson(train, held_out, num_asked - len(train) - len(held_out))


def _check_tokens(name: str, lesson: Lesson, vocab_size: int) -> None:
    largest = max(max(*answer.prompt, *answer.answer) for answer in (*lesson.train, *lesson.held_out))
    if largest >= vocab_size:
        raise InvalidRequest(
            f"{name} uses the token {largest}; the draft has {vocab_size} tokens, as the base. A draft for a larger "
            "vocabulary is not possible: leave this adapter out."
        )
