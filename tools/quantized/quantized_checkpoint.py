"""Writes a checkpoint whose linears are quantized as `--quantization` does it at each start (`lorafleet quantize`).

The loader's own table says which tensors hold linears, so the same ones are quantized, experts among them. Linears are
quantized some rows at a time, on a GPU if there is one. The host's memory holds one linear and the tensors of one
output file, and a GPU's memory one linear.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lorafleet.protocol.config_json import read_json
from lorafleet.protocol.engine_config import Device, EngineConfig
from lorafleet.protocol.errors import ConfigError, UnsupportedModel
from lorafleet.protocol.quantization_methods import Method
from lorafleet.tools.copied_tokenizer import MAX_BYTES, copy_file
from lorafleet.tools.new_folder import check_new, new_folder
from lorafleet.tools.quantized.shard_writer import ShardWriter
from lorafleet.workers.auto_options import base_dtype, choose_device
from lorafleet.workers.bases.checkpoint import read_model_config
from lorafleet.workers.bases.formats.checkpoint_format import LINEAR
from lorafleet.workers.bases.formats.written_linears import WRITTEN, Shape
from lorafleet.workers.bases.model_config import ModelConfig
from lorafleet.workers.bases.quantization import METHODS, resolved
from lorafleet.workers.bases.stored_tensors import FiniteTensor, MovedTensor, Stored, StoredTensors, TensorInMemory
from lorafleet.workers.bases.tensor_parts import QuantizedPart, StackedRounding, TensorSource, quantized_rows
from lorafleet.workers.bases.text_part import text_name, untied_flags
from lorafleet.workers.bases.weights import check_shape, tensor_sources
from lorafleet.workers.models.decoder import DecoderModel
from lorafleet.workers.models.generic.architecture import implementation
from lorafleet.workers.tp.group import TPGroup

SHARD_BYTES = 2 << 30  # Largest output file, unless one tensor is larger.
SPARE_BYTES = 16 << 20  # Disk space that has to remain free.
CPU, META = torch.device("cpu"), torch.device("meta")
CONFIG, MODELOPT_CONFIG = "config.json", "hf_quant_config.json"
COPIED = (".jinja", ".json", ".model", ".tiktoken", ".txt")  # Ends of names of files that are copied.
LICENSES = ("LICENSE", "NOTICE")  # Beginnings of more such names.
TEMPLATES = "additional_chat_templates"
Part = QuantizedPart | StackedRounding
OnRead = Callable[[int, int], None]  # bytes read, bytes in all


@dataclass(frozen=True, slots=True)
class QuantizedCopy:
    """The result of `lorafleet quantize`."""

    dtype: str  # The dtype that was quantized, which is the one of a server without --dtype.
    num_linears: int
    num_bytes: int  # Size of all tensors.
    read_bytes: int  # Size of the tensors of the checkpoint that was read.
    num_files: int


@dataclass(frozen=True, slots=True)
class _Linear:
    """A linear that is written quantized."""

    module: str  # Its name in the new files.
    shape: Shape
    part: Part
    expert: int | None  # Its place in a tensor of all experts, or None if the tensor holds it alone.

    def values(self, stored: Stored) -> Stored:
        if isinstance(self.part, QuantizedPart):
            return stored
        assert self.expert is not None
        return TensorInMemory(self.part.read(stored, self.expert))


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor of the checkpoint, with its linears if it is written quantized."""

    source: TensorSource | None
    linears: list[_Linear]
    num_bytes: int  # Size in the checkpoint.


def default_folder(model: Path, method: Method) -> Path:
    """Returns the folder beside the checkpoint that is written if none is named."""
    own = Path(os.path.abspath(model))  # a name, also for ".."
    return own.with_name(f"{own.name}-{method}")


