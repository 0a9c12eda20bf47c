"""Gives the tools the base model: its shapes, and its weights one at a time from the checkpoint's files. Adapters are
read against it by workers/adapters/."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lorafleet.protocol.errors import ConfigError
from lorafleet.tools.safetensors_file import DTYPES, Entry
from lorafleet.workers.adapters.base_layout import BaseLayout
from lorafleet.workers.adapters.kinds.kind import Base
from lorafleet.workers.bases.checkpoint import read_model_config
from lorafleet.workers.bases.model_config import ModelConfig
from lorafleet.workers.bases.stored_tensors import checkpoint_files
from lorafleet.workers.slots.base_weights import FileWeights


@dataclass(frozen=True, slots=True)
class CheckpointTensor:
    file: Path
    key: str  # Its name in the file, which may differ from the one that the checkpoint's class writes.
    entry: Entry


@dataclass(frozen=True, slots=True)
class BaseModel:
    """A base model whose weights are read on demand."""

    folder: Path
    config: ModelConfig
    tensors: Mapping[str, CheckpointTensor]  # By the name that the class writes, in the order of the files.
    _open: Mapping[Path, Any]

    @classmethod
    def of_config(cls, folder: Path) -> BaseModel:
        """Returns a base without tensors, since its weights may not exist yet. They are read only for adapters that
        are computed from them."""
        return cls(folder, read_model_config(folder), {}, {})

    @classmethod
    @contextmanager
    def opened(cls, folder: Path) -> Iterator[BaseModel]:
        """Opens the checkpoint's files until the block ends. Raises ConfigError, and UnsupportedModel for a model
        that the engine does not serve."""
        config = read_model_config(folder)
        with ExitStack() as stack:
            files = {path: stack.enter_context(_opened(path)) for path in checkpoint_files(folder)}
            tensors = {
                config.stored_names.written(key): CheckpointTensor(path, key, entry)
                for path, f in files.items()
                for key, entry in _entries(path, f)
            }
            yield cls(folder, config, tensors, files)

    def for_reader(self, dtype: torch.dtype) -> Base:
        """Returns the base in the form that the adapter reader needs, with weights of this dtype."""
        config = self.config
        weights = FileWeights(
            self.folder,
            dtype,
            config.tie_word_embeddings,
            config.quantization,
            config.names,
            stored_names=config.stored_names,
        )
        return Base(BaseLayout.of(config), weights, self.folder.name)

    def stored_name(self, name: str) -> str:
        """Returns the checkpoint's name for a tensor that the engine calls `name`."""
        return next((own for own in (name, *self.config.names.own_names(name)) if own in self.tensors), name)

    def value(self, name: str) -> Tensor:
        stored = self.tensors[name]
        tensor: Tensor = self._open[stored.file].get_tensor(stored.key)
        return tensor


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        file = safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", "model") from None
    with file:
        yield file


def _entries(path: Path, file: Any) -> Iterator[tuple[str, Entry]]:
    for name in file.keys():  # noqa: SIM118  safe_open is no mapping
        stored = file.get_slice(name)
        dtype = DTYPES.get(stored.get_dtype())
        if dtype is None:
            raise ConfigError(f"{path}: the tensor {name!r} is {stored.get_dtype()}, which cannot be copied.", "model")
        yield name, Entry(tuple(stored.get_shape()), dtype)
