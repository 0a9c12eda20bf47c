"""Makes a torch.distributed group of a trainer and a server beside the groups that a process has already.

The group is that of vLLM's and SGLang's trainers: a TCP store of rank 0, the group's name as the prefix of its keys,
and NCCL or gloo. So a trainer of theirs meets a server of ours in it.
"""

from __future__ import annotations

from concurrent.futures import Future
from datetime import timedelta

import torch
from torch import Tensor
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore, ProcessGroup, Store, TCPStore
from torch.distributed import distributed_c10d as c10d

from lorafleet.protocol.weights_group_place import GroupBackend, WeightsGroupPlace

_JOINED = "lorafleet/joined"
_READY = "lorafleet/ready/"


class WeightsGroupMember:
    """A member of a group whose rank 0 broadcasts tensors."""

    def __init__(self, group: ProcessGroup, store: Store, backend: GroupBackend) -> None:
        self._group = group
        self._store = store
        self._is_on_gpu = backend == "nccl"

    def wait_for_gpu(self) -> None:
        """Waits until this process's GPU has written what is to be sent, on whichever stream."""
        if self._is_on_gpu:
            torch.cuda.synchronize()

    def broadcast(self, tensors: list[Tensor]) -> None:
        """Sends or receives contiguous tensors, one broadcast each. On a GPU they are complete in the order of the
        current stream."""
        options = BroadcastOptions()
        options.rootRank = 0
        for work in [self._group.broadcast([tensor], options) for tensor in tensors]:
            work.wait()

    def say_ready(self, push: int) -> None:
        """Says that this member waits for the broadcasts of a push, by its number."""
        self._store.set(f"{_READY}{push}", "1")

    def is_ready(self, push: int) -> bool:
        """Returns whether a receiver has called say_ready()."""
        return self._store.check([f"{_READY}{push}"])

    def abort_if_running(self, sending: Future[None]) -> None:
        """Ends broadcasts that nobody receives any more, so that their thread can end."""
        if not sending.done() and self._is_on_gpu:
            self._group.abort()

    def destroy(self) -> None:
        c10d.destroy_process_group(self._group)


def open_store(place: WeightsGroupPlace) -> tuple[Store, int]:
    """Returns the group's store and its port. Rank 0 listens at the port, or at any free one if it is 0, and waits for
    nobody. Raises torch's DistError or RuntimeError."""
    is_first, timeout = place.rank == 0, timedelta(seconds=place.timeout_s)
    store = TCPStore(place.host, place.port, place.world_size, is_first, timeout, wait_for_workers=not is_first)
    return PrefixStore(place.name, store), store.port


def say_joined(store: Store) -> None:
    """Says that a receiver has reached the store."""
    store.set(_JOINED, "1")


def has_joined(store: Store) -> bool:
    return store.check([_JOINED])


def join_group(place: WeightsGroupPlace, store: Store) -> WeightsGroupMember:
    """Returns this member once all members have joined. Raises torch's DistError or RuntimeError."""
    # The public constructors make groups of processes that share one default group. A trainer and a server share none.
    group, _ = c10d._new_process_group_helper(
        place.world_size,
        place.rank,
        [],
        place.backend,
        store,
        group_name=place.name,  # type: ignore[arg-type]  # A str, for which older versions have no type of its own.
        timeout=timedelta(seconds=place.timeout_s),
    )
    c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(place.world_size)}
    return WeightsGroupMember(group, store, place.backend)
