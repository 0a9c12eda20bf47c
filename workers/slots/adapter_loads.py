"""Reads adapters on all ranks of a replica at once. An adapter is read once every rank has its part of the same
bytes.

Requests for the same adapter with the same permission to read it share one load. loader.py does the reading of this
rank, and workers/follower.py that of the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from lorafleet.protocol.errors import AdapterChanged, LorafleetError, from_wire
from lorafleet.protocol.lora_request import AdapterInfo, LoRARequest, SealedAdapter
from lorafleet.protocol.messages import AdapterMove, Tier
from lorafleet.workers.base_identity import BaseIdentity
from lorafleet.workers.slots.loader import AdapterLoader
from lorafleet.workers.slots.packed_adapter import PackedAdapter
from lorafleet.workers.tp.link import OtherRanks
from lorafleet.workers.tp.rank_messages import ForgetShard, LoadShard

_LoadKey = tuple[str, str, str | None, SealedAdapter | None]


def _key(lora: LoRARequest) -> _LoadKey:
    return lora.digest, lora.lora_path, lora.within, lora.memory


@dataclass(slots=True)
class AdapterLoad:
    """The load of one adapter on all ranks."""

    lora: LoRARequest
    tenant: str  # Tenant that brings the adapter in.
    source: Tier  # Where its files are.
    future: Future[PackedAdapter]
    started_s: float
    base_digest: str  # Of the base's weights when the load began.
    awaited: set[int] = field(default_factory=set)  # Other ranks that have not answered.
    error: LorafleetError | None = None  # First error of another rank.
    digests: set[str] = field(default_factory=set)  # Digests that the other ranks have read.
    callers: list[Future[AdapterInfo]] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return self.future.done() and not self.awaited

    def outcome(self) -> PackedAdapter | LorafleetError:
        """Returns the adapter if every rank has its part of the same one, otherwise the error. Call it once `done`."""
        error = self.future.exception() or self.error
        if error is not None:
            assert isinstance(error, LorafleetError), error  # the loader raises no others
            return error
        adapter = self.future.result()
        if self.digests - {adapter.info.digest}:
            return AdapterChanged(
                f"adapter {self.lora.lora_name!r} is not the same on all ranks of its replica: the files changed while "
                "they were read. Load it again."
            )
        return adapter

    def moves(self, outcome: PackedAdapter | LorafleetError, seconds: float) -> list[AdapterMove]:
        """Returns the moves between tiers of a load that has taken this long."""
        name = self.lora.lora_name
        if isinstance(outcome, LorafleetError):
            return [AdapterMove(name, self.source, "cpu", seconds, type(outcome).__name__)]
        fetch_s = outcome.times.fetch_s
        fetched = [AdapterMove(name, "remote", "disk", fetch_s)] if self.source == "remote" else []
        return [*fetched, AdapterMove(name, "disk", "cpu", seconds - fetch_s)]


class AdapterLoads:
    """The loads in progress.

    Args:
        others: The replica's other ranks, which read their parts of the same adapters.
        wake: Called from a pool thread when a load has ended on this rank.
        base: Says for which weights of the base the adapters are packed.
    """

    def __init__(
        self, loader: AdapterLoader, others: OtherRanks | None, wake: Callable[[], None], base: BaseIdentity
    ) -> None:
        self._loader = loader
        self._base = base
        self._others = others
        self._wake = wake
        self._loads: dict[_LoadKey, AdapterLoad] = {}
        self._on_others: dict[int, AdapterLoad] = {}  # By id, those that other ranks have not finished.
        self._num_started = 0

    def __len__(self) -> int:
        return len(self._loads)

    def __contains__(self, lora: LoRARequest) -> bool:
        return _key(lora) in self._loads

    def is_reading(self, digest: str) -> bool:
        """Returns whether a load that was requested for this digest is in progress."""
        return any(requested == digest for requested, *_ in self._loads)

    def start(self, lora: LoRARequest, tenant: str) -> AdapterLoad:
        """Starts to load an adapter for the tenant, or returns the load that is in progress."""
        load = self._loads.get(_key(lora))
        if load is None:
            source, began_s = self.tier_of_files(lora), time.monotonic()
            load = AdapterLoad(lora, tenant, source, self._loader.submit(lora), began_s, self._base.digest)
            self._loads[_key(lora)] = load
            load.future.add_done_callback(lambda _: self._wake())
            if self._others is not None:
                self._num_started += 1
                load.awaited = set(self._others.ranks)
                self._on_others[self._num_started] = load
                self._others.send(LoadShard(self._num_started, lora))
        return load

    def tier_of_files(self, lora: LoRARequest) -> Tier:
        return "disk" if self._loader.is_here(lora) else "remote"

    def take_ended(self) -> list[AdapterLoad]:
        """Returns the loads that have ended on all ranks since the last call. Those that may have computed from former
        weights of the base begin again instead."""
        self._take_answers()
        ended = [self._loads.pop(key) for key in [key for key, load in self._loads.items() if load.done]]
        for load in ended:
            if load.base_digest != self._base.digest:
                self._repeat(load)
        return [load for load in ended if load.base_digest == self._base.digest]

    def _repeat(self, load: AdapterLoad) -> None:
        if self._others is not None:
            for digest in load.digests:
                self._others.send(ForgetShard(digest))
        self.start(load.lora, load.tenant).callers.extend(load.callers)

    def _take_answers(self) -> None:
        for answer in () if self._others is None else self._others.loaded():
            load = self._on_others[answer.load_id]
            load.awaited.discard(answer.rank)
            if answer.error is not None:
                load.error = load.error or from_wire(answer.error)
            else:
                load.digests.add(answer.digest)
            if not load.awaited:
                del self._on_others[answer.load_id]
