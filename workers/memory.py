"""Counts the bytes that a replica's GPUs (or its host memory on a CPU) hold from its start to its end, by kind."""

from __future__ import annotations

from lorafleet.workers.slots.model_manager import LoRAModelManager
from lorafleet.workers.step.step_runner import StepRunner


def fixed_memory(steps: StepRunner, slots: LoRAModelManager | None) -> dict[str, int]:
    """Returns bytes by kind, over all ranks, which have equally many each. Activations and graphs are torch's, and not
    included.

    - weights: the base's
    - kv_cache: all its blocks, free or not
    - lora_slots: reserved for adapters' A and B
    """
    weights = sum(weight.nbytes for weight in steps.model.parameters())
    cache = sum(kv.k_NPGD.nbytes + kv.v_NPGD.nbytes for kv in steps.caches)
    arena = 0 if slots is None else slots.arena_bytes
    size = steps.model.group.size
    return {"weights": weights * size, "kv_cache": cache * size, "lora_slots": arena * size}
