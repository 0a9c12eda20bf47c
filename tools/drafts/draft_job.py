"""Describes one run of `lorafleet train-draft`: its inputs, its options and its results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lorafleet.protocol.engine_config import Device, DType
from lorafleet.protocol.errors import ConfigError
from lorafleet.tools.comparison_runner import BASE
from lorafleet.tools.drafts.distillation import TrainingPlan
from lorafleet.tools.drafts.draft_acceptance import DraftAcceptance
from lorafleet.tools.drafts.draft_checkpoint import DraftModelShape
from lorafleet.tools.drafts.draft_traffic import TrafficLine


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """The options of the answers that the target gives."""

    max_tokens: int = 256  # Longest answer in tokens.
    max_length: int = 2048  # Longest prompt with its answer in tokens. What is longer is left out and counted.
    num_samples: int = 1  # Answers to each prompt that are trained on.
    temperature: float = 0.0  # Answers to train on are sampled with it; 0: greedy.
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_samples > 1 and self.temperature == 0:
            raise ConfigError(f"--samples {self.num_samples} needs a --temperature over 0: greedy answers are equal.")


@dataclass(frozen=True, slots=True)
class DraftJob:
    """The inputs and options of one run."""

    model: Path  # Folder of the base.
    adapters: Mapping[str, Path]  # Folders by name.
    draft: Path  # Folder of the draft model.
    is_new: bool  # Whether the draft model is trained and written, or only read for the adapters' LoRAs.
    lines: Sequence[TrafficLine]
    held_out: Sequence[TrafficLine] | None = None  # None: some of the lines.
    base_names: Sequence[str] = ()  # Further names of the base in the lines.
    shape: DraftModelShape = field(default_factory=DraftModelShape)  # Of a new draft.
    rank: int = 16  # Of the LoRAs.
    answers: AnswerOptions = field(default_factory=AnswerOptions)
    plan: TrainingPlan = field(default_factory=TrainingPlan)  # Of the draft model.
    lora_plan: TrainingPlan = field(default_factory=TrainingPlan)
    num_drafted: int = 4  # Draft tokens in a step, for the reported lengths.
    device: Device = "auto"
    dtype: DType = "auto"  # Of the target.
    gpu_memory_utilization: float = 0.7  # Share for the target. Its memory may stay taken while the draft is trained.

    def __post_init__(self) -> None:
        if not self.trained:
            raise ConfigError("there is nothing to train: give --adapters, or --out for a new draft model.")

    @property
    def trained(self) -> list[str]:
        """Names of the models that get a draft, the base first."""
        return [*([BASE] if self.is_new else []), *self.adapters]


@dataclass(frozen=True, slots=True)
class DraftResult:
    """The acceptance on one model's held-out prompts, before and after training."""

    name: str  # BASE, or the adapter's name.
    num_answers: int  # Answers that were trained on.
    num_held_out: int  # Prompts that acceptance was measured on.
    num_left_out: int  # Answers that were not used: empty, or too long together with their prompts.
    before: DraftAcceptance  # Of the new draft before training, or without the adapter's LoRA.
    after: DraftAcceptance
