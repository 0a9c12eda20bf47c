"""Provides the base model's weights for adapters that are computed from them, such as DoRA with its row norms.

If one rank holds the whole model, the weights come from the model in memory, on its GPU and beside the running steps.
Otherwise they come from the checkpoint's files.
"""

# D in features or hidden size · O out features · V vocabulary

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lorafleet.protocol.errors import AdapterUnsupported, ConfigError
from lorafleet.workers.adapters.base_layout import EMBEDDING, HEAD, peft_name
from lorafleet.workers.bases.expert_names import engine_name
from lorafleet.workers.bases.quantization import Quantization
from lorafleet.workers.bases.quantized_tensors import QUANTIZE, quantized_matrix
from lorafleet.workers.bases.stored_tensors import checkpoint_files
from lorafleet.workers.bases.text_part import text_name
from lorafleet.workers.bases.weights import held_tensors
from lorafleet.workers.models.decoder import DecoderModel


class ModelWeights:
    """Weights of a model that one rank holds completely. They are neither copied nor read from disk."""

    def __init__(self, model: DecoderModel) -> None:
        assert model.group.size == 1
        device = model.norm.weight.device
        self._held = held_tensors(model)
        self._tied = model.config.tie_word_embeddings
        self._stream = _SideStream(device)

    def weight(self, module: str) -> Tensor:
        return self._held[_tensor_name(module, "weight", self._tied)]()

    def bias(self, module: str) -> Tensor:
        return self._held[_tensor_name(module, "bias", self._tied)]()

    def beside_the_steps(self) -> AbstractContextManager[None]:
        return self._stream.taken()


class FileWeights:
    """Weights from a checkpoint's files, for ranks that each hold a part of the model.

    Args:
        tied: The head is the embedding.
        quantization: The quantization of the linears as they are served.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, tied: bool, quantization: Quantization | None = None) -> None:
        self._folder = folder
        self._dtype = dtype
        self._tied = tied
        self._quantization = quantization
        self._files: dict[str, tuple[Path, str]] = {}

    def weight(self, module: str) -> Tensor:
        name = _tensor_name(module, "weight", self._tied)
        stored = self._read(name)
        quantization = self._quantization
        if quantization is not None and quantization.stored is not None:
            matrix = quantized_matrix(name, self._names(), self._read)
            return (stored if matrix is None else matrix[...]).to(self._dtype)
        weight = stored.to(self._dtype)
        # Only dense models are quantized. In those, these are all linears except the head.
        if quantization is not None and module.endswith("_proj"):
            return QUANTIZE[quantization.method](weight)[...].to(self._dtype)
        return weight

    def bias(self, module: str) -> Tensor:
        return self._read(_tensor_name(module, "bias", self._tied)).to(self._dtype)

    def beside_the_steps(self) -> AbstractContextManager[None]:
        return nullcontext()

    def _read(self, name: str) -> Tensor:
        try:
            path, key = self._names()[name]
            with safe_open(path, framework="pt") as file:
                tensor: Tensor = file.get_tensor(key)
        except (SafetensorError, OSError, KeyError, ConfigError) as error:
            raise AdapterUnsupported(
                f"this adapter is computed from the base's weights, and {name} cannot be read from {self._folder}: "
                f"{error}. Put the checkpoint back where it was when the server started."
            ) from None
        return tensor

    def _names(self) -> dict[str, tuple[Path, str]]:
        """Returns every tensor's file and its name in that file, by the engine's name."""
        if not self._files:
            paths = checkpoint_files(self._folder)
            self._files = {engine_name(text_name(key)): (path, key) for path in paths for key in _keys(path)}
        return self._files


class MovedWeights:
    """Weights from the files, moved to the GPU that computes with them."""

    def __init__(self, files: FileWeights, device: torch.device) -> None:
        self._files = files
        self._device = device
        self._stream = _SideStream(device)

    def weight(self, module: str) -> Tensor:
        return self._files.weight(module).to(self._device)

    def bias(self, module: str) -> Tensor:
        return self._files.bias(module).to(self._device)

    def beside_the_steps(self) -> AbstractContextManager[None]:
        return self._stream.taken()


class _SideStream:
    """One CUDA stream for all loads, since torch reserves memory that was used on a stream for that stream. A CPU has
    none."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._lock = threading.Lock()

    @contextmanager
    def taken(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        with self._lock, torch.cuda.stream(self._stream):
            yield
            self._stream.synchronize()


def _tensor_name(module: str, leaf: str, tied: bool) -> str:
    """Returns the tensor's name in the checkpoint."""
    return f"{peft_name(EMBEDDING if tied and module == HEAD else module)}.{leaf}"


def _keys(path: Path) -> list[str]:
    with safe_open(path, framework="pt") as file:
        return list(file.keys())
