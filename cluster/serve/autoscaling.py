"""How many replicas there should be. Ray Serve's controller asks this policy every now and then, and waits, bounds and
starts or stops as its own settings say.

A replica is as busy as the fullest of what it can run out of: sequences of a step, or tokens of the KV cache, with what
waits counted too, so that a queue is more than full. Adapters are counted apart: where those asked for are more than
all slots, replicas spend their time on swapping, however few the requests are.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from lorafleet.protocol.messages import EngineStats

Wish = tuple[float, dict[str, Any]]  # replicas, and state to be given back next time: none


def load_of(stats: EngineStats, max_num_seqs: int, kv_tokens: int) -> dict[str, float]:
    """What a replica tells. busy: 1 is full. adapters: asked for by running and waiting requests, over its slots."""
    sequences = (stats.num_running + stats.num_waiting) / max_num_seqs
    tokens = (stats.running_tokens + stats.waiting_tokens) / kv_tokens
    slots = max(stats.lora_slots_total, 1)
    return {"busy": max(sequences, tokens), "adapters": stats.lora_adapters_wanted / slots}


def wanted_replicas(busy: Collection[float], adapters: Collection[float], target: float) -> float:
    """busy, adapters: of each replica, load_of. target: how busy each should be."""
    return max(sum(busy) / target, sum(adapters), 1.0)


class LoadPolicy:
    """Made and called by Serve's controller."""

    def __init__(self, target: float) -> None:
        self._target = target

    def __call__(self, context: Any) -> Wish:
        """context: ray.serve.config.AutoscalingContext. Nothing changes until the replicas have told something."""
        told: Mapping[str, Mapping[Any, float]] = context.aggregated_metrics or {}
        busy = told.get("busy", {})
        if not busy:
            return context.target_num_replicas, {}
        return wanted_replicas(busy.values(), told.get("adapters", {}).values(), self._target), {}
