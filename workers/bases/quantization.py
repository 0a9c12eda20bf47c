"""Decides how the decoder's linears are quantized, by config.json's quantization_config or the server's option.

Embedding, head, norms and biases are never quantized. workers/bases/formats/ reads the tensors of each format.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lorafleet.kernels.quant.base_weight import Scheme
from lorafleet.kernels.quant.int_weight import ROUNDED_GROUP, IntScheme
from lorafleet.kernels.quant.nf4 import NF4Scheme
from lorafleet.kernels.quant.scaled_weight import ScaledScheme
from lorafleet.protocol.errors import ConfigError, UnsupportedModel
from lorafleet.protocol.quantization_methods import Method
from lorafleet.workers.bases.formats.auto_round_format import auto_round_format
from lorafleet.workers.bases.formats.awq_format import AWQFormat
from lorafleet.workers.bases.formats.bitsandbytes_format import BitsandbytesFormat
from lorafleet.workers.bases.formats.checkpoint_format import REMEDY, CheckpointFormat, StoredLinears
from lorafleet.workers.bases.formats.compressed_tensors_format import CompressedTensorsFormat, quantizes_only_kv
from lorafleet.workers.bases.formats.fp8_format import FP8Format
from lorafleet.workers.bases.formats.gptq_format import GPTQFormat
from lorafleet.workers.bases.formats.modelopt_format import (
    ModelOptFormat,
    modelopt_settings,
    quantizes_only_kv_cache,
)
from lorafleet.workers.bases.formats.mxfp4_format import MXFP4Format
from lorafleet.workers.bases.formats.quantization_settings import check_settings
from lorafleet.workers.bases.module_names import COMMON_NAMES, ModuleNames
from lorafleet.workers.bases.stored_names import AS_WRITTEN, StoredNames
from lorafleet.workers.bases.stored_tensors import StoredTensors

# By quant_method of quantization_config.
FORMATS: dict[str, Callable[[Mapping[str, Any], StoredLinears], CheckpointFormat]] = {
    "auto-round": auto_round_format,
    "awq": AWQFormat,
    "bitsandbytes": BitsandbytesFormat,
    "compressed-tensors": CompressedTensorsFormat,
    "fbgemm_fp8": FP8Format,
    "fp8": FP8Format,
    "gptq": GPTQFormat,
    "modelopt": ModelOptFormat,
    "mxfp4": MXFP4Format,
}
WITHOUT_HEAD = (
    "lm_head=False in GPTQModel, lm_head in `ignore` of llm-compressor, in `exclude_modules` of ModelOpt, or in "
    "`modules_to_not_convert` or `llm_int8_skip_modules` of transformers"
)
METHODS: dict[Method, Scheme] = {"nf4": NF4Scheme(), "int4": IntScheme(4, ROUNDED_GROUP), "fp8": ScaledScheme()}


@dataclass(frozen=True, slots=True)
class Quantization:
    """The quantization of the decoder's linears. One of the two fields is None."""

    stored: CheckpointFormat | None = None  # the checkpoint's own; its other linears stay as they are
    rounding: Scheme | None = (
        None  # the scheme to which all linears of a plain checkpoint are quantized as they are read
    )

    def of(self, projections: Iterable[str]) -> Scheme | None:
        """Returns the scheme of the linear that these projections share, by module path below the model.

        It is None if no scheme holds the values of all: the linear holds them unquantized.
        """
        if self.stored is None:
            return self.rounding
        schemes = [self.stored.schemes.get(name) for name in projections]
        shared = schemes[0]
        for scheme in schemes[1:]:
            shared = None if shared is None or scheme is None else shared.common(scheme)
        return shared

    @property
    def names(self) -> list[str]:
        """The names of the schemes."""
        schemes = [self.rounding] if self.stored is None else self.stored.schemes.values()
        return sorted({scheme.name for scheme in schemes if scheme is not None})


def stored_quantization(
    config: Mapping[str, Any] | None,
    folder: Path,
    names: ModuleNames = COMMON_NAMES,
    unread: tuple[str, ...] = (),
    *,
    stored_names: StoredNames = AS_WRITTEN,
    may_be_plain: bool = False,
) -> Quantization | None:
    """Reads the quantization_config of config.json. Raises UnsupportedModel with a remedy if it is not served.

    `names` are those of the checkpoint's modules, `stored_names` those of its files, and `unread` is as in
    StoredLinears. `may_be_plain` is for a part of a quantized checkpoint, and None is returned if no linear of it is
    quantized. Without a quantization_config, hf_quant_config.json is read, if it exists.
    """
    config = config or modelopt_settings(folder)
    if not config:
        return None
    check_settings(config)
    if quantizes_only_kv(config) or quantizes_only_kv_cache(config):
        return None
    method = config.get("quant_method") or "unnamed"
    if method not in FORMATS:
        raise UnsupportedModel(f"quantization_config: checkpoints quantized with {method} are not supported. {REMEDY}")
    with StoredTensors(folder, stored_names) as tensors:
        linears = StoredLinears(tensors, names, unread)
        stored = FORMATS[method](config, linears)
        table = linears.quantized_table(stored.tensors)
    if table is not None:
        raise UnsupportedModel(
            f"quantization_config: {folder} stores {table} quantized, which is not supported, since head and embedding "
            f"are never quantized. Quantize the model again without it: {WITHOUT_HEAD}. {REMEDY}",
            "model",
        )
    if not stored.schemes and may_be_plain:
        return None
    if not stored.schemes:
        raise UnsupportedModel(
            f"quantization_config says {method}, but {folder} stores no linear quantized. Remove it if the weights are "
            f"plain. {REMEDY}",
            "model",
        )
    return Quantization(stored)


def resolved(stored: Quantization | None, asked: Method | None) -> Quantization | None:
    """Returns the quantization to serve. Raises ConfigError if the checkpoint has another one than `asked`.

    `asked` is the server's option. None leaves everything as the checkpoint has it.
    """
    if asked is None or (stored is not None and stored.names == [asked]):
        return stored
    if stored is not None:
        raise ConfigError(
            f"quantization={asked}, but the checkpoint is already quantized to {' and '.join(stored.names)}. Leave "
            "quantization out, or serve the unquantized checkpoint.",
            "quantization",
        )
    return Quantization(rounding=METHODS[asked])
