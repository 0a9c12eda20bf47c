"""The KV events on the wire, as vLLM encodes them: msgpack arrays whose first element is the kind of the event.

Source: vllm/distributed/kv_events.py of vLLM. The fields' order is the format, and trailing defaults are left out.
"""

from __future__ import annotations

import msgspec

MEDIUM = "GPU"  # The tier that all events are about; a CPU worker's blocks are called so too.


class BlockStored(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    """Consecutive blocks that have become known. They belong to one adapter."""

    block_hashes: list[int]  # In [0, 2**63).
    parent_block_hash: int | None  # Hash of the block before the first; None at the start of a sequence.
    token_ids: list[int]  # Of all blocks: block_size for each.
    block_size: int
    lora_id: int | None  # Always None; vLLM has deprecated it.
    medium: str | None
    lora_name: str | None  # None: keys and values of the base model.
    # For each block "digest:" with the adapter's digest, and "salt:" with a hash of the salt that blocks must share.
    extra_keys: list[tuple[str, ...]] | None = None


class BlockRemoved(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    """Blocks that were forgotten."""

    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    """No block is known now."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True, gc=False):
    """The events of one step, in their order."""

    ts: float  # Unix time.
    events: list[KVEvent]
    data_parallel_rank: int | None  # Number of the replica's ports among those of its machine.