def quantize_checkpoint(
    model: Path,
    method: Method,
    target: Path,
    *,
    device: Device = "auto",
    shard_bytes: int = SHARD_BYTES,
    progress: OnRead | None = None,
) -> QuantizedCopy:
    """Writes the checkpoint in the folder `model` with quantized linears to `target`. If it fails, nothing remains.

    Embedding, head, norms, biases, routers, the layer for several tokens (MTP) and parts for pictures are copied.

    `progress` is called with the bytes that were read, and all of them. `device` quantizes, and the bits do not depend
    on it: all operations are exact or rounded as IEEE 754 says.

    Raises ConfigError for a damaged checkpoint, an output that exists, a disk or a GPU that is full and a GPU that is
    not there, and UnsupportedModel for what no format can hold.
    """
    check_new(target)
    chosen = choose_device(EngineConfig(str(model), device=device))
    config = _plain_config(model)
    dtype = base_dtype(EngineConfig(str(model)), config, model)
    config = replace(config, quantization=resolved(None, method))
    sources = tensor_sources(DecoderModel(config, TPGroup(), dtype, META))
    with StoredTensors(model, config.stored_names) as tensors:
        plan = {name: _planned(name, tensors, sources, config, method) for name in tensors.names()}
        _check_complete(model, sources, plan)
        others = _other_files(model)
        _check_space(target, plan, method, dtype, sum((model / name).stat().st_size for name in others))
        with new_folder(target) as draft:
            try:
                writer = _write_tensors(draft, plan, tensors, _Quantizer(method, dtype, chosen), shard_bytes, progress)
                num_files = writer.close()
                written = _written_config(read_json(model / CONFIG), config, plan, tensors, method, dtype)
                (draft / CONFIG).write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
                for name in others:
                    copy_file(model, draft, name)
            except OSError as error:
                raise ConfigError(f"{target} cannot be written: {error.strerror}.") from error
            except torch.OutOfMemoryError as error:
                raise ConfigError(
                    f"{chosen} has no room for a linear of {model}: {error}. Use --device cpu, or a GPU that is free.",
                    "device",
                ) from error
    num_linears = sum(len(tensor.linears) for tensor in plan.values())
    read_bytes = sum(tensor.num_bytes for tensor in plan.values())
    return QuantizedCopy(str(dtype).removeprefix("torch."), num_linears, writer.num_bytes, read_bytes, num_files)


def _plain_config(model: Path) -> ModelConfig:
    """Reads the config of a plain checkpoint.

    Raises ConfigError if it says that weights or the KV cache are quantized, and UnsupportedModel for a model that
    transformers' own module runs.
    """
    if implementation("auto", model) == "transformers":
        raise UnsupportedModel(
            f"{model} is not a model of which a quantized checkpoint can be served, since no description of its "
            "architecture says where its linears are. Serve it with --quantization.",
            "model",
        )
    config, raw = read_model_config(model), read_json(model / CONFIG)
    stated = raw.get("quantization_config") or (raw.get("text_config") or {}).get("quantization_config")
    if stated or (model / MODELOPT_CONFIG).exists():
        method = (stated or {}).get("quant_method", MODELOPT_CONFIG)
        raise ConfigError(
            f"{model} is already quantized ({method}), or has scales for a quantized KV cache. Name the checkpoint "
            "that it was quantized from, or serve it as it is.",
            "model",
        )
    return config


def _planned(
    name: str, tensors: StoredTensors, sources: dict[str, TensorSource], config: ModelConfig, method: Method
) -> _Tensor:
    """Returns what is written of a tensor. Raises ConfigError for a wrong shape, and UnsupportedModel."""
    source = sources.get(config.names.engine_name(text_name(name) if config.is_text_part else name))
    if source is None or not source.is_rounded:
        return _Tensor(source, [], _num_bytes(tensors.stored(name)))
    check_shape(source, name, tensors.plain(name), tensors.path_of[name])
    linears = []
    for index, part in enumerate(source.parts):
        assert isinstance(part, QuantizedPart | StackedRounding)
        is_alone = isinstance(part, QuantizedPart)
        parts = [part] if isinstance(part, QuantizedPart) else list(part.parts_E)
        for expert, own in enumerate(parts):
            engine_name = source.fills[expert * len(source.parts) + index]
            module = _module_name(name, engine_name, config)
            outputs, inputs = own.whole_shape
            if refusal := WRITTEN[method].refusal(inputs):
                raise UnsupportedModel(refusal, "quantization")
            linears.append(_Linear(module, (outputs, inputs), part, None if is_alone else expert))
    return _Tensor(source, linears, _num_bytes(tensors.stored(name)))


def _module_name(name: str, engine_name: str, config: ModelConfig) -> str:
    """Returns the name in the new files of the linear whose weight the engine calls `engine_name`.

    It is the name in the checkpoint. An expert in a tensor of all experts is named beside that tensor, or as the engine
    names it. Raises UnsupportedModel if the readers of quantized checkpoints would not recognize it.
    """
    beside = f"{name.rpartition('.')[0]}.{engine_name.rpartition('.experts.')[2]}"
    for candidate in (name, beside, engine_name):
        known_as = config.names.engine_name(text_name(candidate) if config.is_text_part else candidate)
        found = LINEAR.fullmatch(known_as)
        if known_as == engine_name and found is not None and found[2] == "weight":
            return candidate.removesuffix(".weight")
    raise UnsupportedModel(
        f"{name}: no quantized format names such a linear, so it can only be quantized at each start. Serve the "
        "checkpoint with --quantization.",
        "model",
    )


