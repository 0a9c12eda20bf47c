"""Computes the GPU memory of FlashInfer's attention before it is made, so that the KV cache leaves it free."""

from __future__ import annotations

from collections.abc import Sequence

from lorafleet.workers.attention.attention_backend import AttentionSpec
from lorafleet.workers.attention.divided_prompts import DividedPrompts, may_divide
from lorafleet.workers.attention.flashinfer_backend import WORKSPACE_BYTES, flashinfer_refusal
from lorafleet.workers.attention.kv_pages import KVPages
from lorafleet.workers.attention.own_decodes import least_own_seqs
from lorafleet.workers.attention.xqa_attention import SEMAPHORE_BYTES, xqa_refusal

WRAPPER_BYTES = (8 << 20) + (256 << 10)  # Each of FlashInfer's wrappers has 8 MiB for its plan, and two small tables.
SPARE_BYTES = 64 << 20  # The blocks and lengths of steps without graphs, and what torch's allocator cannot use.


def flashinfer_bytes(
    spec: AttentionSpec, capability: tuple[int, int], graph_sizes: Sequence[int], max_context: int
) -> int:
    """Returns the bytes that FlashInfer's backend takes for the layers that it serves, with its captured steps.

    Args:
        graph_sizes: Numbers of sequences for which steps are captured.
        max_context: The longest sequence that captured steps have room for.
    """
    served = [i for i, layer in enumerate(spec.layers) if flashinfer_refusal(spec.dtype, layer) is None]
    own = spec.of_layers(served)
    divided = [kind for kind in own.kinds if may_divide(own, kind, capability)]
    least_own = least_own_seqs(own, capability)
    captured = [size for size in graph_sizes if least_own is None or size < least_own]
    num_wrappers, xqa_bytes = len(own.kinds) + 2 * len(divided), 0
    if xqa_refusal(own, capability) is None:
        xqa_bytes = SEMAPHORE_BYTES
    else:
        num_wrappers += len(own.kinds) * (1 + len(captured))
    largest = max(captured, default=0)
    tables = 4 * KVPages.size(largest, largest * -(-max_context // spec.block_size))
    buffers = sum(DividedPrompts.num_bytes(own, kind) for kind in divided)
    return WORKSPACE_BYTES + num_wrappers * WRAPPER_BYTES + xqa_bytes + tables + buffers + SPARE_BYTES
