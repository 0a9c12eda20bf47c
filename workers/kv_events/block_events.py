"""Turns what the prefix cache learns and forgets into KV events, one batch for each step.

A block's hash is a function of its content: the hash of the block before it, its owner and its tokens. So it is the
same on all replicas, and after a restart. The prefix cache itself compares contents exactly and needs no hashes.

A block whose predecessor was forgotten before it was published is not published, since no request can find it.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Hashable

import msgspec

from lorafleet.workers.kv_events.event_publisher import EventPublisher
from lorafleet.workers.kv_events.wire_events import MEDIUM, AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from lorafleet.workers.schedule.kv_cache import BlockKey, KVCacheManager
from lorafleet.workers.schedule.sequence import Sequence

_encode = msgspec.msgpack.Encoder().encode


def block_hash(parent: int | None, salt: Hashable, tokens: tuple[int, ...]) -> int:
    """Returns 63 bits of a sha256, which all subscribers can hold in an integer."""
    return int.from_bytes(hashlib.sha256(_encode((parent, salt, tokens))).digest()[:8]) >> 1


class BlockEvents:
    """The events of one engine's prefix cache.

    Args:
        running: The sequences in steps, whose adapters give blocks their names.
    """

    def __init__(self, kv: KVCacheManager, running: Callable[[], list[Sequence]], publisher: EventPublisher) -> None:
        self.publisher = publisher
        self._block_size = kv.block_size
        self._running = running
        self._hashes: dict[int, int] = {}  # Of known blocks that were published, by node.
        self._copies: Counter[int] = Counter()  # Number of these nodes, by hash.
        self._events: list[KVEvent] = []  # Since the last batch.
        self._names: dict[str, str] = {}  # Names of adapters by digest, since the last batch.
        self._follow(kv)

    def step_ended(self) -> None:
        """Publishes what has happened since the last call."""
        if self._events:
            self.publisher.publish(self._events)
            self._events = []
        self._names.clear()

    def _follow(self, kv: KVCacheManager) -> None:
        """Takes part in the calls of the prefix cache, beside those who have registered before."""
        on_known, on_forget = kv.on_known, kv.on_forget

        def known(node: int, key: BlockKey, salt: Hashable) -> None:
            if on_known is not None:
                on_known(node, key, salt)
            self._store(node, key, salt)

        def forget(node: int, block: int) -> None:
            if on_forget is not None:
                on_forget(node, block)
            self._remove(node)

        kv.on_known, kv.on_forget = known, forget

    def _store(self, node: int, key: BlockKey, salt: Hashable) -> None:
        before, owner, tokens = key
        parent = None if before == owner else self._hashes.get(before)
        if parent is None and before != owner:
            return
        hashed = self._hashes[node] = block_hash(parent, salt, tokens)
        self._copies[hashed] += 1
        if self._copies[hashed] > 1:
            return
        name, extra = self._labels(salt)
        last = self._events[-1] if self._events else None
        if not (
            isinstance(last, BlockStored)
            and last.block_hashes[-1] == parent
            and last.lora_name == name
            and (() if last.extra_keys is None else last.extra_keys[-1]) == extra
        ):
            last = BlockStored([], parent, [], self._block_size, None, MEDIUM, name, [] if extra else None)
            self._events.append(last)
        last.block_hashes.append(hashed)
        last.token_ids.extend(tokens)
        if last.extra_keys is not None:
            last.extra_keys.append(extra)

    def _remove(self, node: int) -> None:
        hashed = self._hashes.pop(node, None)
        if hashed is None:
            return
        self._copies[hashed] -= 1
        if self._copies[hashed]:
            return
        del self._copies[hashed]
        if not self._copies:
            self._events = [AllBlocksCleared()]  # What the step did before makes no difference.
            return
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved):
            last.block_hashes.append(hashed)
        else:
            self._events.append(BlockRemoved([hashed], MEDIUM))

    def _labels(self, salt: Hashable) -> tuple[str | None, tuple[str, ...]]:
        """Returns the adapter's name and the extra keys of blocks with a salt of SequenceMemory."""
        assert isinstance(salt, tuple)
        cache_salt, digest = salt[:2]
        keys = [f"digest:{digest}"] if digest else []
        if cache_salt:
            keys.append(f"salt:{hashlib.sha256(cache_salt.encode()).hexdigest()[:16]}")
        return self._name(digest) if digest else None, tuple(keys)

    def _name(self, digest: str) -> str:
        """Returns the name by which a running sequence uses the adapter, or the digest if none does. Several names may
        share the adapter's bytes."""
        name = self._names.get(digest)
        if name is None:
            users = (sequence.lora for sequence in self._running() if sequence.lora is not None)
            name = next((lora.lora_name for lora in users if lora.digest == digest), digest)
            self._names[digest] = name
        return name
