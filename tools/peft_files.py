"""Holds an adapter's config and tensors in memory under PEFT 0.21's names, and writes them to a folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from lorafleet.protocol.adapter_formats.adapter_files import CONFIG_NAME, SAFETENSORS_NAME
from lorafleet.protocol.errors import AdapterUnsupported
from lorafleet.protocol.strict_json import shown
from lorafleet.tools.safetensors_file import Entry, write_safetensors
from lorafleet.workers.adapters.weight_files import FLOAT_DTYPES, INDEX_DTYPES, WeightsFile


@dataclass(frozen=True, slots=True)
class PEFTFiles:
    """The contents of an adapter's folder."""

    config: Mapping[str, object]
    tensors: Mapping[str, Tensor]
    changes: list[str] = field(default_factory=list)  # Corrections made on reading, in words for the user.

    def write(self, folder: Path) -> None:
        (folder / CONFIG_NAME).write_text(json.dumps(self.config, indent=2, sort_keys=False) + "\n", encoding="utf-8")
        entries = {name: Entry(tuple(tensor.shape), tensor.dtype) for name, tensor in self.tensors.items()}
        write_safetensors(folder / SAFETENSORS_NAME, entries, self.tensors.__getitem__)


def load_tensors(weights: WeightsFile, file_name: str) -> Mapping[str, Tensor]:
    for name, info in weights.infos.items():
        if info.dtype not in FLOAT_DTYPES and info.dtype not in INDEX_DTYPES:
            raise AdapterUnsupported(
                f"{file_name}: the tensor {shown(name)} is {shown(info.dtype)}, which is not supported."
            )
    return weights.load().by_name
