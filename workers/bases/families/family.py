"""Defines the record that a family's file declares: an architecture's name and its description."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lorafleet.workers.bases.families.config_fields import ConfigFields
from lorafleet.workers.bases.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture of checkpoints that the decoder serves. docs/models.md lists its `models` and `features`."""

    architecture: str  # transformers' class, as config.json names it
    models: str
    features: str
    describe: Callable[[ConfigFields], ModelConfig]
    # Values that transformers leaves out of config.json, since they are the architecture's defaults.
    defaults: Mapping[str, Any] = field(default_factory=dict)
    # config.json nests the language model's settings in text_config. Only texts are served.
    is_wrapper: bool = False
