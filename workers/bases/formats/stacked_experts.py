"""Names the linears of experts where a format stores tensors for all experts of a layer."""

from __future__ import annotations

from lorafleet.protocol.errors import ConfigError
from lorafleet.workers.bases.formats.checkpoint_format import StoredLinears

LEAVES = {"gate_up": ("gate_proj", "up_proj"), "down": ("down_proj",)}  # in the order in which their rows are stored
MOST_EXPERTS = 1 << 14  # of a layer, each of which gets a name; gpt-oss has 128


def expert_linears(linears: StoredLinears, name: str, module: str, projection: str, dims: int) -> list[str]:
    """Returns the linears that the tensor `name` is for, by module path below the model.

    Args:
        module: The experts' module path below the model, "layers.0.mlp.experts".
        projection: A key of LEAVES.
        dims: Number of dimensions of the tensor. The first one is that of the experts.
    """
    shape = linears.stored(name).get_shape()
    if len(shape) != dims or shape[0] > MOST_EXPERTS:
        raise ConfigError(
            f"{name} has shape {shape} instead of {dims} dimensions, the first of which is at most {MOST_EXPERTS:,}. "
            "Download the checkpoint again.",
            "model",
        )
    return [f"{module}.{expert}.{leaf}" for expert in range(shape[0]) for leaf in LEAVES[projection]]


def place_of(module: str) -> tuple[str, int, str, int]:
    """Returns the experts' module path of such a linear, its expert, its key of LEAVES and its index there."""
    experts, expert, leaf = module.rsplit(".", 2)
    projection = next(name for name, leaves in LEAVES.items() if leaf in leaves)
    return experts, int(expert), projection, LEAVES[projection].index(leaf)
