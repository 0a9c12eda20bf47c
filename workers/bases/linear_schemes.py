"""Decides the scheme of each linear of a model: those beside the experts, and those of all experts of a layer.

workers/bases/quantization.py says how single projections are stored. Routers are never held quantized: they are small,
and their logits decide which experts run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lorafleet.kernels.quant.base_weight import Scheme
from lorafleet.protocol.errors import UnsupportedModel
from lorafleet.workers.bases.model_config import ModelConfig


def linear_scheme(config: ModelConfig, names: Sequence[str]) -> Scheme | None:
    """Returns the scheme of the linear that these projections share, by module path below the model.

    It is None if the linear holds its values unquantized.
    """
    if config.quantization is None or (config.experts is not None and names[0] in config.experts.router_modules):
        return None
    return config.quantization.of(names)


def experts_scheme(config: ModelConfig, module: str, leaves: Iterable[str]) -> Scheme | None:
    """Returns the scheme of these projections of all experts of a layer, or None if they are plain.

    Args:
        module: The experts' module path below the model, "layers.0.mlp.experts".

    Raises UnsupportedModel if no scheme holds the values of all. Experts make up most of a model, so they are never
    held unquantized because of that.
    """
    quantization = config.quantization
    if quantization is None or config.experts is None:
        return None
    if quantization.stored is None:
        return quantization.rounding
    names = [f"{module}.{expert}.{leaf}" for expert in range(config.experts.count) for leaf in leaves]
    if all(name not in quantization.stored.schemes for name in names):
        return None
    first = shared = quantization.stored.schemes.get(names[0])
    for name in names[1:]:
        own = quantization.stored.schemes.get(name)
        shared = None if shared is None or own is None else shared.common(own)
        if shared is None:
            raise UnsupportedModel(
                f"{names[0]} is stored {_described(first)} and {name} {_described(own)}. All experts of a layer must "
                "be stored in forms that one weight can hold. Serve the unquantized checkpoint with quantization=nf4, "
                "int4 or fp8.",
                "model",
            )
    return shared


def form_of(scheme: Scheme | None) -> str:
    """Returns the name of the form of a weight with this scheme."""
    return "plain" if scheme is None else scheme.name


def _described(scheme: Scheme | None) -> str:
    return "unquantized" if scheme is None else f"as {scheme}"
