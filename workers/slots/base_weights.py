"""Provides the base model's weights for adapters that are computed from them, such as DoRA with its row norms.

If one rank holds the whole model, the weights come from the model in memory, on its GPU and beside the running steps.
Otherwise they come from the checkpoint's files.
"""

# D in features or hidden size · O out features · V vocabulary

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lorafleet.protocol.errors import AdapterUnsupported, ConfigError
from lorafleet.workers.adapters.base_layout import EMBEDDING, HEAD, TABLES, peft_name
from lorafleet.workers.bases.formats.checkpoint_format import LinearTensors
from lorafleet.workers.bases.module_names import COMMON_NAMES, ModuleNames
from lorafleet.workers.bases.quantization import Quantization
from lorafleet.workers.bases.read_files import ReadFiles
from lorafleet.workers.bases.stored_names import AS_WRITTEN, StoredNames
from lorafleet.workers.bases.stored_tensors import TensorInMemory, checkpoint_files
from lorafleet.workers.bases.text_part import text_name
from lorafleet.workers.models.engine_model import EngineModel
from lorafleet.workers.sleep.weights_gate import WeightsGate


class ModelWeights:
    """Weights of a model that one rank holds completely. They are neither copied nor read from disk.

    `held` has the model's tensors as held_tensors of its implementation returns them. `gate` is closed while their
    memory is given back.
    """

    def __init__(
        self, model: EngineModel, held: Mapping[str, Callable[[], Tensor]], gate: WeightsGate | None = None
    ) -> None:
        assert model.group.size == 1
        device = model.embed_tokens.weight.device
        self._held = held
        self._tied = model.config.tie_word_embeddings
        self._stream = _SideStream(device, gate or WeightsGate())

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
        names: The names of the checkpoint's modules.
        routers: The linears that are not quantized, see ExpertsConfig.router_modules.
        stored_names: How names in the files differ from those of the checkpoint's class.
        files: The files as they were when the base was read. None: as they are now.
    """

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        tied: bool,
        quantization: Quantization | None = None,
        names: ModuleNames = COMMON_NAMES,
        routers: frozenset[str] = frozenset(),
        stored_names: StoredNames = AS_WRITTEN,
        files: ReadFiles | None = None,
    ) -> None:
        self._read_files = files or ReadFiles(folder)
        self._folder = folder
        self._dtype = dtype
        self._tied = tied
        self._quantization = quantization
        self._module_names = names
        self._routers = routers
        self._stored_names = stored_names
        self._files: dict[str, tuple[Path, str]] = {}
        self._num_reads = 0  # As of ReadFiles, when _files was filled.

    def weight(self, module: str) -> Tensor:
        if self._quantization is None:
            return self._plain(module)
        stored = self._quantization.stored
        if stored is not None and module in stored.schemes:
            linear = LinearTensors(module, self._names(), lambda name: TensorInMemory(self._read(name)))
            return stored.matrix(linear)[...].to(self._dtype)
        weight, scheme = self._plain(module), self._quantization.rounding
        if scheme is None or weight.dim() == 1 or module in TABLES or module in self._routers:
            return weight
        return scheme.quantize(weight)[...].to(self._dtype)

    def bias(self, module: str) -> Tensor:
        return self._read(_tensor_name(module, "bias", self._tied)).to(self._dtype)

    def beside_the_steps(self) -> AbstractContextManager[None]:
        return nullcontext()

    def _plain(self, module: str) -> Tensor:
        return self._read(_tensor_name(module, "weight", self._tied)).to(self._dtype)

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
        if not self._read_files.are_unchanged():
            raise AdapterUnsupported(
                f"this adapter is computed from the base's weights, and the checkpoint in {self._folder} has changed "
                "since the server read it. Restart the server, or let it sleep at level 2 and wake up, so that it "
                "serves the new weights; or put the former ones back and do the same."
            )
        return tensor

    def _names(self) -> dict[str, tuple[Path, str]]:
        """Returns every tensor's file and its name in that file, by the engine's name."""
        if self._num_reads != self._read_files.num_reads:
            self._num_reads = self._read_files.num_reads
            paths = checkpoint_files(self._folder)
            self._files = {
                self._module_names.engine_name(text_name(self._stored_names.written(key))): (path, key)
                for path in paths
                for key in _keys(path)
            }
        return self._files


class MovedWeights:
    """Weights from the files, moved to the device that computes with them. `gate` is as in ModelWeights."""

    def __init__(self, files: FileWeights, device: torch.device, gate: WeightsGate | None = None) -> None:
        self._files = files
        self._device = device
        self._stream = _SideStream(device, gate or WeightsGate())

    def weight(self, module: str) -> Tensor:
        return self._files.weight(module).to(self._device)

    def bias(self, module: str) -> Tensor:
        return self._files.bias(module).to(self._device)

    def beside_the_steps(self) -> AbstractContextManager[None]:
        return self._stream.taken()


class _SideStream:
    """One CUDA stream for all loads, since torch reserves memory that was used on a stream for that stream. A CPU has
    none."""

    def __init__(self, device: torch.device, gate: WeightsGate) -> None:
        self._gate = gate
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._lock = threading.Lock()

    @contextmanager
    def taken(self) -> Iterator[None]:
        with self._gate.reading():
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
