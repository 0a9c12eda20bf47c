"""Any adapter of the configured sources as a folder on this node: by its URI, or by its digest if that is known.

    store.fetch("s3://bucket/sql")             brings it to the node's cache and returns its digest
    with store.open(uri, digest) as folder:    holds it there while it is read

The calls block, so call them from threads, such as those of the store's pool. Several processes may use one cache;
each adapter is downloaded once per node.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from lorafleet.protocol.adapter_formats.adapter_files import CONFIG_NAME, MAX_CONFIG_BYTES, AdapterFolder, read_config
from lorafleet.protocol.errors import (
    AdapterChanged,
    AdapterError,
    AdapterMissing,
    AdapterTooLarge,
    AdapterUnavailable,
    Forbidden,
    InvalidRequest,
)
from lorafleet.protocol.sources import SourcesConfig
from lorafleet.protocol.strict_json import shown
from lorafleet.resolvers.cache import AdapterCache, is_rotten
from lorafleet.resolvers.deadline import FetchDeadline
from lorafleet.resolvers.download import ATTEMPTS, FIRST_BACKOFF_S, download
from lorafleet.resolvers.fetch_metrics import NEIGHBOR, NEIGHBOR_OUTCOMES, FetchMetrics
from lorafleet.resolvers.http import HTTPSource
from lorafleet.resolvers.hub import HubSource
from lorafleet.resolvers.locks import POLL_S
from lorafleet.resolvers.neighbor_fetch import FindNeighbors, NeighborFetcher
from lorafleet.resolvers.s3 import S3Source
from lorafleet.resolvers.source import Interrupted, RemoteFile, Source, is_uri

FETCH_THREADS = 16  # adapters that one process fetches at a time
CHANGES = 3  # downloads that are started before a source that changes meanwhile is given up

T = TypeVar("T")
Accept = Callable[[bytes], bool]

logger = logging.getLogger("lorafleet.resolvers")


class AdapterStore:
    """The adapters of the configured sources.

    Args:
        find_neighbors: Finds other nodes that probably have an adapter in their caches; None asks the sources only.
    """

    def __init__(self, config: SourcesConfig, find_neighbors: FindNeighbors | None = None) -> None:
        self._config = config
        self._stop = threading.Event()
        self.pool = ThreadPoolExecutor(FETCH_THREADS, thread_name_prefix="lora-fetch")
        self._lock = threading.Lock()
        self._cache: AdapterCache | None = None
        self._sources: dict[str, Source] = {"s3": S3Source(config.s3)}
        if config.http is not None:
            self._sources["http"] = self._sources["https"] = HTTPSource(config.http)
        if config.hub is not None:
            self._sources["hf"] = HubSource(config.hub)
        self.metrics = FetchMetrics()
        for scheme in self._sources:
            self.metrics.expect(scheme)
        self._neighbors = None
        if find_neighbors is not None:
            self._neighbors = NeighborFetcher(find_neighbors, self.metrics)
            self.metrics.expect(NEIGHBOR, NEIGHBOR_OUTCOMES)

    @property
    def cache(self) -> AdapterCache:
        """The node's cache, created when it is first needed. A server of local folders needs none."""
        with self._lock:
            if self._cache is None:
                self._cache = AdapterCache(self._config.cache_path, self._config.cache_bytes)
                self.metrics.cache = self._cache
            return self._cache

    def forget(self, digest: str) -> None:
        """Removes an adapter that is no longer served; any of the node's processes may have fetched it."""
        if self._config.cache_path.is_dir():
            self.cache.remove(digest)

    def fetch(self, uri: str, digest: str = "") -> str:
        """Brings an adapter to the node's cache and returns its digest.

        Raises AdapterChanged if a digest is given and the adapter has another one, Forbidden for a URI that the
        configuration does not allow, and AdapterMissing, AdapterUnavailable, AdapterTooLarge or AdapterMalformed.
        """
        found = self.find(uri, digest)
        if found is None:
            raise AdapterMissing(f"there is no {CONFIG_NAME} at {uri}.")
        if digest and found != digest:
            raise AdapterChanged(
                f"{uri} no longer holds the adapter that was registered: its digest is {found[:12]}, not {digest[:12]}."
            )
        return found

    def find(self, uri: str, digest: str = "", accept: Accept = lambda _: True) -> str | None:
        """Fetches an adapter like fetch(), but returns None if there is none, or if `accept` rejects its config.

        After a rejected config, nothing more is downloaded.
        """
        if digest and self.cache.holds(digest):
            return digest
        scheme, source = self._source(uri)  # rejects a bad URI before the cache gets a lock of that name
        deadline = FetchDeadline(source.timeout_s, f"fetching {uri}", self._stop)
        fetch = _Fetch(uri, source, self.cache, deadline, self.metrics, scheme)
        with self.cache.alone(uri, deadline):
            if digest and self._is_near(digest, source.max_bytes, deadline):
                return digest
            return fetch.run(accept)

    def _is_near(self, digest: str, max_bytes: int, deadline: FetchDeadline) -> bool:
        """Returns whether the adapter is in the cache now, since another process or a neighbor has brought it."""
        if self._neighbors is None:
            return False
        return self.cache.holds(digest) or self._neighbors.fetch(digest, self.cache, max_bytes, deadline)

    @contextlib.contextmanager
    def cached(self, digest: str) -> Iterator[Path | None]:
        """Yields the folder of an adapter in the node's cache, which stays until the block ends, or None if it is not
        there."""
        if not self._config.cache_path.is_dir():
            yield None
            return
        with self.cache.reading(digest) as folder:
            yield folder

    @contextlib.contextmanager
    def open(self, uri: str, digest: str = "") -> Iterator[Path]:
        """Yields the adapter's folder, complete and present until the block ends. A local path is yielded as it is."""
        if not is_uri(uri):
            yield Path(uri)
            return
        for _ in range(CHANGES):
            with self.cache.reading(self.fetch(uri, digest)) as folder:
                if folder is not None:
                    yield folder
                    return
        raise AdapterUnavailable(f"{uri} is evicted as soon as it is fetched. Raise lora_cache_bytes.")

    def read(self, uri: str, digest: str, use: Callable[[Path], T]) -> T:
        """Calls `use` on the adapter's folder and returns the result.

        Bytes that rotted on this node's disk are fetched again, once.
        """
        with self.open(uri, digest) as folder:
            try:
                return use(folder)
            except AdapterError:
                if not is_uri(uri) or not digest or not is_rotten(folder, digest):
                    raise
        deadline = FetchDeadline(self._source(uri)[1].timeout_s, f"removing the damaged copy of {uri}", self._stop)
        while not self.cache.discard_if_rotten(digest):  # Its other readers soon find the same, and leave it.
            deadline.sleep(POLL_S)
        logger.warning("adapter %s was damaged on this node's disk and is fetched again from %s", digest[:12], uri)
        with self.open(uri, digest) as folder:
            return use(folder)

    def is_here(self, uri: str, digest: str) -> bool:
        """Returns whether the adapter can be read without the network."""
        return not is_uri(uri) or bool(digest and self.cache.holds(digest))

    def stop(self) -> None:
        """Ends the running fetches soon; later ones fail."""
        self._stop.set()
        self.pool.shutdown(wait=True, cancel_futures=True)
        for source in set(self._sources.values()):
            source.close()

    def _source(self, uri: str) -> tuple[str, Source]:
        if not uri.isprintable():
            raise InvalidRequest(
                f"{shown(uri)} has a character that cannot be printed, which an adapter's URI must not contain. Remove "
                "it, or percent-encode it if the source supports that.",
                "lora_path",
            )
        scheme = uri.partition("://")[0]
        if scheme in self._sources:
            return scheme, self._sources[scheme]
        if scheme in ("http", "https"):
            raise Forbidden(f"{uri} is not allowed: set lora_resolver_http, with a prefix of the URL in its `allow`.")
        if scheme == "hf":
            raise Forbidden(f"{uri} is not allowed: set lora_resolver_hub, with the repo in its `allow`.")
        raise InvalidRequest(
            f"{uri!r} is not an adapter's URI; such a URI begins with s3://, https://, http:// or hf://."
        )


