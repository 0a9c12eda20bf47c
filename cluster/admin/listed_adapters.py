"""Registers the adapters that an application lists in lora_modules, and removes those that it lists no more.

An application's marks (AdapterRecord.seeded_by) say which adapters it has listed, and with which path. A replica that
starts again finds its own mark and leaves later changes alone. A deploy with another path has another mark.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Collection
from functools import partial

import msgspec

from lorafleet.cluster.admin.adapter_changes import AdapterChanges
from lorafleet.cluster.admin.removals import Removals
from lorafleet.cluster.catalogue.catalogue_records import (
    AdapterRecord,
    RemovalRecord,
    Share,
    VersionRecord,
    moved,
    next_number,
    version_of_digest,
    with_version,
)
from lorafleet.cluster.directory.directory import AdapterDirectory
from lorafleet.protocol.errors import ModelNotFound
from lorafleet.protocol.lora_request import AdapterInfo, LoRARequest

logger = logging.getLogger("lorafleet.cluster")


class ListedAdapters:
    """The adapters of lora_modules.

    Args:
        check_owner: Raises AdapterExists if a name is an alias of another adapter.
    """

    def __init__(
        self,
        directory: AdapterDirectory,
        changes: AdapterChanges,
        removals: Removals,
        check_owner: Callable[[str], None],
    ) -> None:
        self._directory = directory
        self._catalogue = directory.catalogue
        self._changes = changes
        self._removals = removals
        self._check_owner = check_owner

    async def seed(self, lora: LoRARequest, info: AdapterInfo, application: str) -> LoRARequest | None:
        """Registers an adapter that a replica has read from its own path. Known bytes add no version, and new ones
        become a new version. Returns what its name stands for, or None if it was removed after the application had
        listed it with this path."""
        mark = _mark(application, lora)

        def decide(present: AdapterRecord | None) -> AdapterRecord | None:
            if present is None:
                self._check_owner(lora.lora_name)
            elif present.seeded_by == mark or (present.removing and _has_stored_files(present)):
                return None
            removed = self._catalogue.state.removed(lora.lora_name)
            if removed is not None and removed.seeded_by == mark:
                return None
            if present is not None and present.removing:  # Requests that began before it was removed still run.
                present = None
            adapter = msgspec.structs.replace(present or AdapterRecord(lora.lora_name), seeded_by=mark)
            has_moved = present is not None and _is_of(application, present.seeded_by)
            return _seeded(adapter, lora, info, has_moved=has_moved)

        await self._catalogue.change(lora.lora_name, decide)
        served = self._catalogue.state.served(lora.lora_name, 0)
        return served.loras[0] if served is not None else None

    async def unlist(self, application: str, listed: Collection[str]) -> list[str]:
        """Removes the adapters that the application has listed before and that are not in `listed`. Adapters whose name
        stands for a pushed version stay. Requests in flight end as they are. When this returns, every replica knows
        the names that are listed now. Returns the names that were removed."""
        names = [name for name, mark in self._catalogue.state.seeded.items() if _is_of(application, mark)]
        removed = []
        for name in sorted(set(names).difference(listed)):
            present = self._catalogue.state.adapters.get(name)
            if present is None or present.removing:  # An administrator has removed it. It may be listed again.
                await self._catalogue.change(name, partial(_forgotten, name))
                continue
            try:
                if _stands_for_pushed(present):
                    await self._changes.edit(name, _unmarked)
                else:
                    await self._removals.unlist(name)
                    removed.append(name)
                    logger.info("adapter %s is no longer listed in lora_modules, and was removed", name)
            except ModelNotFound:  # Another replica, or an administrator, was first.
                continue
        await self._directory.leases.acknowledged()
        return removed


def _mark(application: str, lora: LoRARequest) -> str:
    content = f"{lora.lora_path}\0{lora.base_model_name or ''}"
    return f"{application}:{hashlib.sha256(content.encode()).hexdigest()[:16]}"


def _is_of(application: str, mark: str | None) -> bool:
    return mark is not None and mark.rpartition(":")[0] == application


def _unmarked(adapter: AdapterRecord) -> AdapterRecord | None:
    return None if adapter.seeded_by is None else msgspec.structs.replace(adapter, seeded_by=None)


def _forgotten(name: str, present: AdapterRecord | None) -> AdapterRecord | RemovalRecord | None:
    return RemovalRecord(name) if present is None else _unmarked(present)


def _has_stored_files(adapter: AdapterRecord) -> bool:
    return any(not version.location for version in adapter.versions)


def _stands_for_pushed(adapter: AdapterRecord) -> bool:
    """Returns whether an alias stands for a version whose files are in the catalogue's store, since it was pushed."""
    return any(not adapter.version(number).location for number in adapter.served())


def _seeded(adapter: AdapterRecord, lora: LoRARequest, info: AdapterInfo, *, has_moved: bool) -> AdapterRecord:
    """Returns the adapter with the version that a replica has read from its own path.

    Args:
        has_moved: Whether a deploy has changed the path. The name then stands for that version again, even if its
            bytes are known, unless it stands for a pushed one.
    """
    known = version_of_digest(adapter, lora.digest)
    version = VersionRecord(
        known.number if known else next_number(adapter),
        lora.digest,
        lora.lora_path,
        info.rank,
        info.num_bytes,
        known.created_s if known else time.time(),
        location=lora.lora_path,
        base_model_name=lora.base_model_name,
        left_out=info.left_out,
    )
    shares = (Share(version.number, 1.0),)
    if known is None:
        return moved(with_version(adapter, version), lora.lora_name, shares, time.time())
    if known.location:  # Otherwise the catalogue has its files.
        versions = tuple(version if present is known else present for present in adapter.versions)
        adapter = msgspec.structs.replace(adapter, versions=versions)  # Its path may have changed.
    if has_moved and not _stands_for_pushed(adapter) and adapter.shares(lora.lora_name) != shares:
        return moved(adapter, lora.lora_name, shares, time.time())
    return adapter
