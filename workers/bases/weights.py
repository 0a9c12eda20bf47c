"""Fills a DecoderModel from a checkpoint's safetensors files, one or sharded, and checks that nothing is missing.

Tensors are copied one after another into the packed parameters, so that the host never holds the whole model twice. A
tensor-parallel rank reads its own part of each.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lorafleet.kernels.quant.base_weight import BaseWeight, QuantizedMatrix
from lorafleet.kernels.quant.fp8_weight import FP8Matrix, FP8Weight
from lorafleet.kernels.quant.nf4 import NF4Matrix, NF4Weight
from lorafleet.protocol.errors import ConfigError
from lorafleet.protocol.quantization_methods import Method
from lorafleet.workers.bases.checkpoint import ModelConfig
from lorafleet.workers.bases.expert_names import engine_name
from lorafleet.workers.bases.quantized_tensors import BESIDE_WEIGHT, QUANTIZE, quantized_matrix
from lorafleet.workers.bases.stored_tensors import Stored, StoredTensors
from lorafleet.workers.bases.text_part import is_of_pictures, text_name
from lorafleet.workers.models.decoder import DecoderModel
from lorafleet.workers.models.layers import RMSNorm
from lorafleet.workers.models.vocab_table import VocabTable

# Names of the scales that an fp8 KV cache is multiplied by. kv_scale is for K and V both; output_scale is an old name.
KV_SCALE = re.compile(
    r"model\.layers\.(\d+)\.self_attn\."
    r"(?:(kv|k|v)_scale|attn\.([kv])_scale|([kv])_proj\.(?:\4_scale|output_scale))"
)
Progress = Callable[[int, int], None]  # tensors done, tensors in all


def load_weights(model: DecoderModel, folder: Path, progress: Progress | None = None) -> None:
    """Fills the model from the checkpoint. Raises ConfigError naming a missing, unknown or misshapen tensor."""
    parts = _parts(model)
    sources = {name: _Source((part,), (name,)) for name, part in parts.items()} | _stacked_experts(model)
    seen: set[str] = set()
    with StoredTensors(folder) as tensors:
        for name in tensors.names():
            known_as = engine_name(text_name(name) if model.config.is_text_part else name)
            source = sources.get(known_as)
            if source is None:
                if model.config.is_text_part and is_of_pictures(name):
                    continue
                if not _ignorable(known_as, model.config) and not KV_SCALE.fullmatch(name):
                    path = tensors.path_of[name]
                    architecture = model.config.architecture
                    raise ConfigError(f"{path} has the tensor {name!r}, which {architecture} does not have.")
                continue
            stored = _stored(name, tensors, model)
            shape = stored.get_shape()
            for part in source.parts:
                if shape != part.whole_shape:
                    raise ConfigError(
                        f"{tensors.path_of[name]}: {name} has shape {shape}; config.json requires {part.whole_shape}."
                    )
                part.fill(stored)
            seen.update(source.fills)
            if progress is not None:
                progress(len(seen), len(parts))
    missing = sorted(set(parts) - seen)
    if missing:
        raise ConfigError(f"{folder} lacks {len(missing)} tensors; the first is {missing[0]!r}.", "model")


def held_tensors(model: DecoderModel) -> dict[str, Callable[[], Tensor]]:
    """Returns this rank's part of every tensor, by the checkpoint's name.

    Each is a function that returns the values as they are in the checkpoint, in the serving dtype.
    """
    return {name: part.values for name, part in _parts(model).items()}


def read_kv_scales(folder: Path, num_layers: int) -> list[tuple[float, float]] | None:
    """Returns (k_scale, v_scale) of each layer, or None if there are none. Raises ConfigError if only some exist."""
    scales: dict[tuple[int, str], float] = {}
    with StoredTensors(folder) as tensors:
        for name in tensors.names(KV_SCALE):
            found = KV_SCALE.fullmatch(name)
            assert found is not None
            tensor = tensors.tensor(name)
            scale = tensor.item() if tensor.numel() == 1 else math.nan
            if not 0 < scale < math.inf:
                raise ConfigError(
                    f"{tensors.path_of[name]}: {name} must be one positive number, since it scales the KV cache."
                )
            layer, kinds = int(found[1]), found[2] or found[3] or found[4]
            scales |= {(layer, kind): scale for kind in kinds}
    wanted = [(layer, kind) for layer in range(num_layers) for kind in "kv"]
    if not scales:
        return None
    if sorted(scales) != wanted:
        layer, kind = min(set(wanted) ^ set(scales))
        raise ConfigError(
            f"{folder} has KV cache scales for some layers only: layer {layer}'s {kind}_scale is the first without a "
            "counterpart. Export the checkpoint again.",
            "model",
        )
    return [(scales[layer, "k"], scales[layer, "v"]) for layer in range(num_layers)]


def fill_randomly(model: DecoderModel) -> None:
    """Fills the model with random weights that keep activations in range.

    Speed does not depend on the weights, unless they are zero. Weights that several ranks hold are the same on each.
    """
    generator = torch.Generator(model.norm.weight.device)
    for name, part in _parts(model).items():
        if "norm" in name:
            assert isinstance(part, _Part)
            part.held.fill_(1.0)
        else:
            generator.manual_seed(zlib.crc32(f"{name} {part.places}".encode()))
            part.fill_randomly(generator)


def _ignorable(name: str, config: ModelConfig) -> bool:
    """Returns whether a tensor needs no reading by itself, such as those that belong to a quantized weight."""
    if config.quantization is not None and config.quantization.stored is not None and BESIDE_WEIGHT.fullmatch(name):
        return True
    return name.endswith("rotary_emb.inv_freq") or (config.tie_word_embeddings and name == "lm_head.weight")


def _stored(name: str, tensors: StoredTensors, model: DecoderModel) -> Stored:
    """Returns the tensor for reading. A quantized weight is decoded on the model's device."""
    quantization, device = model.config.quantization, model.norm.weight.device
    if quantization is not None and quantization.stored is not None:
        matrix = quantized_matrix(name, tensors.path_of, lambda other: tensors.tensor(other).to(device))
        if matrix is not None:
            return matrix
    return tensors.stored(name)


