"""Defines the interface between the loader and a library's format of quantized checkpoints.

A new format is one class in a file of this folder, listed in FORMATS of workers/bases/quantization.py:
1. Its constructor gets config.json's quantization_config and StoredLinears, which names every linear in the files. It
   decides each linear's scheme, and raises UnsupportedModel or ConfigError for what is not served.
2. The model creates each linear's weight by the scheme. Linears without a scheme are stored plain, as `weight`.
3. The loader ignores the tensors that `tensors` matches, calls matrix() once for each linear, and fills the weight from
   the result. So matrix() may return an object that reads slices later, when a rank takes its part.

A mixture's experts are linears too, by names such as "layers.0.mlp.experts.3.up_proj". If a format stores all experts
of a layer in one tensor, `other_tensors` names it, and matrix() takes the expert out of it.

Schemes may differ from linear to linear. For a new kind of numbers, write a Scheme beside its weight in kernels/quant.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Protocol

from torch import Tensor

from lorafleet.kernels.quant.base_weight import QuantizedMatrix, Scheme
from lorafleet.protocol.errors import ConfigError
from lorafleet.workers.bases.module_names import COMMON_NAMES, ModuleNames
from lorafleet.workers.bases.stored_tensors import Stored, StoredTensors
from lorafleet.workers.bases.text_part import is_of_pictures, text_name

# The module path below the model, and the tensor's own name. Routers and gates of shared experts have other names.
LINEAR = re.compile(
    r"(?:model\.)?(.*?(?:_proj(?:_with_mqa|_qkvz?|_z|_ba?|_a)?|_linear|_gate|\.gate|\.router(?:\.proj)?|\.w[123]|\.fc[12]|\.c_fc"
    r"|_projection|_projections\.\d+|_coefs|\.linear_(?:left|right)|\.modality_router|\.dense))\.(.+)"
)
TABLE = re.compile(r"(?:model\.)?(lm_head|embed_tokens)\.(.+)")  # the same of head and embedding
REMEDY = (
    "Serve the unquantized checkpoint with quantization=nf4, int4 or fp8, which need no conversion, or a checkpoint in "
    "a format that docs/models.md lists."
)


class CheckpointFormat(Protocol):
    """The quantized linears of one checkpoint."""

    @property
    def schemes(self) -> Mapping[str, Scheme]:
        """The schemes of the linears that are stored quantized, by module path below the model."""

    @property
    def tensors(self) -> re.Pattern[str]:
        """Matches the names that a quantized linear's tensors have below the linear, such as "weight_scale"."""

    @property
    def other_tensors(self) -> frozenset[str]:
        """The names, as the engine has them, of the format's tensors that are not those of one quantized linear.

        The loader ignores them too. They hold linears of all experts of a layer, or have no meaning.
        """

    def matrix(self, linear: LinearTensors) -> QuantizedMatrix:
        """Returns the weight of a linear in `schemes`. Raises ConfigError if its tensors are damaged."""


@dataclass(frozen=True, slots=True)
class LinearTensors:
    """The tensors of one linear in the files."""

    module: str  # module path below the model, such as "layers.0.mlp.down_proj"
    names: Container[str]  # names of all tensors, as the engine has them
    open: Callable[[str], Stored]  # opens the tensor of that name; its values are on the device that is to decode them

    def __contains__(self, leaf: str) -> bool:
        return self.path(leaf) in self.names

    def path(self, leaf: str) -> str:
        """Returns the whole name of the linear's tensor, as the engine has it."""
        return f"model.{self.module}.{leaf}"

    def stored(self, leaf: str) -> Stored:
        """Opens the tensor, of which only indexed parts are read. Raises ConfigError if it is missing."""
        if leaf not in self:
            raise ConfigError(f"{self.path(leaf)} is missing, which this quantized linear needs.", "model")
        return self.open(self.path(leaf))

    def tensor(self, leaf: str, most: int) -> Tensor:
        """Reads a whole tensor of at most that many numbers. Raises ConfigError if it is missing or has more."""
        stored = self.stored(leaf)
        shape = stored.get_shape()
        if max(prod(shape), *shape, 0) > most:  # An empty tensor may have a vast size as well.
            raise ConfigError(
                f"{self.path(leaf)} has shape {shape}, where this linear has at most {most:,} numbers. Download or "
                "export the checkpoint again.",
                "model",
            )
        return stored[...]


class StoredLinears:
    """The names of the linears' tensors in a checkpoint, for formats that decide schemes by what is stored.

    Args:
        unread: Beginnings of the engine's names of tensors that are left out, see ModelConfig.mtp_names.
    """

    def __init__(self, tensors: StoredTensors, names: ModuleNames = COMMON_NAMES, unread: tuple[str, ...] = ()) -> None:
        self._tensors = tensors
        stored = [name for name in tensors.names() if not is_of_pictures(name)]
        by_engine = {names.engine_name(text_name(name)): name for name in stored}
        self._file_name = {name: in_file for name, in_file in by_engine.items() if not name.startswith(unread)}
        found = (LINEAR.fullmatch(name) for name in self._file_name)
        self._linears = [(match[1], match[2]) for match in found if match is not None]

    def with_tensor(self, leaf: re.Pattern[str]) -> list[str]:
        """Returns the linears, by module path below the model, that have a tensor whose name matches."""
        return [module for module, own in self._linears if leaf.fullmatch(own)]

    def quantized_table(self, leaf: re.Pattern[str]) -> str | None:
        """Returns the name in the files of the head or embedding that has a matching tensor, other than `weight`."""
        for name, in_file in self._file_name.items():
            found = TABLE.fullmatch(name)
            if found is not None and found[2] != "weight" and leaf.fullmatch(found[2]):
                return in_file.removesuffix(f".{found[2]}")
        return None

    def linear(self, module: str) -> LinearTensors:
        return LinearTensors(module, self._file_name, self.stored)

    def matching(self, pattern: re.Pattern[str]) -> Iterator[re.Match[str]]:
        """Yields the matches with whole names of tensors, as the engine has them."""
        return (match for name in self._file_name if (match := pattern.fullmatch(name)) is not None)

    def stored(self, name: str) -> Stored:
        """Opens a tensor by its whole name, as the engine has it."""
        return self._tensors.stored(self._file_name[name])

    def file_names(self, modules: Iterable[str], leaf: str) -> Iterator[tuple[str, str]]:
        """Yields each linear with its module path in the files, as lists of names in config.json have it.

        A checkpoint with a part for pictures may have the lists in another spelling: see spellings() in text_part.py.
        """
        for module in modules:
            yield module, self._file_name[f"model.{module}.{leaf}"].removesuffix(f".{leaf}")
