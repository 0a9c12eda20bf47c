"""Decides how the decoder's linears are quantized, by config.json's quantization_config or the server's option.

Embedding, head, norms and biases are never quantized, as in bitsandbytes. quantized_tensors.py reads the tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lorafleet.protocol.errors import ConfigError, UnsupportedModel
from lorafleet.protocol.quantization_methods import Method
from lorafleet.workers.bases.quantized_tensors import MARK
from lorafleet.workers.bases.stored_tensors import StoredTensors
from lorafleet.workers.bases.text_part import text_name

KV_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
FP8_WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "channel", "dynamic": False, "symmetric": True}
FP8_INPUTS = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}
REMEDY = (
    "Serve the unquantized checkpoint with quantization=nf4 or fp8, which need no conversion, or a checkpoint that was "
    "quantized by bitsandbytes in 4 bits or by llm-compressor in FP8_DYNAMIC."
)


@dataclass(frozen=True, slots=True)
class Quantization:
    """The quantization of the decoder's linears."""

    method: Method
    # The linears that are quantized in the checkpoint, by module path below the model; the others stay as they are.
    # None: the checkpoint has none, and all linears are quantized as they are read.
    stored: frozenset[str] | None

    def of(self, projections: Iterable[str]) -> Method | None:
        """Returns the method for the linear that these projections share.

        If only some of them are quantized, it is None: the linear holds their values unquantized.
        """
        return self.method if self.stored is None or self.stored.issuperset(projections) else None


def stored_quantization(config: Mapping[str, Any] | None, folder: Path) -> Quantization | None:
    """Reads the quantization_config of config.json. Raises UnsupportedModel with a remedy if it is not served."""
    if not config or _quantizes_only_kv(config):
        return None
    method = config.get("quant_method", "unnamed")
    if method == "bitsandbytes":
        if not (config.get("load_in_4bit") or config.get("_load_in_4bit")):
            raise UnsupportedModel(f"quantization_config: bitsandbytes with 8 bits is not supported. {REMEDY}")
        return Quantization("nf4", _stored_linears(folder))
    if method == "compressed-tensors":
        _check_compressed(config)
        return Quantization("fp8", _stored_linears(folder))
    raise UnsupportedModel(f"quantization_config: checkpoints quantized with {method} are not supported. {REMEDY}")


def resolved(stored: Quantization | None, asked: Method | None) -> Quantization | None:
    """Returns the quantization to serve. Raises ConfigError if the checkpoint has another one than `asked`.

    `asked` is the server's option. None leaves everything as the checkpoint has it.
    """
    if asked is None or (stored is not None and stored.method == asked):
        return stored
    if stored is not None:
        raise ConfigError(
            f"quantization={asked}, but the checkpoint is already quantized to {stored.method}. Leave quantization "
            "out, or serve the unquantized checkpoint.",
            "quantization",
        )
    return Quantization(asked, stored=None)


def _stored_linears(folder: Path) -> frozenset[str]:
    with StoredTensors(folder) as tensors:
        found = (MARK.fullmatch(name) for name in tensors.names(MARK))
        return frozenset(text_name(match[1]).removeprefix("model.") for match in found if match is not None)


def _quantizes_only_kv(config: Mapping[str, Any]) -> bool:
    """Returns whether llm-compressor left the weights alone and wrote only a scale per layer for K and for V."""
    if config.get("quant_method") != "compressed-tensors" or config.get("config_groups"):
        return False
    if any(config.get(other) for other in ("sparsity_config", "transform_config")):
        return False
    return KV_SCHEME.items() <= (config.get("kv_cache_scheme") or {}).items()


def _check_compressed(config: Mapping[str, Any]) -> None:
    groups = list((config.get("config_groups") or {}).values())
    is_fp8 = bool(groups) and all(
        FP8_WEIGHTS.items() <= (group.get("weights") or {}).items()
        and FP8_INPUTS.items() <= (group.get("input_activations") or {}).items()
        and not group.get("output_activations")
        for group in groups
    )
    kv_scheme = config.get("kv_cache_scheme") or KV_SCHEME
    others = any(config.get(other) for other in ("sparsity_config", "transform_config"))
    if not is_fp8 or others or not KV_SCHEME.items() <= kv_scheme.items():
        raise UnsupportedModel(
            "quantization_config: with compressed-tensors, only FP8 weights with one scale per output channel and "
            f"activations with one scale per token are supported (FP8_DYNAMIC). {REMEDY}"
        )
