"""Reads the file that quality_probes names: which models get which prompts, and how often. It is read once, strictly,
at the start."""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from lorafleet.cluster.wording import in_words, nearest
from lorafleet.protocol.errors import ConfigError

MAX_PROBES = 256  # Probes of a set; a baseline stores logprobs of each.
MAX_TOKENS = 1024  # Tokens of an answer.


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _known_names(cls, data: Any) -> Any:
        for name in data if isinstance(data, dict) else ():
            if name not in cls.model_fields:
                raise ValueError(f"unknown key {name!r}{nearest(str(name), cls.model_fields)}")
        return data


class Probe(_Strict):
    """One line of a set's prompts."""

    prompt: str = Field(min_length=1)
    completion: str | None = Field(None, min_length=1)  # A text on which the model's perplexity is measured.


class _SetEntry(_Strict):
    model: str = Field(min_length=1)
    prompts: str = Field(min_length=1)
    max_tokens: int = Field(32, ge=1, le=MAX_TOKENS)


class _ProbesFile(_Strict):
    interval_s: float = Field(3600.0, gt=0)
    sets: list[_SetEntry] = Field(min_length=1)


@dataclass(frozen=True)
class ProbeSet:
    """The probes of one model."""

    model: str  # An adapter's full name, or the base's.
    max_tokens: int  # Of each answer.
    probes: tuple[Probe, ...]

    @functools.cached_property
    def digest(self) -> str:
        """The digest of the model and its probes. If either changes, a new baseline is needed."""
        content = [self.model, self.max_tokens, [[probe.prompt, probe.completion] for probe in self.probes]]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class QualityProbes:
    """All sets of probes, and how often they run."""

    interval_s: float  # Time between two runs of a set.
    sets: tuple[ProbeSet, ...]


M = TypeVar("M", bound=_Strict)


def read_probes(path: str | Path) -> QualityProbes:
    """Reads the probes file and its prompts. Raises ConfigError, which names the file, the place in it and what is
    wrong."""
    path = Path(path)
    try:
        content = yaml.safe_load(_text(path))
    except yaml.YAMLError as error:
        raise ConfigError(f"quality_probes {str(path)!r} is neither YAML nor JSON: {error}") from None
    file = _parse(_ProbesFile, content, f"quality_probes {str(path)!r}")
    models = [entry.model for entry in file.sets]
    for model in models:
        if models.count(model) > 1:
            raise ConfigError(
                f"quality_probes {str(path)!r} has two sets for {model!r}; put their prompts into one file."
            )
    sets = [ProbeSet(entry.model, entry.max_tokens, _read_prompts(path.parent / entry.prompts)) for entry in file.sets]
    return QualityProbes(file.interval_s, tuple(sets))


def _read_prompts(path: Path) -> tuple[Probe, ...]:
    lines = [(number, line) for number, line in enumerate(_text(path).splitlines(), 1) if line.strip()]
    if not 1 <= len(lines) <= MAX_PROBES:
        raise ConfigError(f"{path} has {len(lines)} prompts; a set of quality probes has 1 to {MAX_PROBES}.")
    return tuple(
        _parse(Probe, _json(line, f"{path}, line {number}"), f"{path}, line {number}") for number, line in lines
    )


def _json(line: str, place: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise ConfigError(f'{place} is not valid JSON: {error}. Write {{"prompt": "…"}} in each line.') from None


def _parse(kind: type[M], content: Any, place: str) -> M:
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        raise ConfigError("; ".join(f"{place}: {in_words(fault)}" for fault in error.errors())) from None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}, a file of the quality probes, cannot be read: {error}. Check the path.") from None
