"""Administration from a replica's side: copies an adapter's files into the store, then asks the directory to serve it.

The files go straight from here to the store. The directory receives only their digest.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Protocol, TypeVar

from lorafleet.api.access.fair_threads import FairThreads, be_modest
from lorafleet.cluster.admin.downloading import AdapterDownloads
from lorafleet.cluster.admin.push_intake import PushIntake, taking_in
from lorafleet.cluster.admin.upload_tensors import tensor_budget
from lorafleet.cluster.catalogue.catalogue_files import stage
from lorafleet.cluster.catalogue.catalogue_store import Store
from lorafleet.cluster.receiving.group_orders import GroupDone, GroupLeave, GroupOrder
from lorafleet.cluster.receiving.tensor_receivers import TensorReceivers
from lorafleet.protocol.adapter_formats.adapter_files import AdapterFolder
from lorafleet.protocol.adapter_formats.announced_tensors import AnnouncedPush
from lorafleet.protocol.adapter_formats.tensor_push import PushedTensors, TensorSums
from lorafleet.protocol.admin_answers import Adapter
from lorafleet.protocol.admin_verbs import (
    PreloadAdapter,
    PushTerms,
    RegisterAdapter,
    SeedAdapter,
    UnlistAdapters,
    Verb,
)
from lorafleet.protocol.errors import AdapterMissing, InvalidRequest, StoreRefused
from lorafleet.protocol.lora_request import AdapterInfo, LoRARequest, turn_group
from lorafleet.protocol.names import check_full_name, tenant_of
from lorafleet.protocol.weights_group_place import WeightsGroupPlace
from lorafleet.resolvers.store import AdapterStore
from lorafleet.sandbox.job_turns import TurnLimits

# A push copies gigabytes, and may wait for its source for minutes. `running` limits the pushes of all tenants,
# `waiting` those of one tenant.
PUSHES = TurnLimits(running=4, waiting=128)
FOLLOWERS = 4  # Threads that work on the bytes of pushes from memory while these arrive.

T = TypeVar("T")


class Administer(Protocol):
    """Has Administration carry out a verb, in whichever process it runs."""

    async def __call__(self, verb: Verb[T], /) -> T: ...


class AdapterAdmin:
    """The administration of a replica.

    Args:
        administer: Sends a verb to Administration. Names in it are full names.
        application: Identifies this deployment; see SeedAdapter.
        sources: Opens the folder of a path or URI.
        receivers: Receive tensors that do not come in a request's body. None: those of a server without a GPU, from
            this machine.
    """

    def __init__(
        self,
        administer: Administer,
        store: Store,
        base_names: list[str],
        application: str,
        sources: AdapterStore,
        receivers: TensorReceivers | None = None,
    ) -> None:
        self.administer = administer
        self._store = store
        self._base_names = base_names
        self._application = application
        self._sources = sources
        self._threads = FairThreads("pushes", PUSHES)
        self._followers = ThreadPoolExecutor(FOLLOWERS, "push-bytes", be_modest)
        self.downloads = AdapterDownloads(sources)
        self.tensor_budget = tensor_budget()
        self.receivers = receivers or TensorReceivers()

    async def run_in_turn(self, name: str, work: Callable[[], T]) -> T:
        """Runs a part of a push in a thread, for which tenants take turns. `name` is the adapter's full name, which
        says the tenant. Raises QueueFull if too many pushes of the tenant wait, and StoreRefused if the temporary
        folder is full."""

        def run() -> T:
            with as_store_error():
                return work()

        return await self._threads.run(turn_group(tenant_of(name), None), run)

    def close(self) -> None:
        self._threads.close()
        self._followers.shutdown(wait=False)
        self.downloads.close()

    async def push_folder(self, name: str, path: str, terms: PushTerms, within: str | None = None) -> Adapter:
        """Pushes an adapter from a URI or from a folder that this process can read. If `within` is given, the folder
        must lie in it. Raises AdapterError."""
        check_full_name(name, self._base_names)

        def put() -> str:
            return self._put_files(path, within)

        return await self._register(name, await self.run_in_turn(name, put), put, terms)

    def _put_files(self, path: str, within: str | None) -> str:
        with self._sources.open(path) as source, tempfile.TemporaryDirectory(prefix="lorafleet-push-") as folder:
            digest = stage(AdapterFolder.at(source, within), Path(folder))
            self._store.put_files(digest, Path(folder))
            return digest

    async def push_tensors(self, name: str, read: Callable[[], PushedTensors], terms: PushTerms) -> tuple[str, Adapter]:
        """Pushes the adapter that `read` returns in a thread. Returns its digest besides. Raises AdapterError."""
        self.check_name(name)
        pushed = await self.run_in_turn(name, read)
        async with taking_in(pushed.config, len(pushed.weights), self._store, self._followers) as intake:
            await self.run_in_turn(name, lambda: intake.add(pushed.weights))
            return await self.push_taken_in(name, intake, terms)

    def check_name(self, name: str) -> None:
        """Raises InvalidAdapterName if no adapter may have this full name."""
        check_full_name(name, self._base_names)

    def take_in(self, config: bytes, weights_bytes: int) -> AbstractAsyncContextManager[PushIntake]:
        """Opens an intake with checksums for an adapter that comes from memory; see taking_in(). Raises
        AdapterMalformed if the weights have too few bytes."""
        return taking_in(config, weights_bytes, self._store, self._followers, TensorSums(weights_bytes))

    async def push_taken_in(self, name: str, intake: PushIntake, terms: PushTerms) -> tuple[str, Adapter]:
        """Pushes an adapter whose bytes have all arrived. Returns its digest besides. Raises AdapterError.

        The replicas of this node load it from the shared memory while its files become durable. Other replicas read
        the files afterwards.
        """
        digest = await intake.content.digest()
        preload = PreloadAdapter(name, digest, await intake.seal(), terms)

        async def publish() -> None:
            await intake.content.written()
            await self.run_in_turn(name, lambda: intake.content.publish(digest))

        await asyncio.gather(publish(), self.administer(preload))

        def put_again() -> None:
            intake.content.put_again(self._store, digest)

        return digest, await self._register(name, digest, put_again, terms)

    async def join_group(self, place: WeightsGroupPlace) -> None:
        """Joins a trainer's process group here. A former group of this name ends, wherever its member is. Raises
        Forbidden, InvalidRequest and QueueFull."""
        self.receivers.groups.check(place)
        if not self.receivers.groups.has(place.name) and self.receivers.ask_members is not None:
            await self.receivers.ask_members(GroupLeave(place.name))
        await self.receivers.groups.join(place)

    async def order_group(self, order: GroupOrder) -> GroupDone:
        """Has the replica that is a group's member carry out an order, be it this one or another. Raises InvalidRequest
        if none is, and AdapterError."""
        done = await self.obey_group_order(order)
        if done is None and self.receivers.ask_members is not None:
            done = await self.receivers.ask_members(order)
        if done is None:
            raise InvalidRequest(
                f"There is no process group {order.group!r}. Join it with POST /init_weights_update_group first.",
                "group_name",
            )
        return done

    async def obey_group_order(self, order: GroupOrder) -> GroupDone | None:
        """Carries out an order if this replica is the group's member, and returns None if it is not."""
        groups = self.receivers.groups
        if not groups.has(order.group):
            return None
        if isinstance(order, GroupLeave):
            await groups.leave(order.group)
            return GroupDone()
        async with self._announced(order.push, f"process group {order.group!r}") as intake:
            await groups.receive(order.group, order.push, intake, order.timeout_s)
            return GroupDone(*await self.push_taken_in(order.name, intake, order.terms))

    async def push_from_device(
        self, name: str, device: str, push: AnnouncedPush, terms: PushTerms
    ) -> tuple[str, Adapter]:
        """Pushes an adapter out of memory of a GPU of this node. Returns its digest besides. Raises InvalidRequest and
        AdapterError."""
        async with self._announced(push, f"trainers on {device}") as intake:
            await self.receivers.devices.receive(device, push, intake)
            return await self.push_taken_in(name, intake, terms)

    @asynccontextmanager
    async def _announced(self, push: AnnouncedPush, owner: str) -> AsyncIterator[PushIntake]:
        """Opens an intake that has the header, and whose tensors a receiver writes. Its bytes count here, where its
        memory is, whichever replica has the request. Raises QueueFull and Overloaded."""
        weights_bytes = push.file.num_bytes
        self.tensor_budget.add(owner, weights_bytes)
        try:
            async with taking_in(push.config, weights_bytes, self._store, self._followers) as intake:
                intake.add(push.file.header)
                yield intake
        finally:
            self.tensor_budget.remove(owner, weights_bytes)

    async def _register(self, name: str, digest: str, put_again: Callable[[], object], terms: PushTerms) -> Adapter:
        """Asks the directory to serve files that are in the store.

        A removal of the same bytes may have deleted them since. The directory waits for it and then misses the files,
        so they are put once more.
        """
        try:
            return await self.administer(RegisterAdapter(name, digest, terms))
        except AdapterMissing:
            await self.run_in_turn(name, put_again)
            return await self.administer(RegisterAdapter(name, digest, terms))

    async def seed(self, lora: LoRARequest, info: AdapterInfo) -> LoRARequest | None:
        return (await self.administer(SeedAdapter(lora, info, self._application))).lora

    async def unlist(self, listed: Collection[str]) -> list[str]:
        """Removes the adapters that the application has listed before, except `listed`. Returns their names."""
        return (await self.administer(UnlistAdapters(self._application, tuple(listed)))).names


@contextmanager
def as_store_error() -> Iterator[None]:
    """Converts an OSError to StoreRefused, as a fault of the disk that files are copied to.

    Faults of the files that are read have errors of their own.
    """
    try:
        yield
    except OSError as error:
        raise StoreRefused(
            f"The adapter's files cannot be copied to the temporary folder: {error.strerror or error}. Nothing was "
            "pushed. Free some space there, or set TMPDIR to another folder."
        ) from error
