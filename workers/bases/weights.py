"""Fills a model from a checkpoint's safetensors files, one or sharded, and checks that nothing is missing.

Tensors are copied one after another into the packed parameters, so that the host never holds the whole model twice. A
tensor-parallel rank reads its own part of each.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from lorafleet.kernels.quant.base_weight import BaseWeight, QuantizedMatrix, QuantizedWeight, Scheme
from lorafleet.protocol.errors import ConfigError
from lorafleet.workers.bases.checkpoint_model import CheckpointModel
from lorafleet.workers.bases.expert_tensors import expert_parts, stacked_sources
from lorafleet.workers.bases.formats.checkpoint_format import LINEAR, LinearTensors
from lorafleet.workers.bases.linear_schemes import linear_scheme
from lorafleet.workers.bases.model_config import ModelConfig
from lorafleet.workers.bases.module_names import COMMON_NAMES, ModuleNames
from lorafleet.workers.bases.quantization import Quantization
from lorafleet.workers.bases.recurrent_tensors import recurrent_parts
from lorafleet.workers.bases.stored_names import AS_WRITTEN, HEAD_WEIGHT, StoredNames
from lorafleet.workers.bases.stored_tensors import FiniteTensor, MovedTensor, Stored, StoredTensors
from lorafleet.workers.bases.tensor_parts import ModelPart, PlainPart, QuantizedPart, TensorSource
from lorafleet.workers.bases.text_part import is_of_pictures, text_name
from lorafleet.workers.models.layers import Norm
from lorafleet.workers.models.vocab_table import VocabTable

# Names of the scales that an fp8 KV cache is multiplied by. kv_scale is for K and V both; output_scale is an old name.
KV_SCALE = re.compile(
    r"(?:model\.|language_model\.)*layers\.(\d+)\.self_attn\."
    r"(?:(kv|k|v)_scale|attn\.([kv])_scale|([kv])_proj\.(?:\4_scale|output_scale))"
)
VALUE_HEAD = "v_head."  # Beginning of the names of TRL's head for reinforcement learning, which generates nothing.
ONE_BY_DEFAULT = "scalar", "router.scale", "output_scale"  # ends of names; random ones would shrink the activations
Progress = Callable[[int, int], None]  # tensors done, tensors in all


def load_weights(model: CheckpointModel, folder: Path, progress: Progress | None = None) -> None:
    """Fills the model from the checkpoint. Raises ConfigError naming a missing, unknown or misshapen tensor."""
    sources = tensor_sources(model)
    wanted = {name for source in sources.values() for name in source.fills}
    stored = None if model.config.quantization is None else model.config.quantization.stored
    quantized = {f"model.{module}.weight" for module in stored.schemes} if stored is not None else set()
    seen: set[str] = set()
    with StoredTensors(folder, model.config.stored_names) as tensors:
        for name in tensors.names():
            known_as = model.config.names.engine_name(text_name(name) if model.config.is_text_part else name)
            if _is_of_quantized(known_as, model.config.quantization):
                continue
            source = sources.get(known_as)
            if source is not None and not quantized.isdisjoint(source.fills):
                raise ConfigError(
                    f"{tensors.path_of[name]} has {name!r} beside its quantized form. Export the checkpoint again.",
                    "model",
                )
            if source is None:
                if model.config.is_text_part and is_of_pictures(name):
                    continue
                if not _ignorable(known_as, model.config) and not KV_SCALE.fullmatch(known_as):
                    raise ConfigError(
                        f"{tensors.path_of[name]} has the tensor {name!r}, which {model.config.architecture} does not "
                        "have."
                    )
                continue
            if not seen.isdisjoint(source.fills):
                raise ConfigError(
                    f"{tensors.path_of[name]}: {name!r} holds weights that another tensor holds as well. Export the "
                    "checkpoint again.",
                    "model",
                )
            plain, path = tensors.plain(name), tensors.path_of[name]
            _fill(source, name, FiniteTensor(plain, name, path) if source.is_rounded else plain, path)
            seen.update(source.fills)
            if progress is not None:
                progress(len(seen), len(wanted))
        for name, matrix in _quantized_matrices(model, tensors):
            if name not in sources:
                raise ConfigError(
                    f"{folder} has the quantized linear {name!r}, which {model.config.architecture} does not have."
                )
            _fill(sources[name], name, matrix, folder)
            seen.add(name)
            if progress is not None:
                progress(len(seen), len(wanted))
    missing = sorted(wanted - seen)
    if missing:
        first = model.config.names.name_in_part(missing[0])
        raise ConfigError(f"{folder} lacks {len(missing)} tensors; the first is {first!r}.", "model")


def tensor_sources(model: CheckpointModel) -> dict[str, TensorSource]:
    """Returns what each tensor of a checkpoint fills, by the engine's name of the tensor."""
    sources = {name: TensorSource((part,), (name,)) for name, part in _parts(model).items()}
    return sources | stacked_sources(model)