class _Fetch:
    """One adapter's way from its source into the cache. No other process of the node fetches it at the same time."""

    def __init__(
        self, uri: str, source: Source, cache: AdapterCache, deadline: FetchDeadline, metrics: FetchMetrics, scheme: str
    ) -> None:
        self._uri = uri
        self._source = source
        self._cache = cache
        self._deadline = deadline
        self._metrics = metrics
        self._scheme = scheme
        self._outcome = "failed"
        self._digest = ""
        self._num_bytes = 0

    def run(self, accept: Accept) -> str | None:
        started = time.monotonic()
        try:
            return self._run(accept)
        except OSError as error:
            raise AdapterUnavailable(
                f"{self._uri} cannot be written to the adapter cache: {error.strerror}."
            ) from error
        finally:
            seconds = time.monotonic() - started
            self._metrics.ended(self._scheme, self._outcome, seconds, self._digest, self._num_bytes)

    def _run(self, accept: Accept) -> str | None:
        for _ in range(CHANGES - 1):
            try:
                return self._version(accept)
            except AdapterChanged as error:
                logger.warning("%s The fetch starts again.", error.message)
        return self._version(accept)

    def _version(self, accept: Accept) -> str | None:
        files = self._find()
        if not files:
            self._outcome = "absent"
            return None
        key = _key(self._uri, files)
        known = self._cache.digest_of(key) if key is not None else None
        if known is not None:
            with self._cache.reading(known) as folder:
                if folder is not None:
                    self._outcome = "cached"
                    return known if accept(read_config(AdapterFolder.at(folder))) else None
        return self._download(files, key, accept)

    def _find(self) -> list[RemoteFile]:
        for attempt in range(ATTEMPTS):
            try:
                return self._source.find(self._uri, self._deadline)
            except Interrupted as error:
                cause = error
                logger.warning("%s: %s; trying again", self._uri, error)
            self._deadline.sleep(FIRST_BACKOFF_S * 2**attempt)
        raise AdapterUnavailable(f"{self._uri} cannot be reached: {cause}. {ATTEMPTS} attempts failed.")

    def _download(self, files: list[RemoteFile], key: str | None, accept: Accept) -> str | None:
        num_bytes = sum(file.size for file in files)
        self._check_size(files[0], num_bytes)
        started = time.monotonic()
        logger.info("fetching %s: %d bytes", self._uri, num_bytes)
        with self._cache.draft({file.name: file.size for file in files}, self._deadline) as draft:
            for file in files:
                download(self._source, file, draft / file.name, self._deadline, self._metrics.progress_of(self._scheme))
                if file.name == CONFIG_NAME and not accept((draft / CONFIG_NAME).read_bytes()):
                    self._outcome = "absent"
                    return None
            digest = self._cache.publish(draft, key)
        seconds = time.monotonic() - started
        self._outcome, self._digest, self._num_bytes = "fetched", digest, num_bytes
        logger.info(
            "fetched %s: adapter %s, %.1f s, %.0f MB/s", self._uri, digest[:12], seconds, num_bytes / seconds / 1e6
        )
        return digest

    def _check_size(self, config: RemoteFile, num_bytes: int) -> None:
        if config.size > MAX_CONFIG_BYTES:
            raise AdapterTooLarge(f"{config.location} has {config.size} bytes; at most {MAX_CONFIG_BYTES} are read.")
        if num_bytes > self._source.max_bytes:
            raise AdapterTooLarge(
                f"{self._uri} has {num_bytes} bytes; this source may send at most {self._source.max_bytes}. "
                "Raise its max_bytes."
            )


def _key(uri: str, files: list[RemoteFile]) -> str | None:
    """Returns the key of this version of the source, or None if its versions cannot be distinguished."""
    if not all(file.version for file in files):
        return None
    versions = json.dumps([uri, [(file.name, file.size, file.version) for file in files]])
    return hashlib.sha256(versions.encode()).hexdigest()
