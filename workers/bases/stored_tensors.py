"""Opens the safetensors files of a checkpoint, and reads their tensors by name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import EllipsisType, TracebackType
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lorafleet.protocol.config_json import read_json
from lorafleet.protocol.errors import ConfigError
from lorafleet.workers.bases.stored_names import AS_WRITTEN, StoredNames

PLAIN_DTYPES = ("F64", "F32", "F16", "BF16")


class Stored(Protocol):
    """A tensor in a file, of which only the indexed part is read.

    It is safetensors' slice, which has no public name, or the values of a quantized tensor.
    """

    def get_shape(self) -> list[int]: ...

    def __getitem__(self, place: tuple[slice, ...] | EllipsisType) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class MovedTensor:
    """A Stored whose parts are moved to a device as they are read."""

    stored: Stored
    device: torch.device

    def get_shape(self) -> list[int]:
        return self.stored.get_shape()

    def __getitem__(self, place: tuple[slice, ...] | EllipsisType) -> Tensor:
        return self.stored[place].to(self.device)


@dataclass(frozen=True, slots=True)
class FiniteTensor:
    """A Stored whose parts are checked as they are read. Raises ConfigError for NaN and infinite numbers, which no
    quantized form can hold."""

    stored: Stored
    name: str
    path: Path

    def get_shape(self) -> list[int]:
        return self.stored.get_shape()

    def __getitem__(self, place: tuple[slice, ...] | EllipsisType) -> Tensor:
        part = self.stored[place]
        if not bool(part.isfinite().all()):
            raise ConfigError(
                f"{self.path}: {self.name} contains NaN or an infinite number, so it cannot be quantized. Download or "
                "export the checkpoint again.",
                "model",
            )
        return part


@dataclass(frozen=True, slots=True)
class TensorInMemory:
    """A Stored that was read already."""

    tensor: Tensor

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape)

    def __getitem__(self, place: tuple[slice, ...] | EllipsisType) -> Tensor:
        return self.tensor[place]


def checkpoint_files(folder: Path) -> list[Path]:
    """Returns the safetensors files that hold the weights, in name order. Raises ConfigError if any is missing."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        return [single]
    if not index.exists():
        raise ConfigError(
            f"{folder} has neither model.safetensors nor model.safetensors.index.json. "
            "Convert the checkpoint with save_pretrained(..., safe_serialization=True).",
            "model",
        )
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ConfigError(f"{index} has no weight_map of names of files. Download the checkpoint again.", "model")
    names = sorted(set(weight_map.values()))
    missing = [name for name in names if Path(name).name != name or not (folder / name).is_file()]
    if missing:
        raise ConfigError(f"{index} names files that are not in the folder: {', '.join(missing)}.", "model")
    return [folder / name for name in names]


def has_all_files(folder: Path) -> bool:
    """Returns whether the folder has safetensors files, and each of them that it needs."""
    try:
        return bool(checkpoint_files(folder))
    except ConfigError:
        return False


def stored_dtype(folder: Path) -> torch.dtype:
    """Returns the dtype of the first plain weight, for checkpoints whose config.json does not say it."""
    with safe_open(checkpoint_files(folder)[0], framework="pt") as f:
        first = next((name for name in f.keys() if f.get_slice(name).get_dtype() in PLAIN_DTYPES), None)  # noqa: SIM118
        if first is None:
            raise ConfigError(f"config.json of {folder} has no dtype, and no weight says it. Add dtype there.", "model")
        dtype: torch.dtype = f.get_tensor(first).dtype
        return dtype


class StoredTensors:
    """All tensors of a checkpoint, open for reading. Raises ConfigError for files that cannot be read.

    `names` translates the names in the files. All methods take and return the names that transformers' class writes.
    """

    def __init__(self, folder: Path, names: StoredNames = AS_WRITTEN) -> None:
        self.folder = folder
        self.path_of: dict[str, Path] = {}
        self._places: dict[str, tuple[Any, str]] = {}  # The open file and the name in it.
        self._files = ExitStack()
        try:
            for path in checkpoint_files(folder):
                file = self._files.enter_context(_opened(path))
                for key in file.keys():  # noqa: SIM118  safe_open is no mapping
                    name = names.written(key)
                    if name in self._places:
                        known_as = {repr(key): None, repr(self._places[name][1]): None}
                        raise ConfigError(
                            f"{path} and {self.path_of[name].name} both have the tensor {' or '.join(known_as)}. "
                            "Download or export the checkpoint again.",
                            "model",
                        )
                    self._places[name] = file, key
                    self.path_of[name] = path
        except BaseException:
            self._files.close()
            raise

    def __enter__(self) -> StoredTensors:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._files.close()

    def names(self) -> Iterator[str]:
        """Returns the names in the files' order."""
        return iter(self._places)

    def dtype_of(self, name: str) -> str:
        """Returns safetensors' name of the tensor's dtype."""
        file, key = self._places[name]
        dtype: str = file.get_slice(key).get_dtype()
        return dtype

    def stored(self, name: str) -> Stored:
        file, key = self._places[name]
        try:
            found: Stored = file.get_slice(key)
        except SafetensorError as e:
            raise ConfigError(f"{self.path_of[name]} cannot be read: {e}", "model") from None
        return found

    def plain(self, name: str) -> Stored:
        """Opens a tensor that is not quantized. Raises ConfigError if it has numbers of another kind."""
        stored, dtype = self.stored(name), self.dtype_of(name)
        if dtype not in PLAIN_DTYPES:
            raise ConfigError(
                f"{self.path_of[name]}: {name} is stored as {dtype} without a scale that the engine could read, where "
                f"it needs one of {', '.join(PLAIN_DTYPES)}. Export the checkpoint again, or correct its "
                "quantization_config.",
                "model",
            )
        return stored

    def tensor(self, name: str) -> Tensor:
        """Reads the tensor of that name. Raises ConfigError if there is none or it cannot be read."""
        if name not in self._places:
            raise ConfigError(f"{self.folder} lacks the tensor {name!r}.", "model")
        file, key = self._places[name]
        try:
            found: Tensor = file.get_tensor(key)
        except SafetensorError as e:
            raise ConfigError(f"{self.path_of[name]} cannot be read: {e}", "model") from None
        return found


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as e:
        raise ConfigError(f"{path} cannot be read: {e}", "model") from None