def held_tensors(model: CheckpointModel) -> dict[str, Callable[[], Tensor]]:
    """Returns this rank's part of every tensor, by the checkpoint's name.

    Each is a function that returns the values as they are in the checkpoint, in the serving dtype.
    """
    return {name: part.values for name, part in _parts(model).items()}


def read_kv_scales(
    folder: Path,
    has_cache: Mapping[int, bool],
    names: ModuleNames = COMMON_NAMES,
    stored_names: StoredNames = AS_WRITTEN,
) -> list[tuple[float, float]] | None:
    """Returns (k_scale, v_scale) of each layer that has attention, or None if there are none.

    Raises ConfigError if only some exist. has_cache says which of these layers have a cache of their own. The scales of
    others have no effect and are 1. `names` are those of the checkpoint's modules, `stored_names` those of its files.
    """
    scales: dict[tuple[int, str], float] = {}
    with StoredTensors(folder, stored_names) as tensors:
        for name in tensors.names():
            found = KV_SCALE.fullmatch(names.engine_name(text_name(name)))
            if found is None:
                continue
            tensor = tensors.tensor(name)
            scale = tensor.item() if tensor.numel() == 1 else math.nan
            if not 0 < scale < math.inf:
                raise ConfigError(
                    f"{tensors.path_of[name]}: {name} must be one positive number, since it scales the KV cache."
                )
            layer, kinds = int(found[1]), found[2] or found[3] or found[4]
            if has_cache.get(layer, True):
                scales |= {(layer, kind): scale for kind in kinds}
    wanted = [(layer, kind) for layer, has_own in has_cache.items() if has_own for kind in "kv"]
    if not scales:
        return None
    if sorted(scales) != wanted:
        layer, kind = min(set(wanted) ^ set(scales))
        raise ConfigError(
            f"{folder} has KV cache scales for some layers only: layer {layer}'s {kind}_scale is the first without a "
            "counterpart. Export the checkpoint again.",
            "model",
        )
    return [(scales.get((layer, "k"), 1.0), scales.get((layer, "v"), 1.0)) for layer in has_cache]


def fill_randomly(model: CheckpointModel) -> None:
    """Fills the model with random weights that keep activations in range.

    Speed does not depend on the weights, unless they are zero. Weights that several ranks hold are the same on each.
    """
    generator = torch.Generator(model.norm.weight.device)
    for name, part in _parts(model).items():
        if "norm" in name or name.endswith(ONE_BY_DEFAULT):
            assert isinstance(part, PlainPart)
            part.held.fill_(1.0)
        else:
            generator.manual_seed(zlib.crc32(f"{name} {part.places}".encode()))
            part.fill_randomly(generator)


def _ignorable(name: str, config: ModelConfig) -> bool:
    """Returns whether a tensor needs no reading by itself."""
    if name.startswith(config.mtp_names):
        return True
    if name.removeprefix("model.").rpartition(".")[0] in config.absent_modules:
        return True
    if name.startswith(VALUE_HEAD) or name.endswith("rotary_emb.inv_freq"):
        return True
    return config.tie_word_embeddings and config.has_head and name == HEAD_WEIGHT  # equal to the embedding


def _is_of_quantized(name: str, quantization: Quantization | None) -> bool:
    """Returns whether the tensor is one of those of quantized linears, which are read together."""
    if quantization is None or quantization.stored is None:
        return False
    if name in quantization.stored.other_tensors:
        return True
    match = LINEAR.fullmatch(name)
    return (
        match is not None
        and match[1] in quantization.stored.schemes
        and bool(quantization.stored.tensors.fullmatch(match[2]))
    )


def _quantized_matrices(model: CheckpointModel, tensors: StoredTensors) -> Iterator[tuple[str, QuantizedMatrix]]:
    """Yields the linears that are stored quantized, by the name that their plain weights would have.

    They are decoded on the model's device.
    """
    config, device = model.config, model.norm.weight.device
    if config.quantization is None or config.quantization.stored is None:
        return
    file_name = {config.names.engine_name(text_name(name)): name for name in tensors.names()}
    for module in config.quantization.stored.schemes:
        if module in config.absent_modules:
            continue
        linear = LinearTensors(module, file_name, lambda name: MovedTensor(tensors.stored(file_name[name]), device))
        yield linear.path("weight"), config.quantization.stored.matrix(linear)


