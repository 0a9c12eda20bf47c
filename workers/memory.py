"""What a replica's GPUs (or on a CPU its host memory) keep from its start to its end, in bytes by kind."""

from __future__ import annotations

from lorafleet.workers.slots.model_manager import LoRAModelManager
from lorafleet.workers.step.step_runner import StepRunner


def fixed_memory(steps: StepRunner, slots: LoRAModelManager | None) -> dict[str, int]:
    """weights: of the base. kv_cache: all its blocks, free or not. lora_slots: reserved for adapters' A and B. Over all
    ranks, which have as much each; what they have for activations and graphs is torch's, and not in it."""
    weights = sum(one.numel() * one.element_size() for one in steps.model.parameters())
    cache = sum(one.numel() * one.element_size() for kv in steps.caches for one in (kv.k_NPGD, kv.v_NPGD))
    arena = 0 if slots is None else slots.arena_bytes
    size = steps.model.group.size
    return {"weights": weights * size, "kv_cache": cache * size, "lora_slots": arena * size}
