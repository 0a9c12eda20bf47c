"""Reads one adapter's files and checks them against the base: its serving form whole, or an error that names the cause.

Composes the readers: files.py opens, peft_helper.py reads the config, weight_files.py the tensors, peft_names.py names
them. Knows nothing of ranks, slots or tiers: model.py takes it from here.
"""

# R rank · D in features · O out features

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from lorafleet.kernels.fp8 import FP8
from lorafleet.workers.errors import (
    AdapterChanged,
    AdapterError,
    AdapterMalformed,
    AdapterMismatch,
    AdapterUnsupported,
    RankTooLarge,
)
from lorafleet.workers.lora.casting import max_magnitude
from lorafleet.workers.lora.files import AdapterFolder, new_digest, open_weights, read_config
from lorafleet.workers.lora.forms import AdapterForms, LinearForm, LowRank
from lorafleet.workers.lora.giving_way import giving_way
from lorafleet.workers.lora.peft_helper import PEFTHelper
from lorafleet.workers.lora.peft_names import Pair, pair_names
from lorafleet.workers.lora.strict_json import shown
from lorafleet.workers.lora.weight_files import FLOAT_DTYPES, LoadedTensors, TensorInfo, read_weights

Shapes = Mapping[str, tuple[int, int]]  # module -> (in_features, out_features)


@dataclass(frozen=True, slots=True)
class ReadAdapter:
    """digest: sha256 (hex) of config and weights. read_s: what reading the values took, with the digest."""

    forms: AdapterForms
    digest: str
    read_s: float


def read_adapter(
    path: str | os.PathLike[str],
    *,
    shapes: Shapes,
    max_rank: int,
    dtype: torch.dtype,
    name: str,
    base_name: str = "",
    expected_digest: str = "",
) -> ReadAdapter:
    """Reads and checks the adapter in the folder `path`.

    shapes: every linear of the base that LoRA can be served on. dtype: the serving dtype, which must hold its values.
    name, base_name: for messages. expected_digest: where it is given, other bytes than those are AdapterChanged.
    Raises an AdapterError, never half an adapter.
    """
    with _about(name):
        folder = AdapterFolder.at(path)
        config_bytes = read_config(folder)
        helper = PEFTHelper.from_bytes(config_bytes)
        with open_weights(folder) as file:
            digest = new_digest(config_bytes, file)
            weights = read_weights(file, digest)
            pairs = pair_names(weights.infos, shapes, base_name)
            ranks = _check_layouts(pairs, weights.infos, shapes, helper, base_name)
            _check_targets(pairs, shapes, helper)
            _check_rank_limit(ranks, name, max_rank)
            reading = time.perf_counter()
            loaded = weights.load()
            read_s = time.perf_counter() - reading
        _check_digest(digest.hexdigest(), expected_digest)
        _check_values(loaded, dtype)
        linears = {}
        for module, pair in giving_way(pairs.items()):
            scaling = _scaling(module, ranks[module], helper, dtype)
            linears[module] = LinearForm(LowRank(loaded.by_name[pair.a], loaded.by_name[pair.b], scaling))
    return ReadAdapter(AdapterForms(linears), digest.hexdigest(), read_s)


def _range_of(dtype: torch.dtype) -> torch.dtype:
    """The dtype whose largest number bounds what can be served: of FP8 weights the scales'."""
    return torch.float32 if dtype == FP8 else dtype


@contextmanager
def _about(name: str) -> Iterator[None]:
    """Begins each message with the adapter it is about."""
    try:
        yield
    except RankTooLarge:
        raise
    except AdapterError as error:
        raise type(error)(f"adapter {name!r}: {error.message}", error.param) from error


def _peft_name(module: str) -> str:
    return f"model.{module}"


def _check_layouts(
    pairs: Mapping[str, Pair], infos: Mapping[str, TensorInfo], shapes: Shapes, helper: PEFTHelper, base_name: str
) -> dict[str, int]:
    """Every module's rank. Shapes must agree with each other, with the config and with the base."""
    ranks = {}
    for module, pair in giving_way(pairs.items()):
        a, b = _matrix(pair.a, infos), _matrix(pair.b, infos)
        expected = helper.rank_of(_peft_name(module))
        _check_base(module, a, b, shapes[module], base_name)
        if a[0] != b[1]:
            raise AdapterMalformed(f"{module} has rank {a[0]} in lora_A {list(a)} and rank {b[1]} in lora_B {list(b)}.")
        if a[0] != expected:
            raise AdapterMalformed(
                f"{module} has rank {a[0]} in the weights, and {expected} by adapter_config.json (r, rank_pattern)."
            )
        ranks[module] = expected
    return ranks


