"""Holds the keys and tenants that are active in this process: read at the start, and again when the file changes.

A file that is unreadable or wrong changes nothing: the previous keys stay active, and the log and metrics say so.
The file's inode, times and size are polled. It is read once they have stayed the same for one poll, so that it is
not read in the middle of a write.
"""

from __future__ import annotations

import asyncio
import bisect
import logging
import os
from collections.abc import Iterator, Mapping
from operator import itemgetter
from pathlib import Path

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from lorafleet.api.access.gate import KnownKey
from lorafleet.api.access.work_threads import on_duty
from lorafleet.api.backend import StorageLimits
from lorafleet.cluster.tenancy.key_file import (
    HASH_PREFIX,
    KeyEntry,
    KeyFile,
    TenantEntry,
    outermost_prefixes,
    owners_of,
    parse,
    read,
)
from lorafleet.cluster.tenancy.key_source import is_key_text
from lorafleet.protocol.errors import ConfigError

POLL_S = 0.5

_Signature = tuple[int, int, int, int]

logger = logging.getLogger("lorafleet.cluster")


class KeyRing(Collector):
    """The active API keys and tenants. `source` is a path, or the content of such a file, which is never read again."""

    def __init__(self, source: str) -> None:
        self._num_reloads = {"ok": 0, "failed": 0}
        self._present: set[str] = set()  # Tenants in the file.
        self._left: set[str] = set()  # Tenants that were in it before.
        self.change_source(source)

    def change_source(self, source: str) -> None:
        """Reads the keys from another path or content. Raises ConfigError, and changes nothing, if they are invalid."""
        path = None if is_key_text(source) else Path(source)
        seen = _signature_of(path)
        self._adopt(parse(source, "LORAFLEET_API_KEYS") if path is None else read(path))
        self._path, self._seen = path, seen
        self._settling: _Signature | None = None
        self.broken = ""  # Why the current file is not active; "" if it is.

    def _adopt(self, file: KeyFile) -> None:
        callers = {key.hash.removeprefix(HASH_PREFIX): (file.caller_of(key), key) for key in file.keys}
        self.keys: Mapping[str, KnownKey] = {
            digest: KnownKey(caller, key.expires_s) for digest, (caller, key) in callers.items()
        }
        self.entries: Mapping[str, KeyEntry] = {caller.key_mark: key for caller, key in callers.values()}
        self.tenants: Mapping[str, TenantEntry] = {file.tenant_id(name): file.tenants[name] for name in file.tenants}
        self._holders = {name: file.tenant_id(name) for name in file.tenants}
        self._owners = outermost_prefixes((prefix, self._holders[name]) for prefix, name in owners_of(file.tenants))
        self._watch_returns(file.tenant_ids)

    def _watch_returns(self, present: set[str]) -> None:
        """Warns of tenants that had left the file and are in it again. They are the same tenants, unless the file says
        that others have their names now."""
        for tenant in sorted(present & self._left):
            logger.warning(
                "API keys: tenant %r had left the file, and is in it again. It is taken for the same tenant, whose "
                "adapters and files its keys open. If it is another one of that name, give it a `holder` of its own "
                "under `tenants`, such as %d.",
                tenant,
                self.tenant(tenant).holder + 1,
            )
        self._left = (self._left | self._present) - present
        self._present = present

    def tenant(self, tenant_id: str | None) -> TenantEntry:
        return self.tenants.get(tenant_id or "", _NOTHING_SAID)

    def id_of_tenant(self, name: str) -> str:
        return self._holders.get(name, name)

    def owner_of_name(self, name: str) -> str | None:
        return self._kept(name)[1]

    def kept_prefix(self, name: str) -> str:
        return name[: len(self._kept(name)[0])]

    def _kept(self, name: str) -> tuple[str, str | None]:
        """Returns the prefix that the name begins with and the tenant that owns it, or ("", None)."""
        lowered = name.lower()
        # No prefix lies within another, so only the last one that does not sort after the name can match.
        index = bisect.bisect_right(self._owners, lowered, key=itemgetter(0))
        prefix, tenant = self._owners[index - 1] if index else ("", None)
        return (prefix, tenant) if prefix and lowered.startswith(prefix) else ("", None)

    def place_of(self, tenant: str, source: str) -> str | None:
        """Returns the entry of the tenant's `sources` that allows this source, or None. An entry is the beginning of
        URIs, or a folder with everything in it."""
        places = self.tenant(tenant).sources
        if "://" in source:
            if ".." in source or "%" in source:
                return None
            return next(
                (place for place in places if "://" in place and source.startswith(place.rstrip("/") + "/")), None
            )
        if "\0" in source:
            return None
        real = Path(os.path.realpath(source))
        folders = (os.path.realpath(place) for place in places if "://" not in place)
        return next((folder for folder in folders if real.is_relative_to(folder)), None)

    def storage_limits(self, tenant: str | None) -> StorageLimits:
        limits = self.tenant(tenant).limits
        return StorageLimits(limits.adapters, limits.adapter_bytes)

    async def follow(self) -> None:
        """Polls the file for changes. Never returns."""
        while True:
            await asyncio.sleep(POLL_S)
            await on_duty(self.look)

    def look(self) -> None:
        """Reads the file again if it has changed, and has not changed further since the last poll."""
        signature = _signature_of(self._path)
        if signature == self._seen and not self._settling:
            return
        if signature != self._settling:
            self._settling = signature
            return
        self._seen, self._settling = signature, None
        assert self._path is not None
        try:
            self._adopt(read(self._path))
        except ConfigError as error:
            self._num_reloads["failed"] += 1
            self.broken = error.message
            logger.error("the API keys were not reloaded, and the previous ones stay active: %s", error.message)
            return
        self._num_reloads["ok"] += 1
        self.broken = ""
        logger.info("API keys: %d keys of %d tenants are active", len(self.keys), len(self.tenants))

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("lorafleet_api_keys", "Active API keys.", len(self.keys))
        yield GaugeMetricFamily(
            "lorafleet_api_keys_broken",
            "1 if the API key file is invalid, so that the previous keys stay active; otherwise 0.",
            int(bool(self.broken)),
        )
        reloads = CounterMetricFamily(
            "lorafleet_api_keys_reloads", "Reloads of the API key file after a change.", None, ["outcome"]
        )
        for outcome, count in self._num_reloads.items():
            reloads.add_metric([outcome], count)
        yield reloads


def _signature_of(path: Path | None) -> _Signature:
    if path is None:
        return 0, 0, 0, 0
    try:
        found = os.stat(path)
    except OSError:
        return -1, 0, 0, 0
    return found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size


_NOTHING_SAID = TenantEntry()
