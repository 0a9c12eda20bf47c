"""Decides how many replicas there should be. Ray Serve's controller calls this policy periodically. It starts or
stops replicas within the delays and bounds of its own settings.

A replica is as busy as the fuller of two limits: the sequences of a step, and the tokens of the KV cache. Waiting
requests count too, so a replica with a queue is more than full. Adapters are counted separately: if requests use
more adapters than may run at the same time (max_loras), they wait for each other, however few the requests are.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from lorafleet.protocol.messages import EngineStats

Wish = tuple[float, dict[str, Any]]  # Number of replicas, and state for the next call, which stays empty.


def autoscaling_metrics(stats: EngineStats, max_num_seqs: int, kv_tokens: int) -> dict[str, float]:
    """Returns the load that a replica reports: `busy`, where 1 is full, and `adapters`, the number of adapters that
    running and waiting requests use, divided by the number that may run at the same time."""
    sequences = (stats.num_running + stats.num_waiting) / max_num_seqs
    tokens = (stats.running_tokens + stats.waiting_tokens) / kv_tokens
    limit = max(stats.lora_in_use_limit, 1)
    return {"busy": max(sequences, tokens), "adapters": stats.lora_adapters_wanted / limit}


def wanted_replicas(busy: Collection[float], adapters: Collection[float], target: float) -> float:
    """Returns how many replicas there should be. `busy` and `adapters` hold the metrics of each
    replica, and `target` is how busy each should be."""
    return max(sum(busy) / target, sum(adapters), 1.0)


class LoadPolicy:
    """The policy object that Serve's controller creates and calls."""

    def __init__(self, target: float) -> None:
        self._target = target

    def __call__(self, context: Any) -> Wish:
        """Returns the wanted number of replicas for a ray.serve.config.AutoscalingContext. The number does not
        change until replicas have reported a load."""
        metrics: Mapping[str, Mapping[Any, float]] = context.aggregated_metrics or {}
        busy = metrics.get("busy", {})
        if not busy:
            return context.target_num_replicas, {}
        return wanted_replicas(busy.values(), metrics.get("adapters", {}).values(), self._target), {}
