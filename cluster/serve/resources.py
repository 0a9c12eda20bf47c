"""Computes what the replicas need of a machine: bundles, GPUs and CPU cores. It does not depend on Ray."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence

from lorafleet.cluster.config import AppArgs
from lorafleet.protocol.engine_config import Device, EngineConfig
from lorafleet.protocol.errors import ConfigError

ROUNDING = 1e-6  # Ray counts ten-thousandths of a CPU.
FRONT_CPUS = 0.1  # The HTTP front's share. Ray counts it, but nothing enforces it.


def replica_bundles(args: AppArgs, device: Device) -> list[dict[str, float]]:
    """Returns the HTTP front's bundle, then one for each rank of the engine (cluster/serve/ranks.py)."""
    rank = {"CPU": args.num_cpus} | ({"GPU": 1.0} if device == "cuda" else {})
    return [{"CPU": FRONT_CPUS}, *[rank] * args.tensor_parallel_size]


def num_fitting(bundles: Sequence[Mapping[str, float]], free: Sequence[Mapping[str, float]]) -> int:
    """Returns how many more replicas fit, each on one node. `free` holds the free resources of each node."""
    needed: dict[str, float] = {}
    for bundle in bundles:
        for name, amount in bundle.items():
            needed[name] = needed.get(name, 0.0) + amount
    return sum(min(int(node.get(name, 0.0) / amount + ROUNDING) for name, amount in needed.items()) for node in free)


def surge_percent(num_wanted: int, num_running: int, num_fitting: int) -> int:
    """Returns how many replicas of a new version may start beside those that run, in percent of num_wanted, which Serve
    rounds up (`max_surge_percent`).

    It is 0 if there is no room beside all that are wanted. Serve then stops one replica before it starts another.
    Otherwise it would wait for room, and keep the former version forever.
    """
    num_beside = num_fitting - max(0, num_wanted - num_running)
    return max(1, min(100, 100 * num_beside // num_wanted)) if num_beside > 0 else 0


def check_gpus(args: AppArgs, num_gpus: list[int]) -> None:
    """Raises ConfigError if the replicas do not fit on the nodes, each replica on one node. `num_gpus` holds the
    number of GPUs of each node."""
    size, total = args.tensor_parallel_size, sum(num_gpus)
    if sum(count // size for count in num_gpus) >= args.num_replicas:
        return
    wanted = f"num_replicas={args.num_replicas} with tensor_parallel_size={size} on device={args.device} needs "
    if total < args.num_replicas * size:
        raise ConfigError(
            f"{wanted}{args.num_replicas * size} GPUs; this Ray cluster has {total}. Lower either, add GPUs, or use "
            "device=cpu."
        )
    raise ConfigError(
        f"{wanted}{size} GPUs on one node for each replica; this Ray cluster's nodes have "
        f"{', '.join(map(str, num_gpus))}. Lower either, or add GPUs to a node."
    )


def with_cpu_threads(config: EngineConfig, num_replicas: int) -> EngineConfig:
    """Returns the configuration with the machine's cores divided among the replicas' ranks, since Ray gives each
    worker one thread. A value of cpu_threads that the user has set stays."""
    if config.cpu_threads is not None or config.device != "cpu":
        return config
    num_workers = num_replicas * config.tensor_parallel_size
    return dataclasses.replace(config, cpu_threads=max(1, (os.cpu_count() or 1) // num_workers))