def _check_complete(model: Path, sources: dict[str, TensorSource], plan: dict[str, _Tensor]) -> None:
    """Raises ConfigError if a weight is missing, or if two tensors hold it."""
    found = Counter(filled for tensor in plan.values() if tensor.source is not None for filled in tensor.source.fills)
    missing = sorted({filled for source in sources.values() for filled in source.fills} - found.keys())
    if missing:
        raise ConfigError(f"{model} lacks {len(missing)} tensors; the first is {missing[0]!r}.", "model")
    name, count = found.most_common(1)[0]
    if count > 1:
        raise ConfigError(f"{count} tensors of {model} hold {name!r}. Export the checkpoint again.", "model")


def _check_space(target: Path, plan: dict[str, _Tensor], method: Method, dtype: torch.dtype, other_bytes: int) -> None:
    """Raises ConfigError if the result does not fit on the disk. `other_bytes` are those of files without weights."""
    needed = SPARE_BYTES + other_bytes
    for tensor in plan.values():
        written = (WRITTEN[method].empty(linear.shape, dtype, META).tensors() for linear in tensor.linears)
        needed += sum(t.nbytes for made in written for t in made.values()) if tensor.linears else tensor.num_bytes
    existing = next(parent for parent in target.absolute().parents if parent.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise ConfigError(
            f"{target} needs {needed:,} bytes, and the disk of {existing} has {free:,} bytes free. Free some, or name "
            "a folder on another disk with --out."
        )


def _num_bytes(stored: Stored) -> int:
    shape = stored.get_shape()
    first = stored[tuple(slice(0, 1) for _ in shape)] if shape else stored[...]
    return prod(shape) * first.dtype.itemsize


def _write_tensors(
    folder: Path,
    plan: dict[str, _Tensor],
    tensors: StoredTensors,
    quantizer: _Quantizer,
    shard_bytes: int,
    progress: OnRead | None,
) -> ShardWriter:
    writer = ShardWriter(folder, shard_bytes)
    done, total = 0, sum(tensor.num_bytes for tensor in plan.values())
    for name, tensor in plan.items():
        if not tensor.linears:
            writer.add({name: tensors.tensor(name)})
        moved = MovedTensor(tensors.stored(name), quantizer.device)
        stored = FiniteTensor(moved, name, tensors.path_of[name])
        for linear in tensor.linears:
            written = quantizer.quantized(linear, linear.values(stored))
            writer.add({f"{linear.module}.{leaf}": value for leaf, value in written.items()})
        done += tensor.num_bytes
        if progress is not None:
            progress(done, total)
    return writer


@dataclass(frozen=True, slots=True)
class _Quantizer:
    """Quantizes linears from `dtype` on a device."""

    method: Method
    dtype: torch.dtype
    device: torch.device

    def quantized(self, linear: _Linear, stored: Stored) -> dict[str, Tensor]:
        """Returns the linear's tensors on the host, by their names below the linear. `stored` is on the device."""
        written = WRITTEN[self.method].empty(linear.shape, self.dtype, self.device)
        for rows, matrix in quantized_rows(stored, METHODS[self.method], self.dtype):
            written.fill(rows.start, matrix)
        return {leaf: tensor.to(CPU) for leaf, tensor in written.tensors().items()}


def _written_config(
    raw: dict[str, Any],
    config: ModelConfig,
    plan: dict[str, _Tensor],
    tensors: StoredTensors,
    method: Method,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """Returns the new config.json. `raw` is the one of the checkpoint that was read."""
    linears = {linear.module: linear.shape for tensor in plan.values() for linear in tensor.linears}
    raw.pop("auto_map", None)  # It names code that is not copied.
    if config.is_only_called_tied:
        raw |= untied_flags(raw)
    return raw | {"quantization_config": WRITTEN[method].config(linears, [*_plain_modules(plan, tensors)], dtype)}


def _plain_modules(plan: dict[str, _Tensor], tensors: StoredTensors) -> Iterator[str]:
    """Yields the names of modules that hold a plain matrix, and of the head also if it shares the embedding's."""
    yield "lm_head"
    for name, tensor in plan.items():
        module = name.removesuffix(".weight")
        is_matrix = not tensor.linears and len(tensors.stored(name).get_shape()) == 2
        if is_matrix and module not in (name, "lm_head"):
            yield module


def _other_files(model: Path) -> list[str]:
    """Returns the names of the files that are copied, such as the tokenizer's. Weights and code are left out."""
    found = [path.name for path in model.iterdir() if path.is_file() and _is_copied(path.name)]
    templates = [f"{TEMPLATES}/{path.name}" for path in (model / TEMPLATES).glob("*.jinja")]
    for name in found + templates:
        if (model / name).stat().st_size > MAX_BYTES:
            raise ConfigError(f"{model / name} has more than {MAX_BYTES:,} bytes. Remove it from the checkpoint.")
    return sorted(found + templates)


def _is_copied(name: str) -> bool:
    if name == CONFIG or name.endswith(".index.json"):
        return False
    return name.endswith(COPIED) or name.startswith(LICENSES)
