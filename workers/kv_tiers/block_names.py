"""Names KV blocks by their content, so that a block is found again after the prefix cache has forgotten it.

The prefix cache identifies a block by the node before it, its owner and its tokens (workers/schedule/kv_cache.py). A
node ends when its block is overwritten. So a block's name is a hash of the name before it, the owner's salt (adapter
digest, tenant, client's salt) and the tokens. 256 bits of BLAKE2b make it as good as the comparison of all of them.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from hashlib import blake2b

from lorafleet.workers.schedule.kv_cache import BlockKey

NAME_BYTES = 32
ROOT = bytes(NAME_BYTES)  # the name before the first block


def block_name(before: bytes, salt: Hashable, tokens: Sequence[int]) -> bytes:
    """Returns the name of the block behind the block named `before`. `salt` is a tuple of plain values, whose repr()
    is unambiguous."""
    content = before + repr(salt).encode() + array("q", tokens).tobytes()
    return blake2b(content, digest_size=NAME_BYTES).digest()


class BlockNames:
    """The names of the nodes that the prefix cache knows."""

    def __init__(self) -> None:
        self._names: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._names)

    def known(self, node: int, key: BlockKey, salt: Hashable) -> None:
        """Names a node that has become known. It gets no name if the node before it has been forgotten, since nobody
        can find it then."""
        before, owner, tokens = key
        name = ROOT if before == owner else self._names.get(before)
        if name is not None:
            self._names[node] = block_name(name, salt, tokens)

    def of(self, node: int) -> bytes | None:
        return self._names.get(node)

    def last_of(self, nodes: Sequence[int]) -> bytes | None:
        """Returns the name of the last node of a chain, ROOT if it is empty, or None if it has no name."""
        return self._names.get(nodes[-1]) if nodes else ROOT

    def forget(self, node: int) -> bytes | None:
        """Returns the name of a node that ends, or None if it has none."""
        return self._names.pop(node, None)
