"""Trains a draft for a base and a LoRA of the draft for each adapter, and measures what they are worth.

draft_lessons.py has the target answer prompts, and distillation.py trains. Acceptance is measured on prompts that
nothing was trained on, against the target's greedy answers.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import transformers
from transformers import PreTrainedModel

from lorafleet.protocol.adapter_formats.adapter_files import DRAFT_FOLDER
from lorafleet.protocol.errors import ConfigError
from lorafleet.tools.comparison_runner import BASE
from lorafleet.tools.drafts.distillation import distil
from lorafleet.tools.drafts.draft_acceptance import DraftAcceptance, measure_acceptance
from lorafleet.tools.drafts.draft_adapter import check_peft, save_lora, trained_lora
from lorafleet.tools.drafts.draft_checkpoint import dtype_of, new_draft, read_draft, save_draft
from lorafleet.tools.drafts.draft_job import DraftJob, DraftResult
from lorafleet.tools.drafts.draft_lessons import Lesson, collect_lessons
from lorafleet.tools.drafts.draft_target import TargetAnswer
from lorafleet.tools.new_folder import check_new, new_folder

Report = Callable[[str], None]


def train_draft(job: DraftJob, report: Report) -> list[DraftResult]:
    """Trains and writes what the job asks for, and returns one result for each model. `report` takes lines about the
    progress.

    Raises ConfigError, InvalidRequest or an AdapterError. Folders that were complete before an error remain.
    """
    _check_places(job)
    torch.manual_seed(job.plan.seed)
    with _quiet_transformers():
        draft = new_draft(job.model, job.shape) if job.is_new else read_draft(job.draft, job.model)
    lessons = collect_lessons(job, draft.config.vocab_size, report)
    gc.collect()  # The engine's memory, which cycles of objects may still hold.
    draft.to("cuda" if job.device != "cpu" and torch.cuda.is_available() else "cpu")
    results = [_train_model(job, draft, lessons[BASE], report)] if job.is_new else []
    return results + [_train_lora(job, draft, name, lessons[name], report) for name in job.adapters]


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Suppresses the progress bar, and the list of the target's layers that a draft does not have."""
    logging = transformers.utils.logging
    verbosity, had_bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if had_bar:
            logging.enable_progress_bar()


def _check_places(job: DraftJob) -> None:
    """Raises ConfigError if anything could not be written, or PEFT is missing, before any work is done."""
    if job.is_new:
        check_new(job.draft)
    if job.adapters:
        check_peft()
    for name, folder in job.adapters.items():
        if not folder.is_dir():
            raise ConfigError(f"adapter {name!r}: {folder} is not a folder. A draft is written to local folders only.")
        check_new(folder / DRAFT_FOLDER)
    folders = [folder.resolve() for folder in job.adapters.values()]
    if twice := [folder for folder in folders if folders.count(folder) > 1]:
        raise ConfigError(f"two adapters have the folder {twice[0]}, which can hold one draft. Name it once.")


def _train_model(job: DraftJob, draft: PreTrainedModel, lesson: Lesson, report: Report) -> DraftResult:
    before = _measure(job, draft, lesson.held_out)
    report(f"draft model, {sum(weight.numel() for weight in draft.parameters()):,} weights")
    distil(draft, lesson.train, job.plan, report)
    with new_folder(job.draft) as folder, _quiet_transformers():
        save_draft(draft, job.model, folder)
    return _result(BASE, lesson, before, _measure(job, draft, lesson.held_out))


def _train_lora(job: DraftJob, draft: PreTrainedModel, name: str, lesson: Lesson, report: Report) -> DraftResult:
    before = _measure(job, draft, lesson.held_out)
    report(f"draft LoRA of {name}")
    with trained_lora(draft, lesson.train, job.rank, job.lora_plan, report) as model:
        with new_folder(job.adapters[name] / DRAFT_FOLDER) as folder:
            save_lora(model, job.draft, dtype_of(job.model), folder)
        return _result(name, lesson, before, _measure(job, model, lesson.held_out))


def _measure(job: DraftJob, draft: PreTrainedModel, answers: Sequence[TargetAnswer]) -> DraftAcceptance:
    return measure_acceptance(draft, answers, job.num_drafted, job.plan.tokens_per_batch)


def _result(name: str, lesson: Lesson, before: DraftAcceptance, after: DraftAcceptance) -> DraftResult:
    return DraftResult(name, len(lesson.train), len(lesson.held_out), lesson.num_left_out, before, after)
