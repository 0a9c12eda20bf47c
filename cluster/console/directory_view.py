"""Reads the console's data from the directory: a page of adapters, where they are, and the open commands."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping

from lorafleet.cluster.catalogue.catalogue_records import AdapterRecord
from lorafleet.cluster.console.view import (
    AdapterView,
    DirectoryView,
    MoveView,
    ReplicaState,
    SortOrder,
    VersionView,
    Viewer,
    ViewQuery,
)
from lorafleet.cluster.directory.directory import AdapterDirectory
from lorafleet.cluster.directory.slices import in_slices
from lorafleet.cluster.routing.routing import Tier
from lorafleet.protocol.errors import QueueFull
from lorafleet.protocol.lora_request import LoRARequest, turn_group
from lorafleet.protocol.names import OWNED, PAST_ALL, full_name, past_names_of, tenant_of
from lorafleet.sandbox.job_turns import JobTurns, NoRoom, TurnLimits

STEP = 200  # Names examined before other work may run.
MAX_ORDERS = 200  # Commands that are shown.
SEARCHES = TurnLimits(running=1, waiting=16, waiting_in_all=64)  # Each examines all names; tenants take turns.
ALL = 1 << 62


class DirectoryWindow:
    """Reads the directory's data on its event loop, and changes nothing."""

    def __init__(self, directory: AdapterDirectory) -> None:
        self._directory = directory
        self._searches = JobTurns(SEARCHES)

    async def view(self, query: ViewQuery, viewer: Viewer) -> DirectoryView:
        names, has_more = await self._names(query, viewer)
        adapters = [view for name in names if (view := self.adapter(name, viewer)) is not None]
        directory = self._directory
        known = sorted(directory.replicas.live())
        if query.replica:
            shown = [replica_id for replica_id in known if replica_id == query.replica]
        else:
            shown = [replica_id for replica_id in known if replica_id > query.replicas_after][: query.replica_limit]
        pinned = directory.pins()
        num_adapters = len(directory.catalogue.state.adapters) + len(directory.names.found)
        return DirectoryView(
            adapters=adapters,
            has_more=has_more,
            num_adapters=num_adapters if viewer.sees_all else None,
            replicas=[self._replica(replica_id, pinned, viewer) for replica_id in shown],
            num_replicas=len(known),
            more_replicas=bool(shown) and not query.replica and shown[-1] != known[-1],
            names=self._names_held(shown, viewer),
            orders=self._orders(viewer),
            failures=directory.replicas.failures.of(viewer.tenant, of_all=viewer.sees_all),
        )

    def adapter(self, name: str, viewer: Viewer) -> AdapterView | None:
        """Returns the adapter that has this name or alias, or None if there is none or the viewer may not see it."""
        owner = self._owner(name)
        if owner is None or not (self._is_visible(name, viewer) and self._is_visible(owner, viewer)):
            return None
        name = owner
        adapter = self._directory.catalogue.state.adapters.get(name)
        if adapter is not None:
            return self._of_catalogue(adapter, viewer)
        resolved = self._directory.names.found.by_name.get(name)
        return self._of_resolver(resolved, viewer) if resolved is not None else None

    async def _names(self, query: ViewQuery, viewer: Viewer) -> tuple[list[str], bool]:
        """Returns the names of the adapters on the page, and whether there are more after it."""
        if query.names is not None:
            owners = (self._owner(name) for name in query.names)
            return list(dict.fromkeys(name for name in owners if name is not None)), False
        page: list[str] = []
        if not query.search:
            after = viewer.naming(query.after)
            candidates = self._candidates(after, viewer, query.limit + 1, query.public_after)
            await in_slices(self._gather(candidates, query, viewer, page))
            return page[: query.limit], len(page) > query.limit
        try:
            async with self._searches.turn(turn_group(viewer.tenant, None)):
                await in_slices(self._gather(self._candidates("", viewer, ALL), query, viewer, page))
        except NoRoom as full:
            raise QueueFull(f"The console cannot search now: {full}. Try again.") from None
        return page[: query.limit], len(page) > query.limit

    def _candidates(self, after: str, viewer: Viewer, limit: int, public_after: str = "") -> Iterator[str]:
        """Yields the first names after `after`, which is the viewer's name for an adapter, from each range that it
        may see.

        These are the names of adapters and of what resolvers found. If all names are wanted, aliases are included.
        """
        spans = [(after, PAST_ALL)] if viewer.sees_all else [(max(after, public_after), OWNED)]
        if not viewer.sees_all and viewer.tenant is not None:
            spans.append((full_name(viewer.tenant, after), past_names_of(viewer.tenant)))
        state, found = self._directory.catalogue.state, self._directory.names.found
        indexes = [state.adapter_names, found.index, *([state.alias_names] if limit == ALL else [])]
        for begin, end in spans:
            for index in indexes:
                yield from index.between(begin, end, limit)

    def _gather(self, candidates: Iterator[str], query: ViewQuery, viewer: Viewer, page: list[str]) -> Iterator[None]:
        """Fills `page` with the first limit + 1 names, sorted by the viewer's names. Only few names need the slower
        checks."""
        wanted, shown = query.search.casefold(), viewer.naming
        after = shown(query.after)
        for index, candidate in enumerate(candidates):
            if index % STEP == 0:
                yield
            if wanted not in candidate.casefold():
                continue
            name = self._owner(candidate) if wanted else candidate
            if name is None or (called := shown(name)) <= after or self._is_passed(name, query):
                continue
            if len(page) > query.limit and called >= shown(page[-1]):
                continue
            place = bisect.bisect_left(page, called, key=shown)
            if page[place : place + 1] != [name] and self._is_visible(name, viewer):
                page.insert(place, name)
                del page[query.limit + 1 :]

    def _is_passed(self, name: str, query: ViewQuery) -> bool:
        return tenant_of(name) is None and name <= query.public_after

    def _owner(self, name: str) -> str | None:
        """Returns the adapter that has this name or alias, or None."""
        state = self._directory.catalogue.state
        if name in state.adapters or name in self._directory.names.found:
            return name
        return state.owner_name(name)

    def _is_visible(self, name: str, viewer: Viewer) -> bool:
        """Returns whether the viewer sees the adapter. A tenant's own adapter hides a public one of the same name,
        which its requests do not reach."""
        own = full_name(viewer.tenant, name)
        hidden = own != name and tenant_of(name) is None and own in self._directory.catalogue.state.adapters
        return viewer.may_see(name) and not hidden

    def _of_catalogue(self, adapter: AdapterRecord, viewer: Viewer) -> AdapterView:
        versions = [
            VersionView(
                version.number,
                version.digest,
                *self._where(version.digest),
                version.rank,
                version.num_bytes,
                version.created_s,
                version.source if viewer.sees_all else "",
                version.metadata,
            )
            for version in adapter.versions
        ]
        aliases = {
            alias: [MoveView(move.at_s, {str(s.version): s.weight for s in move.shares}) for move in moves]
            for alias, moves in adapter.aliases.items()
        }
        return AdapterView(adapter.name, versions, aliases, adapter.pinned_replicas, adapter.removing)

    def _of_resolver(self, lora: LoRARequest, viewer: Viewer) -> AdapterView:
        source = lora.lora_path if viewer.sees_all else ""
        version = VersionView(None, lora.digest, *self._where(lora.digest), source=source)
        return AdapterView(lora.lora_name, [version], {}, found=True)

    def _where(self, digest: str) -> tuple[tuple[str, ...], dict[str, Tier]]:
        residency = self._directory.residency
        return residency.homes(digest), dict(residency.holders(digest))

    def _replica(self, replica_id: str, pinned: Mapping[str, tuple[str, ...]], viewer: Viewer) -> ReplicaState:
        directory = self._directory
        return ReplicaState(
            replica_id,
            directory.replicas.is_ready(replica_id),
            directory.replicas.is_draining(replica_id),
            directory.residency.loads.get(replica_id) if viewer.sees_all else None,
            [digest for digest, replica_ids in pinned.items() if replica_id in replica_ids],
        )

    def _names_held(self, replicas: list[str], viewer: Viewer) -> dict[str, str]:
        """Returns a name for each digest that the replicas have. If several adapters have the same bytes, the first
        one gives the name."""
        residency, names = self._directory.residency, dict[str, str]()
        for digest in {digest for replica_id in replicas for digest in residency.held(replica_id)}:
            name = self._name(digest, viewer)
            if name is not None:
                names[digest] = name
        return names

    def _name(self, digest: str, viewer: Viewer) -> str | None:
        for name in self._directory.names.owners(digest):
            if self._is_visible(name, viewer):
                return name
        return None

    def _orders(self, viewer: Viewer) -> list[SortOrder]:
        orders = [
            SortOrder(replica, self._owner(lora.lora_name) or lora.lora_name, lora.digest, kind, since_s)
            for replica, kind, lora, since_s in self._directory.replicas.open_orders()
            if viewer.may_see(lora.lora_name)
        ]
        return sorted(orders, key=lambda order: order.since_s)[:MAX_ORDERS]