def _matrix(name: str, infos: Mapping[str, TensorInfo]) -> tuple[int, int]:
    info = infos[name]
    if info.shape == (0,):
        raise AdapterMalformed(
            f"the tensor {shown(name)} is empty: a DeepSpeed ZeRO-3 run saved it without gathering it first."
        )
    if len(info.shape) != 2 or 0 in info.shape:
        raise AdapterMalformed(f"the tensor {shown(name)} has shape {shown(list(info.shape))}; it must be a matrix.")
    if info.dtype not in FLOAT_DTYPES:
        raise AdapterUnsupported(
            f"the tensor {shown(name)} is {shown(info.dtype)}; weights in F32, BF16, F16 and F64 are served."
        )
    return info.shape[0], info.shape[1]


def _check_base(module: str, a: tuple[int, int], b: tuple[int, int], shape: tuple[int, int], base_name: str) -> None:
    if (a[1], b[0]) == shape:
        return
    transposed = (a[0], b[1]) == shape and a[1] == b[0]
    hint = (
        "Its matrices are transposed, as mlx-lm writes them: convert them to PEFT's layout."
        if transposed
        else "The adapter was made for another model."
    )
    base = f"the base model {base_name!r}" if base_name else "the base model"
    raise AdapterMismatch(
        f"{module} has lora_A {list(a)} and lora_B {list(b)}; {base} has {shape[0]} inputs and {shape[1]} outputs "
        f"there, so A must be [r, {shape[0]}] and B [{shape[1]}, r]. {hint}"
    )


def _check_targets(pairs: Mapping[str, Pair], shapes: Shapes, helper: PEFTHelper) -> None:
    """PEFT only warns about these two, and then serves the base's weights there."""
    targeted = [module for module in giving_way(shapes) if helper.targets(_peft_name(module))]
    targeted += [m for m in ("model.embed_tokens", "lm_head") if helper.targets(m, is_linear=False)]
    missing = [module for module in targeted if module not in pairs]
    if missing:
        raise AdapterMalformed(
            f"adapter_config.json targets {missing[0]} ({len(missing)} modules in all) for which the weights file has "
            f"no tensors."
        )
    stray = sorted(pairs.keys() - set(targeted))
    if stray:
        raise AdapterMalformed(
            f"the weights file has tensors for {stray[0]} ({len(stray)} modules in all), which adapter_config.json "
            f"does not target (target_modules, exclude_modules, layers_to_transform)."
        )


def _check_rank_limit(ranks: Mapping[str, int], name: str, limit: int) -> None:
    rank = max(ranks.values())
    if rank > limit:
        raise RankTooLarge(
            f"adapter {name!r} has rank {rank}; this server allows lora.max_lora_rank={limit}. "
            f"Raise lora.max_lora_rank to {rank} and restart, or retrain at rank <= {limit}."
        )


def _check_digest(digest: str, expected: str) -> None:
    if expected and digest != expected:
        raise AdapterChanged(
            f"the files have the digest {digest[:12]}…, and the adapter was registered with {expected[:12]}…. "
            f"Load it again (load_inplace) to serve the new version."
        )


def _scaling(module: str, rank: int, helper: PEFTHelper, dtype: torch.dtype) -> float:
    scaling = helper.scaling_of(_peft_name(module), rank)
    if abs(scaling) > torch.finfo(_range_of(dtype)).max:
        raise AdapterMalformed(f"{module} has the scaling {scaling}, which overflows {dtype}.")
    return scaling


def _check_values(loaded: LoadedTensors, dtype: torch.dtype) -> None:
    """Finite in the serving dtype. Rounding keeps the order, so the largest value decides for all."""
    dtype = _range_of(dtype)
    if loaded.all_values is not None and max_magnitude(loaded.all_values).to(dtype).isfinite():
        return
    for name, tensor in loaded.by_name.items():
        largest = max_magnitude(tensor)
        if largest.to(dtype).isfinite():
            continue
        if not largest.isfinite():
            raise AdapterMalformed(f"the tensor {shown(name)} has NaN or infinite values.")
        raise AdapterMalformed(
            f"the tensor {shown(name)} has values up to {largest.item():.3g}, which overflow {dtype}, the "
            f"serving dtype. Serve with lora_dtype=bfloat16 or float32."
        )
