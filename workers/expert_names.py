"""What a mixture of experts is called: the engine uses transformers' names, "layers.0.mlp.experts.3.gate_proj" and
"layers.0.mlp.gate" for the router; Mixtral's checkpoints, and adapters made over them, have others."""

from __future__ import annotations

MIXTRAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def engine_name(name: str) -> str:
    """Of a module or tensor, whoever called it so."""
    head, found, tail = name.partition(".block_sparse_moe.")
    if not found:
        return name
    return ".".join([head, "mlp", *(MIXTRAL.get(part, part) for part in tail.split("."))])
