"""One rank's part of a model that runs as transformers' module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from lorafleet.workers.bases.projection import Projection
from lorafleet.workers.models.generic.generic_config import GenericConfig
from lorafleet.workers.tp.own_parts import own_input, own_outputs, own_vocabulary, vocab_per_rank


@dataclass(frozen=True, slots=True)
class GenericShard:
    """One rank's part of a model, as the plan in its config divides it."""

    rank: int
    size: int
    whole: GenericConfig
    local: GenericConfig  # with this rank's heads

    @classmethod
    def of(cls, config: GenericConfig, rank: int, size: int) -> GenericShard:
        """Returns the part of one rank. Raises ConfigError if the model cannot be divided this way."""
        config.plan.check(config.architecture, config.attention, size)
        local = replace(config, attention=config.plan.local(config.attention, size))
        return cls(rank, size, config, local)

    @property
    def vocabulary(self) -> slice:
        return own_vocabulary(self.whole.vocab_size, self.rank, self.size)

    @property
    def vocab_per_rank(self) -> int:
        return vocab_per_rank(self.whole.vocab_size, self.size)

    @property
    def of_expert(self) -> slice:
        raise AssertionError("adapters do not reach experts here")

    @property
    def whole_of_expert(self) -> int:
        raise AssertionError("adapters do not reach experts here")

    @property
    def projections(self) -> Mapping[str, Projection]:
        return self.whole.plan.projections

    def is_row_parallel(self, projection: str) -> bool:
        return self.projections[projection].split == "inputs"

    def outputs(self, projection: str) -> tuple[slice, ...]:
        return own_outputs(self.projections[projection], self.rank, self.size)

    def input(self, projection: str) -> slice:
        return own_input(self.projections[projection], self.rank, self.size)