@dataclass(frozen=True, slots=True)
class _Part:
    """This rank's part of one tensor in the checkpoint."""

    held: Tensor  # a parameter, or rows of one
    places: list[tuple[slice, ...]]  # where its rows are in the whole tensor, in order
    whole_shape: list[int]
    added: float = 0.0  # added to the checkpoint's values, in held's dtype

    def fill(self, stored: Stored) -> None:
        row = 0
        for place in self.places:
            values = stored[place]
            self.held[row : row + len(values)].copy_(values)
            row += len(values)
        assert row == len(self.held)
        if self.added:
            self.held.add_(self.added)

    def fill_randomly(self, generator: torch.Generator) -> None:
        self.held.normal_(std=0.02, generator=generator)

    def values(self) -> Tensor:
        return self.held - self.added if self.added else self.held


@dataclass(frozen=True, slots=True)
class _QuantizedPart:
    """The rows of a quantized weight from first_row on. It works like _Part."""

    weight: NF4Weight | FP8Weight
    method: Method
    first_row: int
    num_rows: int
    places: list[tuple[slice, ...]]
    whole_shape: list[int]

    def fill(self, stored: Stored) -> None:
        """Fills the rows from the stored matrix.

        A plain matrix is quantized whole, so that blocks do not depend on what ranks hold.
        """
        matrix = self._quantized(stored)
        row = self.first_row
        for rows, columns in self.places:
            self.weight.fill(row, matrix, (rows, columns))
            row += rows.stop - rows.start
        assert row == self.first_row + self.num_rows

    def fill_randomly(self, generator: torch.Generator) -> None:
        columns = self.places[0][1]
        shape = self.num_rows, columns.stop - columns.start
        values_OD = torch.empty(shape, dtype=self.weight.dtype, device=generator.device)
        whole = slice(0, shape[0]), slice(0, shape[1])
        self.weight.fill(self.first_row, self._quantized(values_OD.normal_(std=0.02, generator=generator)), whole)

    def values(self) -> Tensor:
        return self.weight.dequantized(slice(self.first_row, self.first_row + self.num_rows))

    def _quantized(self, stored: Stored | Tensor) -> QuantizedMatrix:
        if isinstance(stored, (NF4Matrix, FP8Matrix)):
            return stored
        device = next(self.weight.parameters()).device
        return QUANTIZE[self.method](stored[...].to(device, self.weight.dtype))


@dataclass(frozen=True, slots=True)
class _Source:
    """The parameters that one tensor of a file fills."""

    parts: tuple[_Part | _QuantizedPart, ...]
    fills: tuple[str, ...]  # names in _parts() that these parts fill


