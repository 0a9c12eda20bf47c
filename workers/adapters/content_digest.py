"""Digests of adapters' contents: one that is still being computed, and those that this process has computed before.

A digest is one sha256 over all bytes in order, which only one core can compute. The hashes of the pieces of the same
bytes can be computed on several cores. This module remembers which digest belongs to which pieces. So a content that
was read before is recognized by its bytes alone: neither its path nor its file's times are trusted.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass

from lorafleet.protocol.errors import AdapterChanged, AdapterError
from lorafleet.protocol.lru_cache import LRUCache

MAX_KNOWN = 20_000  # contents, about 300 bytes each


@dataclass(frozen=True, slots=True)
class ContentDigest:
    """The digest of an adapter's files, which may still be being computed."""

    computed: Future[str]
    expected: str = ""  # the only digest that is accepted; "" accepts any
    name: str = ""  # of the adapter, for messages

    @classmethod
    def known(cls, digest: str) -> ContentDigest:
        return cls(done(digest))

    def confirm(self) -> str:
        """Waits for the digest (hex) and returns it. Raises AdapterChanged if another one is expected."""
        digest = self.computed.result()
        if self.expected and digest != self.expected:
            raise AdapterChanged(
                f"adapter {self.name!r}: the files have the digest {digest[:12]}…, but the adapter was registered with "
                f"{self.expected[:12]}…. Load it again (load_inplace) to serve the new version."
            )
        return digest

    @contextmanager
    def confirmed_first(self) -> Iterator[None]:
        """Raises an AdapterError of the block only if the digest is right, since other bytes explain any error."""
        try:
            yield
        except AdapterError:
            self.confirm()
            raise


def done(digest: str) -> Future[str]:
    """Returns a future that has this digest."""
    computed: Future[str] = Future()
    computed.set_result(digest)
    return computed


class KnownDigests:
    """Contents whose digests this process has computed, by the hashes of their pieces. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._digests: LRUCache[bytes, str] = LRUCache(MAX_KNOWN)  # by combined()
        self._seen: LRUCache[str, None] = LRUCache(MAX_KNOWN)

    def __contains__(self, digest: str) -> bool:
        with self._lock:
            return digest in self._seen

    def find(self, combined: bytes) -> str | None:
        with self._lock:
            return self._digests.get(combined)

    def add(self, combined: bytes, digest: str) -> None:
        with self._lock:
            self._digests.put(combined, digest)
            self._seen.put(digest, None)


def combined(before: hashlib._Hash, order: bytes, pieces: Sequence[tuple[int, bytes]]) -> bytes:
    """Returns a hash of a whole content: of everything `before` the pieces, and of each piece by its number of bytes
    and its sha256. Other cuts of the same content have another hash.

    Args:
        order: Name of the order in which the pieces have the bytes.
    """
    of_pieces = b"".join(b"%d\0" % size + digest for size, digest in pieces)
    return hashlib.sha256(order + b"\0" + before.digest() + of_pieces).digest()
