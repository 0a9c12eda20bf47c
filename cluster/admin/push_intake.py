"""Works on the content of an adapter that a trainer pushes from memory, while its bytes arrive.

The weights are in memory that the node's processes share (adapter_formats/sealed_memory.py). Threads follow the bytes
that have arrived: they compute the digest and the tensors' checksums, and write the catalogue's files. When the last
byte arrives, little is left to do.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import Executor
from contextlib import asynccontextmanager

from lorafleet.api.access.work_threads import PUSHED_BYTES, UPKEEP, in_turn
from lorafleet.cluster.admin.following import ByteFollower
from lorafleet.cluster.catalogue.catalogue_store import FilesDraft, Store
from lorafleet.protocol.adapter_formats.adapter_files import CONFIG_NAME, SAFETENSORS_NAME, new_digest
from lorafleet.protocol.adapter_formats.sealed_memory import AdapterMemory
from lorafleet.protocol.adapter_formats.tensor_push import TensorSums, check_file_size
from lorafleet.protocol.lora_request import SealedAdapter


class ContentIntake:
    """The work on one adapter's content.

    Args:
        weights: Content of a safetensors file, which may still be arriving.
        sums: Computes the tensors' checksums, if they are wanted.
    """

    def __init__(
        self, config: bytes, weights: memoryview, draft: FilesDraft, pool: Executor, sums: TensorSums | None
    ) -> None:
        self._config = config
        self._weights = weights
        self._draft = draft
        self._sums = sums
        self._hash = new_digest(config, SAFETENSORS_NAME, len(weights), {})
        self._hashing = ByteFollower(pool, self._add_to_digest, len(weights))
        self._writing = ByteFollower(pool, self._write, len(weights))
        self._checking = None if sums is None else ByteFollower(pool, self._add_to_sums, len(weights))
        self._followers = [each for each in (self._hashing, self._writing, self._checking) if each is not None]

    def advance(self, num_arrived: int) -> None:
        """Says that the first bytes of the weights are there."""
        for follower in self._followers:
            follower.advance(num_arrived)

    async def sums(self) -> Mapping[str, str]:
        """Returns the checksum of each tensor once all have arrived. Raises AdapterMalformed."""
        assert self._sums is not None and self._checking is not None
        await self._checking.done()
        return self._sums.computed()

    async def digest(self) -> str:
        """Returns the digest of config and weights once all have arrived."""
        await self._hashing.done()
        return self._hash.hexdigest()

    async def written(self) -> None:
        """Waits until the files are written, though not yet durable. Raises StoreError."""
        await self._writing.done()

    def publish(self, digest: str) -> None:
        """Makes the written files durable under their digest. Blocks. Raises StoreError."""
        self._draft.write(CONFIG_NAME, self._config)
        self._draft.publish(digest)

    def put_again(self, store: Store, digest: str) -> None:
        """Stores the files once more. Blocks. Raises StoreError."""
        draft = store.draft()
        try:
            draft.write(CONFIG_NAME, self._config)
            draft.write(SAFETENSORS_NAME, self._weights)
            draft.publish(digest)
        finally:
            draft.discard()

    async def close(self) -> None:
        await asyncio.gather(*(follower.stop() for follower in self._followers))
        await in_turn(UPKEEP, self._draft.discard)
        self._weights = memoryview(b"")

    def _add_to_digest(self, start: int, end: int) -> None:
        self._hash.update(self._weights[start:end])

    def _add_to_sums(self, _: int, end: int) -> None:
        assert self._sums is not None
        self._sums.advance(self._weights, end)

    def _write(self, start: int, end: int) -> None:
        self._draft.write(SAFETENSORS_NAME, self._weights[start:end])


class PushIntake:
    """A push whose bytes are arriving, and the work on its content."""

    def __init__(self, memory: AdapterMemory, content: ContentIntake) -> None:
        self.content = content
        self._memory = memory
        self._arrived = 0

    def add(self, part: bytes | memoryview) -> None:
        """Adds the next bytes of the weights. The caller sees to it that they are not too many."""
        self._memory.write(part, self._arrived)
        self.arrived(self._arrived + len(part))

    def arrived(self, num_bytes: int) -> None:
        """Says that the weights are complete from their beginning up to here, whoever has written them."""
        self._arrived = num_bytes
        self.content.advance(num_bytes)

    @property
    def path(self) -> str:
        """The file by which another process of this node may write the weights until seal()."""
        return self._memory.path

    async def seal(self) -> SealedAdapter:
        """Makes the memory final once digest() has returned. Other processes may map it until the intake ends."""
        return await in_turn(PUSHED_BYTES, self._memory.seal)


@asynccontextmanager
async def taking_in(
    config: bytes, weights_bytes: int, store: Store, pool: Executor, sums: TensorSums | None = None
) -> AsyncIterator[PushIntake]:
    """Opens an intake for bytes that arrive one after another. Its memory is freed at the end of the block.

    Raises AdapterMalformed if the weights have too few bytes, StoreError, and OSError if there is no memory.
    """
    check_file_size(weights_bytes)
    memory = AdapterMemory(config, weights_bytes)
    try:
        async with working_on(config, memory.weights, store, pool, sums) as content:
            yield PushIntake(memory, content)
    finally:
        await in_turn(UPKEEP, memory.close)  # The system needs 0.1 s for each gigabyte.


@asynccontextmanager
async def working_on(
    config: bytes, weights: memoryview, store: Store, pool: Executor, sums: TensorSums | None = None
) -> AsyncIterator[ContentIntake]:
    """Opens the work on content in memory. Files that were not published are deleted at the end of the block."""
    content = ContentIntake(config, weights, await in_turn(PUSHED_BYTES, store.draft), pool, sums)
    try:
        yield content
    finally:
        await content.close()
