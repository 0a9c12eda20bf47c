"""The configuration of speculative decoding, in the JSON form of vLLM's --speculative-config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import ClassVar, Literal

from lorafleet.protocol.errors import ConfigError
from lorafleet.protocol.limits import Range

NAME = "speculative_config"


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """vLLM's options of the same names. Other methods and other names are refused."""

    __pydantic_config__: ClassVar[Mapping[str, str]] = {"extra": "forbid"}

    method: Literal["ngram"]  # ngram: drafts are copied from where the last tokens stood before.
    num_speculative_tokens: int = 4  # Most draft tokens of one sequence in a step.
    prompt_lookup_max: int = 4  # Last tokens of a sequence that are compared. Of two places, the longer match counts.
    prompt_lookup_min: int = 2  # Fewest of them that must be equal.

    def __post_init__(self) -> None:
        if self.method != "ngram":
            raise ConfigError(
                f"{NAME}: method={self.method!r} is not served. The only method is 'ngram', which needs no model."
            )
        for name, bounds in _BOUNDS.items():
            value = getattr(self, name)
            if type(value) is not int or value not in bounds:
                raise ConfigError(f"{NAME}: {name}={value!r} must be an integer in {bounds}.")
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ConfigError(
                f"{NAME}: prompt_lookup_min={self.prompt_lookup_min} exceeds "
                f"prompt_lookup_max={self.prompt_lookup_max}. Lower the first or raise the second."
            )

    @classmethod
    def of(cls, given: SpeculativeConfig | Mapping[str, object] | None) -> SpeculativeConfig | None:
        """Returns the configuration that a program gives as an object or as a dict. Raises ConfigError."""
        if given is None or isinstance(given, SpeculativeConfig):
            return given
        known = [field.name for field in fields(cls)]
        for name in given:
            if name not in known:
                raise ConfigError(f"{NAME}: {name!r} is not known. Known: {', '.join(known)}.")
        if "method" not in given:
            raise ConfigError(f"{NAME}: method is missing. Give method='ngram'.")
        return cls(**given)  # type: ignore[arg-type]  # The constructor checks each value.


_BOUNDS = {
    "num_speculative_tokens": Range(1, 8),
    "prompt_lookup_max": Range(1, 16),
    "prompt_lookup_min": Range(1, 16),
}
