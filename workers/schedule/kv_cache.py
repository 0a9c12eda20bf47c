"""Allocates KV blocks and records which of them hold a known prefix. It knows tokens and block numbers, not tensors.

A full block is identified by the node before it, its owner and its tokens. These are compared exactly, not by a hash,
so that no two prefixes can be confused. The owner is a root for one adapter digest and one tenant (or a client's own
salt). So a reload of the same bytes preserves its prefixes, and neither other weights nor other tenants ever see them.
The blocks before an activated LoRA begins to work belong to the base model.

Unused blocks stay known until they are needed. The least recently used are reused first.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import count

_Key = tuple[int, int, tuple[int, ...]]  # node before, owner's root, tokens


@dataclass(slots=True)
class SequenceBlocks:
    """The blocks of one sequence. The first num_shared belong to shared_root, the others to root."""

    root: int
    shared_root: int
    num_shared: int = 0
    table: array[int] = field(default_factory=lambda: array("i"))  # int32, since every step's attention plan copies it
    nodes: list[int] = field(default_factory=list)  # chain of known full blocks, as far as committed

    def key(self, block: int, tokens: Sequence[int]) -> _Key:
        """Returns the key of a block by its index. The blocks before it must be in nodes."""
        owner = self.shared_root if block < self.num_shared else self.root
        return self.nodes[-1] if self.nodes else owner, owner, tuple(tokens)


@dataclass(slots=True)
class _Block:
    users: int = 0
    key: _Key | None = None


class KVCacheManager:
    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool) -> None:
        assert num_blocks > 0
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.query_tokens = 0  # prompt tokens looked up in the prefix cache
        self.hit_tokens = 0
        self._blocks = [_Block() for _ in range(num_blocks)]
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._known: dict[_Key, tuple[int, int]] = {}  # node and block of each key
        self._roots: dict[Hashable, int] = {}
        self._salts: dict[int, Hashable] = {}
        self._root_users: Counter[int] = Counter()  # open sequences and known blocks, by root
        self._next_node = count()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def num_missing(self, blocks: SequenceBlocks, num_tokens: int) -> int:
        """Returns the number of blocks that a sequence needs besides its own to hold this many tokens."""
        return max(0, self.blocks_for(num_tokens) - len(blocks.table))

    def open(self, salt: Hashable, shared_salt: Hashable = None, num_shared_tokens: int = 0) -> SequenceBlocks:
        """Starts the block table of a sequence. Return it with release().

        Args:
            salt: Everything besides the tokens that blocks must have in common to be shared: the adapter's digest and
                the tenant.
            shared_salt: The same for the first num_shared_tokens.
        """
        root = self._use_root(salt)
        num_shared = num_shared_tokens // self.block_size
        return SequenceBlocks(root, self._use_root(shared_salt if num_shared else salt), num_shared)

    def _use_root(self, salt: Hashable) -> int:
        if salt not in self._roots:
            self._roots[salt] = next(self._next_node)
            self._salts[self._roots[salt]] = salt
        root = self._roots[salt]
        self._root_users[root] += 1
        return root

    def _leave_root(self, root: int) -> None:
        """Releases one use of a root. Clients may choose salts, so a root without uses takes no memory."""
        self._root_users[root] -= 1
        if not self._root_users[root]:
            del self._root_users[root]
            del self._roots[self._salts.pop(root)]

    def reuse_prefix(self, blocks: SequenceBlocks, tokens: Sequence[int]) -> int:
        """Takes over the known blocks at the start of `tokens`, and returns the number of tokens that they hold.

        The last token is always left to compute, since its logits are needed.
        """
        assert not blocks.table
        if not self.enable_prefix_caching:
            return 0
        size = self.block_size
        for start in range(0, len(tokens) - size, size):
            found = self._known.get(blocks.key(start // size, tokens[start : start + size]))
            if found is None:
                break
            node, block = found
            self._take(block)
            blocks.table.append(block)
            blocks.nodes.append(node)
        hit = len(blocks.table) * size
        self.query_tokens += len(tokens)
        self.hit_tokens += hit
        return hit

    def grow(self, blocks: SequenceBlocks, num_tokens: int) -> bool:
        """Adds blocks until num_tokens fit. Returns False and changes nothing if too few are free."""
        wanted = self.num_missing(blocks, num_tokens)
        if wanted > len(self._free):
            return False
        for _ in range(wanted):
            block = next(iter(self._free))
            self._forget(block)
            self._take(block)
            blocks.table.append(block)
        return True

    def commit(self, blocks: SequenceBlocks, tokens: Sequence[int], num_computed: int) -> None:
        """Publishes the blocks that are now full, so that other sequences can use them."""
        if not self.enable_prefix_caching:
            return
        size = self.block_size
        for i in range(len(blocks.nodes), num_computed // size):
            key = blocks.key(i, tokens[i * size : (i + 1) * size])
            found = self._known.get(key)
            if found is None:
                # If another sequence computed this block at the same time, its block stays the known one, and ours
                # stays private.
                found = (next(self._next_node), blocks.table[i])
                self._known[key] = found
                self._root_users[key[1]] += 1
                self._blocks[blocks.table[i]].key = key
            blocks.nodes.append(found[0])

    def release(self, blocks: SequenceBlocks) -> None:
        """Frees the blocks, the last one first, so that an old prefix is forgotten from its end."""
        for block in reversed(blocks.table):
            self._blocks[block].users -= 1
            if self._blocks[block].users == 0:
                self._free[block] = None
                if self._blocks[block].key is None:
                    self._free.move_to_end(block, last=False)
        del blocks.table[:]
        blocks.nodes.clear()
        self._leave_root(blocks.root)
        self._leave_root(blocks.shared_root)

    def _take(self, block: int) -> None:
        self._blocks[block].users += 1
        self._free.pop(block, None)

    def _forget(self, block: int) -> None:
        key = self._blocks[block].key
        if key is not None:
            del self._known[key]
            self._blocks[block].key = None
            self._leave_root(key[1])
