"""Carries out the verbs of administrators (protocol/admin_verbs.py) in the directory's process.

When a call returns, its change is durable and known to every replica. A call that fails says which replica failed and
why, and leaves the catalogue as it was. HTTP, command line and actor handle all send their messages here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TypeVar, assert_never

import msgspec

from lorafleet.cluster.admin.adapter_changes import AdapterChanges
from lorafleet.cluster.admin.engine_orders import EngineOrders
from lorafleet.cluster.admin.listed_adapters import ListedAdapters
from lorafleet.cluster.admin.located_files import located
from lorafleet.cluster.admin.pins import AdapterPins
from lorafleet.cluster.admin.registration import Registration, moved_unless_there
from lorafleet.cluster.admin.removals import Removals
from lorafleet.cluster.admin.replica_orders import ReplicaOrders
from lorafleet.cluster.admin.shown_adapter import shown, shown_page
from lorafleet.cluster.admin.verification import Verification
from lorafleet.cluster.catalogue.catalogue_records import (
    AdapterRecord,
    Share,
    VersionRecord,
    rolled_back,
    taken,
    without_alias,
)
from lorafleet.cluster.catalogue.stored_files import StoredFiles
from lorafleet.cluster.directory.directory import AdapterDirectory
from lorafleet.cluster.directory.slices import in_slices
from lorafleet.cluster.directory.task_leases import TaskLeases
from lorafleet.protocol import admin_verbs as verbs
from lorafleet.protocol.admin_answers import Prefetched, Removed, Verified
from lorafleet.protocol.admin_verbs import REMOVE_S, DirectoryVerb, RegisterAdapter, Verb
from lorafleet.protocol.errors import InvalidRequest, LorafleetError
from lorafleet.protocol.limits import MAX_ADAPTERS_LISTED
from lorafleet.protocol.names import PAST_ALL, check_full_name, full_name, past_names_of

AnswerT = TypeVar("AnswerT")


class Administration:
    def __init__(self, directory: AdapterDirectory, base_names: Collection[str]) -> None:
        self._directory = directory
        self._base_names = base_names
        files = StoredFiles(directory.catalogue)
        self._replicas = ReplicaOrders(directory)
        self._pins = AdapterPins(directory, self._replicas)
        self._changes = AdapterChanges(directory, self._pins.follow)
        self._removals = Removals(directory, self._changes, self._replicas, files)
        self._engines = EngineOrders(directory, self._replicas)
        self._registration = Registration(
            directory, base_names, self._changes, self._replicas, files, self._removals, self._engines
        )
        self._listed = ListedAdapters(directory, self._changes, self._removals, self._registration.check_owner)
        self._verification = Verification(directory.catalogue)
        self._leases = TaskLeases()
        self._files = files
        directory.on_replicas = self._follow_replicas
        directory.pins = self._pins.replicas_by_digest
        directory.catalogue.on_others = self._follow_others

    async def carry_out(self, verb: Verb[AnswerT]) -> AnswerT:
        """Carries out a verb of DirectoryVerb, and returns its answer, with full names."""
        answer_type = verb.answer_type()
        assert isinstance(verb, DirectoryVerb), verb
        answer = await self._answer(verb)
        assert isinstance(answer, answer_type), answer
        return answer

    async def _answer(self, verb: DirectoryVerb) -> object:
        match verb:
            case verbs.ListAdapters(after, limit):
                return shown_page(await self.list_adapters(after, limit), limit)
            case verbs.ListOwned(after, limit, tenant):
                return shown_page(await self.list_adapters(after, limit, tenant), limit)
            case verbs.ShowAdapter(name):
                return shown(await self.show(name))
            case verbs.LocateAdapter(name, version):
                return located(self._directory, name, version)
            case RegisterAdapter():
                return shown(await self.push(verb))
            case verbs.PreloadAdapter():
                await self._registration.preload(verb)
                return None
            case verbs.PushMemory(name, memory, terms):
                return shown(await self._registration.push_memory(name, memory, terms))
            case verbs.PushBytes(name, config, weights, terms):
                return shown(await self._registration.push_bytes(name, config, weights, terms))
            case verbs.PushFolder(name, path, terms):
                return shown(await self._registration.push_folder(name, path, terms))
            case verbs.MoveAlias(name, alias):
                shares = [Share(version, weight) for version, weight in verb.weights().items()]
                return shown(await self.alias(name, shares, alias))
            case verbs.RemoveAlias(name, alias):
                return shown(await self.unalias(name, alias))
            case verbs.RollBackAlias(name, alias):
                return shown(await self.rollback(name, alias))
            case verbs.PinAdapter(name, replicas):
                return shown(await self.pin(name, replicas))
            case verbs.UnpinAdapter(name):
                return shown(await self.unpin(name))
            case verbs.PrefetchAdapter(name, replicas):
                return Prefetched(name, await self.prefetch(name, replicas))
            case verbs.VerifyAdapter(name):
                return Verified(name, [version.number for version in await self.verify(name)])
            case verbs.RemoveAdapter(name, wait_s):
                await self.remove(name, wait_s)
                return Removed("adapter", name, True)
            case verbs.SeedAdapter(lora, info, application):
                return verbs.Seeded(await self._listed.seed(lora, info, application))
            case verbs.UnlistAdapters(application, listed):
                return verbs.Unlisted(await self._listed.unlist(application, listed))
            case verbs.ControlEngines(control):
                return verbs.Controlled(await self._engines.order_all(control))
            case verbs.TakeLease(task, replica_id, for_s):
                return self._leases.take(task, replica_id, for_s)
            case _:
                assert_never(verb)

    def resume(self) -> None:
        """Continues the removals that had begun before a restart."""
        self._removals.resume()

    async def list_adapters(self, after: str = "", limit: int = 100, tenant: str | None = None) -> list[AdapterRecord]:
        """Returns the first adapters behind the name `after`, in the order of their names. If a tenant is given,
        returns only the adapters that it owns. Raises InvalidRequest if the limit is out of range."""
        if not 1 <= limit <= MAX_ADAPTERS_LISTED:
            raise InvalidRequest(
                f"limit is {limit}; it must be 1 to {MAX_ADAPTERS_LISTED}. Request further pages with `after`.", "limit"
            )
        found: list[AdapterRecord] = []
        await in_slices(self._list(after, limit, tenant, found))
        return found

    def _list(self, after: str, limit: int, tenant: str | None, found: list[AdapterRecord]) -> Iterator[None]:
        """Appends the adapters to `found`, in short steps. An adapter that is being removed no longer belongs to its
        tenant."""
        state = self._directory.catalogue.state
        end = PAST_ALL if tenant is None else past_names_of(tenant)
        position = after if tenant is None else max(after, full_name(tenant, ""))
        while len(found) < limit and (names := state.adapter_names.between(position, end, limit)):
            for name in names[: limit - len(found)]:
                position = name
                adapter = state.adapters.get(name)
                if adapter is not None and (tenant is None or not adapter.removing):
                    found.append(adapter)
                yield

    async def show(self, name: str) -> AdapterRecord:
        return self._changes.find(name)

    async def verify(self, name: str) -> list[VersionRecord]:
        """Reads the files of every version again, and returns the versions. Raises AdapterChanged."""
        adapter = self._changes.find(name)
        await self._verification.verify(adapter)
        return list(adapter.versions)

    async def push(self, pushed: RegisterAdapter) -> AdapterRecord:
        return await self._registration.push(pushed)

    async def alias(self, name: str, shares: list[Share], alias: str | None = None) -> AdapterRecord:
        """Moves the alias, by default the adapter's own name, to these shares of the adapter's versions."""
        alias = alias or name
        check_full_name(alias, self._base_names)
        return await self._changes.edit(name, lambda adapter: self._moved(adapter, alias, tuple(shares)))

    async def unalias(self, name: str, alias: str) -> AdapterRecord:
        return await self._changes.edit(name, lambda adapter: without_alias(adapter, alias))

    async def rollback(self, name: str, alias: str | None = None) -> AdapterRecord:
        """Moves the alias back to what it stood for before its last move."""
        return await self._changes.edit(name, lambda adapter: rolled_back(adapter, alias or name))

    async def pin(self, name: str, num_replicas: int = 1) -> AdapterRecord:
        """Pins the versions behind the adapter's aliases in slots of `num_replicas` replicas. Restores the former
        number of replicas if a pin fails."""
        before = self._changes.find(name).pinned_replicas
        await self._replicas.homes(name, num_replicas)
        await self._set_pinned(name, num_replicas)
        try:
            await self._pins.confirm(self._changes.find(name))
        except LorafleetError:
            await self._set_pinned(name, before)
            raise
        return self._changes.find(name)

    async def unpin(self, name: str) -> AdapterRecord:
        return await self._set_pinned(name, 0)

    async def prefetch(self, name: str, num_replicas: int = 1) -> list[str]:
        """Loads the versions behind the adapter's aliases on `num_replicas` replicas, and returns these replicas."""
        adapter = self._changes.find(name)
        holders: list[str] = []
        for number in sorted(adapter.served()):
            lora = self._directory.catalogue.state.request(name, adapter.version(number))
            holders = await self._replicas.homes(name, num_replicas)
            await self._replicas.order_all("load", lora, holders)
        return holders

    async def remove(self, name: str, wait_s: float = REMOVE_S) -> None:
        await self._removals.remove(name, wait_s)

    async def collect_files(self) -> None:
        """Deletes the files that no version names. Called periodically. Raises StoreError."""
        await self._files.collect()

    def _follow_replicas(self) -> None:
        self._pins.follow()
        self._engines.follow()

    def _follow_others(self, before: list[AdapterRecord]) -> None:
        """Follows changes by another server of the same catalogue. `before` holds the adapters as they were."""
        self._pins.follow()
        self._removals.follow_others(before)

    def _moved(self, adapter: AdapterRecord, alias: str, shares: tuple[Share, ...]) -> AdapterRecord | None:
        state = self._directory.catalogue.state
        owner = state.owner(alias)
        if owner is not None and owner.name != adapter.name:
            raise taken(alias, owner.name)
        if alias != adapter.name and alias in state.adapters:
            raise taken(alias, alias)
        there = moved_unless_there(adapter, alias, shares)
        return None if there == adapter else there

    async def _set_pinned(self, name: str, num_replicas: int) -> AdapterRecord:
        return await self._changes.edit(
            name, lambda adapter: msgspec.structs.replace(adapter, pinned_replicas=num_replicas)
        )