def _parts(model: DecoderModel) -> dict[str, _Part | _QuantizedPart]:
    """Returns the parts by the names of the checkpoint's tensors, with those of experts one by one."""
    config, shard = model.config, model.shard

    def vocabulary(table: VocabTable) -> _Part:
        place = (shard.vocabulary, slice(0, config.hidden_size))
        return _Part(table.weight.data[: table.num_tokens], [place], [config.vocab_size, config.hidden_size])

    def norm(norm: RMSNorm) -> _Part:
        size = norm.weight.shape[0]
        return _Part(norm.weight.data, [(slice(0, size),)], [size], added=1.0 if config.norm_adds_one else 0.0)

    parts: dict[str, _Part | _QuantizedPart] = {"model.embed_tokens.weight": vocabulary(model.embed_tokens)}
    if not config.tie_word_embeddings:
        parts["lm_head.weight"] = vocabulary(model.lm_head)
    parts |= {f"model.{name}.weight": norm(n) for name, n in model.norms()}
    shapes = config.linear_shapes()
    for names, linear in model.packed_linears():
        biases = () if linear.bias is None else linear.bias.data.split(linear.out_features)
        row = 0
        for name, num_rows in zip(names, linear.out_features, strict=True):
            inputs, outputs = shapes[name]
            places: list[tuple[slice, ...]] = [(rows, shard.input(name)) for rows in shard.outputs(name)]
            parts[f"model.{name}.weight"] = _rows(linear.weight, row, num_rows, places, [outputs, inputs])
            row += num_rows
        for name, bias in zip(names, biases, strict=linear.bias is not None):
            parts[f"model.{name}.bias"] = _Part(bias, [(rows,) for rows in shard.outputs(name)], [shapes[name][1]])
    return parts if config.experts is None else parts | _experts(model)


def _rows(
    weight: BaseWeight, first_row: int, num_rows: int, places: list[tuple[slice, ...]], whole_shape: list[int]
) -> _Part | _QuantizedPart:
    if isinstance(weight, (NF4Weight, FP8Weight)):
        method: Method = "nf4" if isinstance(weight, NF4Weight) else "fp8"
        return _QuantizedPart(weight, method, first_row, num_rows, places, whole_shape)
    return _Part(weight.dequantized(slice(first_row, first_row + num_rows)), places, whole_shape)


def _experts(model: DecoderModel) -> dict[str, _Part | _QuantizedPart]:
    """Returns the parts of every expert's own tensors, as checkpoints on the hub have them."""
    rows, hidden = model.shard.of_expert, slice(0, model.config.hidden_size)
    parts: dict[str, _Part | _QuantizedPart] = {}
    for prefix, held in _held_experts(model):
        for leaf, (inputs, outputs) in model.config.expert_shapes().items():
            place = (hidden, rows) if leaf == "down_proj" else (rows, hidden)
            for expert, weight in enumerate(held[leaf]):
                parts[f"{prefix}.{expert}.{leaf}.weight"] = _Part(weight, [place], [outputs, inputs])
    return parts


def _stacked_experts(model: DecoderModel) -> dict[str, _Source]:
    """Returns the sources that hold all experts in one tensor, as transformers 5 saves them.

    gate_up_proj is [E, 2I, D] and down_proj is [E, D, I].
    """
    experts = model.config.experts
    if experts is None:
        return {}
    all_experts, rows, hidden = slice(0, experts.count), model.shard.of_expert, slice(0, model.config.hidden_size)
    size = experts.intermediate_size
    up_rows = slice(size + rows.start, size + rows.stop)
    gate_up_shape = [experts.count, 2 * size, hidden.stop]
    sources: dict[str, _Source] = {}
    for prefix, held in _held_experts(model):
        gate_up = (
            _Part(held["gate_proj"], [(all_experts, rows, hidden)], gate_up_shape),
            _Part(held["up_proj"], [(all_experts, up_rows, hidden)], gate_up_shape),
        )
        down = _Part(held["down_proj"], [(all_experts, hidden, rows)], [experts.count, hidden.stop, size])
        for stacked, parts in {"gate_up_proj": gate_up, "down_proj": (down,)}.items():
            leaves = ("gate_proj", "up_proj") if stacked == "gate_up_proj" else (stacked,)
            fills = tuple(f"{prefix}.{e}.{leaf}.weight" for e in range(experts.count) for leaf in leaves)
            sources[f"{prefix}.{stacked}"] = _Source(parts, fills)
    return sources


def _held_experts(model: DecoderModel) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yields each mixture's name in the checkpoint, and this rank's part of its projections, [E, out, in]."""
    for name, mixture in model.mixtures():
        gate, up = mixture.gate_up_E2ID.data.chunk(2, dim=1)
        yield f"model.{name}", {"gate_proj": gate, "up_proj": up, "down_proj": mixture.down_EDI.data}
