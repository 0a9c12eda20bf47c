"""Defines what the engine asks about the part of a model that one rank holds, whichever implementation runs it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from lorafleet.workers.bases.projection import Projection
from lorafleet.workers.bases.served_config import ServedConfig


class ModelShard(Protocol):
    """One rank's part of a model. Shard divides our own decoder, and GenericShard transformers' modules."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def whole(self) -> ServedConfig: ...

    @property
    def local(self) -> ServedConfig: ...

    @property
    def vocabulary(self) -> slice: ...

    @property
    def vocab_per_rank(self) -> int: ...

    @property
    def projections(self) -> Mapping[str, Projection]: ...

    @property
    def whole_of_expert(self) -> int: ...

    @property
    def of_expert(self) -> slice: ...

    def outputs(self, projection: str) -> tuple[slice, ...]: ...

    def is_row_parallel(self, projection: str) -> bool: ...

    def input(self, projection: str) -> slice: ...
