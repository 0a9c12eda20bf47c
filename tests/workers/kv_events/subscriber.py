"""A subscriber to KV events, as a router has one. Its structs are vLLM's, written here once more."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq

PATIENCE_MS = 20_000


class KVCacheEvent(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    pass


class BlockStored(KVCacheEvent):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(KVCacheEvent):
    pass


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


DECODER = msgspec.msgpack.Decoder(KVEventBatch)


@dataclass
class Index:
    """What a router knows of one replica's blocks."""

    hashes: dict[tuple[int | None, str, tuple[int, ...]], int] = field(default_factory=dict)
    names: dict[int, str | None] = field(default_factory=dict)  # Adapters, by hash.
    seen: set[str] = field(default_factory=set)  # Kinds of events.

    def apply(self, batch: KVEventBatch) -> None:
        for event in batch.events:
            self.seen.add(type(event).__name__)
            if isinstance(event, AllBlocksCleared):
                self.hashes.clear()
                self.names.clear()
            elif isinstance(event, BlockRemoved):
                for gone in event.block_hashes:
                    del self.names[gone]
                self.hashes = {key: known for key, known in self.hashes.items() if known in self.names}
            else:
                self._store(event)

    def _store(self, event: BlockStored) -> None:
        size, parent = event.block_size, event.parent_block_hash
        assert len(event.token_ids) == size * len(event.block_hashes)
        extra = event.extra_keys or [None] * len(event.block_hashes)
        for index, (known, keys) in enumerate(zip(event.block_hashes, extra, strict=True)):
            assert known not in self.names
            digest = next((key[7:] for key in keys or () if key.startswith("digest:")), "")
            self.hashes[parent, digest, tuple(event.token_ids[index * size : (index + 1) * size])] = known
            self.names[known] = event.lora_name
            parent = known

    def num_blocks(self, tokens: list[int], digest: str, block_size: int) -> int:
        """Number of blocks at the start of a prompt that the replica has, but for its last token."""
        parent, count = None, 0
        for start in range(0, len(tokens) - block_size, block_size):
            parent = self.hashes.get((parent, digest, tuple(tokens[start : start + block_size])))
            if parent is None:
                break
            count += 1
        return count

    def num_prefixes(self) -> int:
        """Number of blocks that can be found from the start of a prompt."""
        found, layer = 0, {None}
        while layer:
            layer = {known for (parent, _, _), known in self.hashes.items() if parent in layer}
            found += len(layer)
        return found


class Subscriber:
    def __init__(self, port: int, topic: str = "", replay_port: int | None = None) -> None:
        self._context: zmq.Context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.RCVTIMEO, PATIENCE_MS)
        self._socket.subscribe(topic)
        self._socket.connect(f"tcp://127.0.0.1:{port}")
        self.replay_port = replay_port

    def receive(self) -> tuple[bytes, int, KVEventBatch]:
        """The topic, the sequence number and the batch of the next message."""
        return self._read(self._socket.recv_multipart())

    def replay(self, first: int) -> list[tuple[bytes, int, KVEventBatch]]:
        """All batches from this number on that the publisher still has."""
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.RCVTIMEO, PATIENCE_MS)
        socket.connect(f"tcp://127.0.0.1:{self.replay_port}")
        socket.send_multipart((b"", first.to_bytes(8, "big")))
        batches = []
        while True:
            empty, *frames = socket.recv_multipart()
            assert empty == b""
            if int.from_bytes(frames[1], "big", signed=True) == -1:
                assert frames[2] == b""
                socket.close(linger=0)
                return batches
            batches.append(self._read(frames))

    def close(self) -> None:
        self._context.destroy(linger=0)

    @staticmethod
    def _read(frames: list[bytes]) -> tuple[bytes, int, KVEventBatch]:
        topic, number, payload = frames
        return topic, int.from_bytes(number, "big"), DECODER.decode(payload)
