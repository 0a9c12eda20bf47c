"""Records which KV blocks lie in which slots of the host tier and of the disk tier. It moves no bytes.

Each tier has a fixed number of slots and evicts its least recently used block. A block may be in both tiers: one that
is read from disk keeps its place there, so that it need not be written again. Slots that a copy reads or writes are
never given away.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

LEAST_CLEAN = 64  # host slots that are free or also on disk, as far as the tier has so many
CLEAN_SHARE = 4  # one host slot in so many, if that is more


@dataclass(slots=True, eq=False)
class StoredBlock:
    """A block below the GPU."""

    name: bytes  # See block_names.py.
    host: int | None = None  # Its slot in the host tier, once its bytes are there or on their way from the GPU.
    disk: int | None = None  # Its slot on disk, once it is written.
    users: int = 0  # Copies that need its slots, now or soon.
    is_read: bool = False  # It is on its way from disk to the host tier.
    is_dropped: bool = False  # The tiers were cleared. Nobody finds it, and its slots are free once it has no users.


class _Tier:
    """The slots of one tier, and its blocks, the least recently used first."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.free = list(range(num_slots))[::-1]
        self.blocks: OrderedDict[bytes, StoredBlock] = OrderedDict()
        self.num_evictions = 0

    def oldest_unused(self) -> StoredBlock | None:
        return next((block for block in self.blocks.values() if not block.users), None)


class StoredBlocks:
    """The blocks of both tiers. num_disk is 0 without a disk tier."""

    def __init__(self, num_host: int, num_disk: int) -> None:
        self._host = _Tier(num_host)
        self._disk = _Tier(num_disk)
        self._blocks: dict[bytes, StoredBlock] = {}
        self._unwritten: OrderedDict[bytes, StoredBlock] = OrderedDict()  # In the host tier alone, oldest first.
        self._num_dirty = num_host - min(num_host, max(LEAST_CLEAN, num_host // CLEAN_SHARE))

    def __iter__(self) -> Iterator[StoredBlock]:
        return iter(self._blocks.values())

    @property
    def host_slots(self) -> int:
        return self._host.num_slots

    @property
    def num_host(self) -> int:
        """Number of blocks in the host tier."""
        return len(self._host.blocks)

    @property
    def num_disk(self) -> int:
        """Number of blocks on disk."""
        return len(self._disk.blocks)

    @property
    def num_evictions(self) -> dict[str, int]:
        """Number of blocks evicted so far, by tier."""
        return {"host": self._host.num_evictions, "disk": self._disk.num_evictions}

    def find(self, name: bytes) -> StoredBlock | None:
        return self._blocks.get(name)

    def touch(self, block: StoredBlock) -> None:
        """Makes a block the most recently used one of its tiers."""
        for blocks in (self._host.blocks, self._disk.blocks, self._unwritten):
            if block.name in blocks:
                blocks.move_to_end(block.name)

    def reserve_host(self) -> int | None:
        """Returns a slot of the host tier, or None if copies need all of them. A block may be evicted for it."""
        if not self._host.free:
            oldest = self._host.oldest_unused()
            if oldest is None:
                return None
            self._host.num_evictions += 1
            self._leave_host(oldest)
        return self._host.free.pop()

    def reserve_disk(self) -> int | None:
        """Returns a slot of the disk tier, as reserve_host() does."""
        if not self._disk.free:
            oldest = self._disk.oldest_unused()
            if oldest is None:
                return None
            self._disk.num_evictions += 1
            self.leave_disk(oldest)
        return self._disk.free.pop()

    def give_back(self, *, host: int | None = None, disk: int | None = None) -> None:
        """Frees a reserved slot."""
        if host is not None:
            self._host.free.append(host)
        if disk is not None:
            self._disk.free.append(disk)

    def store(self, name: bytes, slot: int) -> StoredBlock:
        """Adds a block that is copied from the GPU to a reserved slot of the host tier."""
        assert name not in self._blocks
        block = self._blocks[name] = self._host.blocks[name] = StoredBlock(name, host=slot)
        self._unwritten[name] = block
        return block

    def take_unwritten(self, count: int) -> list[StoredBlock]:
        """Returns the blocks, at most `count`, that should be written to disk now, the least recently used first.

        They are on disk before they are evicted from the host tier, so that nobody waits for the disk then.
        """
        count = min(count, len(self._unwritten) - self._num_dirty)
        taken = list(islice(self._unwritten.values(), max(0, count)))
        for block in taken:
            del self._unwritten[block.name]
        return taken

    def enter_host(self, block: StoredBlock, slot: int) -> None:
        """Records that a block was read from disk to a reserved slot."""
        if block.is_dropped:
            self.give_back(host=slot)
        else:
            block.host = slot
            self._host.blocks[block.name] = block

    def enter_disk(self, block: StoredBlock, slot: int) -> None:
        """Records that a block was written to a reserved slot."""
        if block.is_dropped:
            self.give_back(disk=slot)
        else:
            block.disk = slot
            self._disk.blocks[block.name] = block

    def leave_disk(self, block: StoredBlock) -> None:
        """Removes a block from the disk tier."""
        if block.disk is not None:
            self._disk.free.append(block.disk)
            self._disk.blocks.pop(block.name, None)
            block.disk = None
        self._forget_if_gone(block)

    def pin(self, block: StoredBlock) -> None:
        block.users += 1

    def unpin(self, block: StoredBlock) -> None:
        block.users -= 1
        if block.is_dropped and not block.users:
            self.give_back(host=block.host, disk=block.disk)
            block.host = block.disk = None

    def clear(self) -> None:
        """Forgets all blocks of both tiers."""
        for block in self._blocks.values():
            block.is_dropped = True
            if not block.users:
                self.give_back(host=block.host, disk=block.disk)
                block.host = block.disk = None
        for blocks in (self._blocks, self._host.blocks, self._disk.blocks, self._unwritten):
            blocks.clear()

    def _leave_host(self, block: StoredBlock) -> None:
        assert block.host is not None
        self._host.free.append(block.host)
        del self._host.blocks[block.name]
        self._unwritten.pop(block.name, None)
        block.host = None
        self._forget_if_gone(block)

    def _forget_if_gone(self, block: StoredBlock) -> None:
        if block.host is None and block.disk is None and not block.is_dropped:
            self._blocks.pop(block.name, None)