def _fill(source: TensorSource, name: str, stored: Stored, path: Path) -> None:
    check_shape(source, name, stored, path)
    for part in source.parts:
        part.fill(stored)


def check_shape(source: TensorSource, name: str, stored: Stored, path: Path) -> None:
    """Raises ConfigError if the tensor does not have the shape that the model needs."""
    shape = stored.get_shape()
    for part in source.parts:
        if shape != part.whole_shape:
            raise ConfigError(f"{path}: {name} has shape {shape}; config.json requires {part.whole_shape}.")


def _parts(model: CheckpointModel) -> dict[str, ModelPart]:
    """Returns the parts by the names of the checkpoint's tensors, with those of experts one by one."""
    config, shard = model.config, model.shard

    def vocabulary(table: VocabTable) -> PlainPart:
        place = (shard.vocabulary, slice(0, config.hidden_size))
        return PlainPart(table.weight.data[: table.num_tokens], [place], [config.vocab_size, config.hidden_size])

    def norm(norm: Norm) -> PlainPart:
        size = norm.weight.shape[0]
        return PlainPart(norm.weight.data, [(slice(0, size),)], [size], added=1.0 if config.norm.adds_one else 0.0)

    def rows(
        scheme: Scheme | None,
        weight: BaseWeight,
        first: int,
        count: int,
        places: list[tuple[slice, ...]],
        whole: list[int],
    ) -> ModelPart:
        if scheme is None:
            return PlainPart(weight.dequantized(slice(first, first + count)), places, whole)
        is_rounded = config.quantization is not None and config.quantization.stored is None
        device = model.norm.weight.device
        return QuantizedPart(cast(QuantizedWeight, weight), scheme, is_rounded, device, first, count, places, whole)

    parts: dict[str, ModelPart] = {}
    for name, table in model.tables().items():
        parts[f"{name}.weight"] = vocabulary(table)
        if table.bias is not None:
            held = table.bias.data[: table.num_tokens]
            parts[f"{name}.bias"] = PlainPart(held, [(shard.vocabulary,)], [config.vocab_size])
    for name, vector in model.vectors().items():
        whole = tuple(slice(0, size) for size in vector.shape)
        parts[f"model.{name}"] = PlainPart(vector.data, [whole], list(vector.shape))
    for i, sinks in model.sinks().items():
        heads = config.attentions[i].num_heads
        own = slice(shard.rank * len(sinks), (shard.rank + 1) * len(sinks))
        parts[f"model.layers.{config.attention_layers[i]}.self_attn.sinks"] = PlainPart(sinks, [(own,)], [heads])
    for name, n in model.norms():
        parts[f"model.{name}.weight"] = norm(n)
        if n.bias is not None:
            size = len(n.bias)
            parts[f"model.{name}.bias"] = PlainPart(n.bias.data, [(slice(0, size),)], [size])
    parts |= recurrent_parts(model)
    for name, numbers in model.activation_numbers():
        for i, leaf in enumerate(("alpha_p", "alpha_n")):
            parts[f"model.{name}.{leaf}"] = PlainPart(numbers[i : i + 1], [(slice(0, 1),)], [1])
        for i, leaf in enumerate(("beta", "eps"), start=2):
            parts[f"model.{name}.{leaf}"] = PlainPart(numbers[i : i + 1], [()], [])
    for names, linear in model.packed_linears():
        scheme = linear_scheme(config, names)
        biases = () if linear.bias is None else linear.bias.data.split(linear.out_features)
        row = 0
        for name, num_rows in zip(names, linear.out_features, strict=True):
            inputs, outputs = shard.projections[name].shape
            places: list[tuple[slice, ...]] = [(rows, shard.input(name)) for rows in shard.outputs(name)]
            whole_shape = [outputs, inputs]
            parts[f"model.{name}.weight"] = rows(scheme, linear.weight, row, num_rows, places, whole_shape)
            row += num_rows
        for name, bias in zip(names, biases, strict=linear.bias is not None):
            whole_shape = [shard.projections[name].num_outputs]
            parts[f"model.{name}.bias"] = PlainPart(bias, [(rows,) for rows in shard.outputs(name)], whole_shape)
    return parts if config.experts is None else parts | expert_parts(model)
