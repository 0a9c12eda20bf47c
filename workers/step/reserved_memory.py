"""Reserves the memory that steps with prompts allocate outside of CUDA graphs.

torch asks the driver for memory when a step needs a larger tensor than any step before it. The driver waits until the
device is idle, so every stream waits for one more step. The largest of these tensors are the logits, which grow with
the number of sequences. What is allocated for good, such as the attention's buffers for another CUDA graph, may take a
part of the reserved memory, so it is reserved again afterwards (late_work.py).
"""

# B sequences of a step · D hidden size

from __future__ import annotations

import logging

import torch

from lorafleet.workers.models.engine_model import EngineModel

log = logging.getLogger(__name__)


@torch.inference_mode()
def reserve_logits(model: EngineModel, num_rows: int, device: torch.device) -> None:
    """Computes logits of this many rows, and leaves their memory to torch's allocator. Does nothing on a CPU.

    A lack of memory is logged and ends nothing, since smaller steps may still run.
    """
    if device.type != "cuda":
        return
    try:
        model.logits(model.embed_tokens.weight.new_zeros(num_rows, model.config.hidden_size))
    except torch.OutOfMemoryError as error:
        log.warning(
            "there is no memory left for the logits of %d sequences, so a step of so many may fail: lower "
            "gpu_memory_utilization or max_num_seqs (%s)",
            num_rows,
            error,
        )
