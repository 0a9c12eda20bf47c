"""Reads linears that llm-compressor stored by its library compressed-tensors.

config.json has groups of linears, each with the linears' names or classes (`targets`) and their numbers. A linear is
quantized if it has a scale in the files; `ignore` names linears that are plain.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from lorafleet.kernels.quant.base_weight import QuantizedMatrix, Scheme
from lorafleet.kernels.quant.int_weight import IntScheme
from lorafleet.protocol.errors import ConfigError, UnsupportedModel
from lorafleet.workers.bases.formats.checkpoint_format import REMEDY, LinearTensors, StoredLinears
from lorafleet.workers.bases.formats.compressed_floats import INPUT_BITS, StoredNumbers, stored_numbers
from lorafleet.workers.bases.formats.pack_quantized import as_stored, int_scheme, pack_quantized
from lorafleet.workers.bases.formats.quantization_settings import NamePatterns
from lorafleet.workers.bases.text_part import spellings

KV_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


class CompressedTensorsFormat:
    tensors = re.compile(
        "weight|weight_(?:packed|scale|global_scale|zero_point|shape|g_idx)|input_(?:scale|zero_point|global_scale)"
    )
    other_tensors: frozenset[str] = frozenset()

    def __init__(self, config: Mapping[str, Any], linears: StoredLinears) -> None:
        kv_scheme = config.get("kv_cache_scheme")
        if kv_scheme and not _is_static_fp8(kv_scheme):
            raise UnsupportedModel(f"quantization_config: kv_cache_scheme={kv_scheme} is not supported. {REMEDY}")
        for other in ("sparsity_config", "transform_config"):
            if config.get(other):
                raise UnsupportedModel(f"quantization_config: {other} is not supported. {REMEDY}")
        stored_as = config.get("format")
        groups = [_Group(name, group, stored_as) for name, group in (config.get("config_groups") or {}).items()]
        ignored = config.get("ignore") or []
        patterns = NamePatterns()
        self._numbers: dict[str, StoredNumbers] = {}
        for module, name in linears.file_names(linears.with_tensor(re.compile("weight_scale")), "weight_scale"):
            if _best_match(name, ignored, "ignore", patterns) is not None:
                raise ConfigError(
                    f"{name} is stored quantized, but quantization_config's ignore says that it is not. Correct "
                    "config.json.",
                    "model",
                )
            numbers = _group_of(name, groups, patterns).numbers
            if isinstance(numbers.scheme, IntScheme):
                numbers = _packed_ints(as_stored(numbers.scheme, linears.linear(module)))
            self._numbers[module] = numbers
        self.schemes: dict[str, Scheme] = {module: numbers.scheme for module, numbers in self._numbers.items()}

    def matrix(self, linear: LinearTensors) -> QuantizedMatrix:
        return self._numbers[linear.module].matrix(linear)


class _Group:
    """One of the config_groups. Raises UnsupportedModel if its numbers are not served."""

    def __init__(self, name: str, group: Mapping[str, Any], stored_as: str | None) -> None:
        self.targets: list[str] = group.get("targets") or []
        self.numbers = _numbers(name, group, group.get("format") or stored_as)


def _numbers(name: str, group: Mapping[str, Any], stored_as: str | None) -> StoredNumbers:
    weights, inputs = group.get("weights") or {}, group.get("input_activations") or {}
    if not group.get("output_activations") and inputs.get("num_bits", 16) in INPUT_BITS:
        if stored_as == "pack-quantized":
            scheme = int_scheme(weights)
            numbers = None if scheme is None else _packed_ints(scheme)
        else:  # marlin-24 leaves out half of the numbers
            numbers = None if stored_as == "marlin-24" else stored_numbers(weights, inputs)
        if numbers is not None:
            return numbers
    raise UnsupportedModel(
        f"quantization_config: config_groups[{name!r}] of compressed-tensors has format={stored_as}, weights="
        f"{dict(weights)} and input_activations={dict(inputs)}, which is not supported. {REMEDY}"
    )


def _packed_ints(scheme: IntScheme) -> StoredNumbers:
    return StoredNumbers(scheme, lambda linear: pack_quantized(linear, scheme))


def _group_of(name: str, groups: Iterable[_Group], patterns: NamePatterns) -> _Group:
    """Returns the linear's group. Targets that name it come before patterns, and patterns before classes."""
    found = ((_best_match(name, group.targets, "targets", patterns), group) for group in groups)
    ranked = [(rank, group) for rank, group in found if rank is not None]
    if not ranked:
        raise ConfigError(
            f"{name} is stored quantized, but none of quantization_config's config_groups has it as a target. Correct "
            "config.json.",
            "model",
        )
    return min(ranked, key=lambda found: found[0])[1]


def _best_match(name: str, targets: Iterable[str], field: str, patterns: NamePatterns) -> int | None:
    """Returns how exactly a target means the linear (0 is most exact), or None if none does.

    `field` is the key that has the targets.
    """
    names = spellings(name)

    def rank(target: str) -> int | None:
        if target.startswith("re:"):
            return 1 if any(patterns.match(field, target.removeprefix("re:"), spelled) for spelled in names) else None
        return 0 if target in names else 2 if target == "Linear" else None

    return min((found for target in targets if (found := rank(target)) is not None), default=None)


def quantizes_only_kv(config: Mapping[str, Any]) -> bool:
    """Returns whether llm-compressor left the weights alone and wrote only a scale per layer for K and for V."""
    if config.get("quant_method") != "compressed-tensors" or config.get("config_groups"):
        return False
    if any(config.get(other) for other in ("sparsity_config", "transform_config")):
        return False
    return _is_static_fp8(config.get("kv_cache_scheme"))


def _is_static_fp8(kv_scheme: object) -> bool:
    return isinstance(kv_scheme, Mapping) and all(kv_scheme.get(key) == value for key, value in KV_SCHEME.items())
