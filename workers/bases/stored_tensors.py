"""Opens the safetensors files of a checkpoint, and reads their tensors by name."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import EllipsisType, TracebackType
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lorafleet.protocol.errors import ConfigError

ANY_NAME = re.compile(".*")


class Stored(Protocol):
    """A tensor in a file, of which only the indexed part is read.

    It is safetensors' slice, which has no public name, or the values of a quantized tensor.
    """

    def get_shape(self) -> list[int]: ...

    def __getitem__(self, place: tuple[slice, ...] | EllipsisType) -> Tensor: ...


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
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as e:
        raise ConfigError(f"{index} cannot be read: {e!r}", "model") from None
    missing = [name for name in names if Path(name).name != name or not (folder / name).is_file()]
    if missing:
        raise ConfigError(f"{index} names files that are not in the folder: {', '.join(missing)}.", "model")
    return [folder / name for name in names]


def stored_dtype(folder: Path) -> torch.dtype:
    """Returns the dtype of the first weight, for checkpoints whose config.json does not say it."""
    with safe_open(checkpoint_files(folder)[0], framework="pt") as f:
        dtype: torch.dtype = f.get_tensor(next(iter(f.keys()))).dtype
        return dtype


class StoredTensors:
    """All tensors of a checkpoint, open for reading. Raises ConfigError for files that cannot be read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path_of: dict[str, Path] = {}
        self._file_of: dict[str, Any] = {}
        self._files = ExitStack()
        try:
            for path in checkpoint_files(folder):
                file = self._files.enter_context(_opened(path))
                self._file_of |= dict.fromkeys(file.keys(), file)
                self.path_of |= dict.fromkeys(file.keys(), path)
        except BaseException:
            self._files.close()
            raise

    def __enter__(self) -> StoredTensors:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._files.close()

    def names(self, pattern: re.Pattern[str] = ANY_NAME) -> Iterator[str]:
        """Returns the names that match `pattern`, in the files' order."""
        return (name for name in self._file_of if pattern.fullmatch(name))

    def stored(self, name: str) -> Stored:
        try:
            found: Stored = self._file_of[name].get_slice(name)
        except SafetensorError as e:
            raise ConfigError(f"{self.path_of[name]} cannot be read: {e}", "model") from None
        return found

    def tensor(self, name: str) -> Tensor:
        """Reads the tensor of that name. Raises ConfigError if there is none or it cannot be read."""
        if name not in self._file_of:
            raise ConfigError(f"{self.folder} lacks the tensor {name!r}.", "model")
        try:
            found: Tensor = self._file_of[name].get_tensor(name)
        except SafetensorError as e:
            raise ConfigError(f"{self.path_of[name]} cannot be read: {e}", "model") from None
        return found


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as e:
        raise ConfigError(f"{path} cannot be read: {e}", "model") from None
