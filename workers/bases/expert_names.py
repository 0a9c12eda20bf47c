"""Converts between the names of a mixture of experts.

The engine uses transformers' names, "layers.0.mlp.experts.3.gate_proj" and "layers.0.mlp.gate" for the router.
Mixtral's checkpoints, and adapters for them, use others.
"""

from __future__ import annotations

MIXTRAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_OF_MIXTRAL = {engine: own for own, engine in MIXTRAL.items()}


def engine_name(name: str) -> str:
    """Returns the engine's name of a module or tensor that has either name."""
    head, found, tail = name.partition(".block_sparse_moe.")
    if not found:
        return name
    return ".".join([head, "mlp", *(MIXTRAL.get(part, part) for part in tail.split("."))])


def mixtral_name(name: str) -> str:
    """Returns Mixtral's name of the engine's router, or of a projection of one expert."""
    head, _, tail = name.partition(".mlp.")
    return ".".join([head, "block_sparse_moe", *(_OF_MIXTRAL.get(part, part) for part in tail.split("."))])
