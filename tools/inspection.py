"""Reports what an adapter's folder contains, what it would cost, and whether a base would accept it (`lorafleet
inspect`).

Every verdict comes from the server's own reader. Nothing is repaired or written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from lorafleet.protocol.adapter_formats.adapter_files import CONFIG_NAME, AdapterFolder, folder_digest, read_config
from lorafleet.protocol.errors import ConfigError, LorafleetError
from lorafleet.protocol.lora_config import LoRAConfig
from lorafleet.protocol.strict_json import read_json_object
from lorafleet.tools.base_checkpoint import BaseModel
from lorafleet.tools.copied_tokenizer import tokenizer_files
from lorafleet.tools.inferred_base import tensor_infos
from lorafleet.tools.kind_names import kind_of
from lorafleet.tools.layouts import saved_name
from lorafleet.tools.mlx import is_mlx
from lorafleet.tools.reading import read_forms
from lorafleet.workers.adapters.forms import AdapterForms
from lorafleet.workers.adapters.peft_names import left_out_part
from lorafleet.workers.bases.stored_tensors import stored_dtype
from lorafleet.workers.slots.lora_model import LoRAModel
from lorafleet.workers.tp.adapter_sharding import AdapterSharding
from lorafleet.workers.tp.group import TPGroup
from lorafleet.workers.tp.shard import Shard

MAX_FILES_LISTED = 100
_TABLES = ("base_model.model.model.embed_tokens.", "base_model.model.lm_head.")


@dataclass(frozen=True, slots=True)
class Fit:
    """The result of loading an adapter on one base."""

    base: str
    refusal: str | None = None  # The server's error message; None if the adapter would load.
    error: str | None = None  # The class of the error.
    bytes_per_gpu: list[int] = field(default_factory=list)  # Size on each tensor-parallel rank, in `dtype`.
    dtype: str = ""  # The serving dtype.


@dataclass(frozen=True, slots=True)
class Inspection:
    """Everything that could be found out about an adapter. A field is None if the files are too damaged to tell."""

    path: str
    kind: str | None
    files: dict[str, int]
    digest: str | None = None
    base_name: str | None = None
    ranks: dict[int, int] = field(default_factory=dict)  # Number of low-rank pairs of each rank.
    targets: dict[str, int] = field(default_factory=dict)  # Number of modules, by the last part of their names.
    num_layers: int = 0
    # (inputs, outputs) that a base must have, by the last part of the module's name.
    shapes: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    dtypes: dict[str, int] = field(default_factory=dict)  # Number of tensors of each dtype.
    num_values: int = 0
    left_out: list[str] = field(default_factory=list)  # Parts for pictures or sound, which are not served.
    vocabulary: dict[str, int] = field(default_factory=dict)  # Rows of the embedding and the head in the files.
    tokenizer: list[str] = field(default_factory=list)
    bytes_on_one_gpu: int | None = None  # Size in `dtype`.
    dtype: str = ""
    refusal: str | None = None  # The reader's error message without a base; None if it accepts the adapter.
    error: str | None = None  # The class of the error.
    needs_base: str | None = None  # What the reader cannot tell without a base.
    fits: list[Fit] = field(default_factory=list)


def inspect_folder(path: Path, name: str, dtype: torch.dtype = torch.bfloat16) -> Inspection:
    """Inspects an adapter without a base.

    Args:
        name: The adapter's name in messages.
        dtype: The dtype in which it would be served.

    Raises AdapterMissing if there is no folder. All other faults are part of the result.
    """
    folder = AdapterFolder.at(path)
    found = Inspection(name, None, _files(folder.path), tokenizer=tokenizer_files(folder.path))
    try:
        config = read_json_object(read_config(folder), CONFIG_NAME)
    except LorafleetError as error:
        return _refused(found, error)
    base_name = config.get("base_model_name_or_path")
    kind = "mlx-lm's layout" if is_mlx(folder, config) else kind_of(config)
    found = dataclasses.replace(found, kind=kind, base_name=base_name if isinstance(base_name, str) else None)
    try:
        found = _with_tensors(found, path)
        read = read_forms(path, None, name)
        forms, found = read.forms, dataclasses.replace(found, digest=read.digest)
        held = _tensor_bytes(LoRAModel.of(forms, read.content, dtype, name))
        found = dataclasses.replace(found, bytes_on_one_gpu=held, dtype=_name(dtype))
        return _with_forms(found, forms)
    except ConfigError as error:
        return dataclasses.replace(found, digest=folder_digest(path), needs_base=error.message)
    except LorafleetError as error:
        return _refused(found, error)


def fit(path: Path, name: str, base: BaseModel, config: LoRAConfig, tp: int, *, fully_sharded: bool) -> Fit:
    """Loads the adapter on a base as each of `tp` ranks would, and returns the sizes or the error."""
    base_dtype = base.config.dtype or stored_dtype(base.folder)
    dtype = config.serving_dtype(base_dtype)
    sizes = []
    try:
        for rank in range(tp):
            sharding = AdapterSharding(Shard.of(base.config, rank, tp), TPGroup(rank, tp), fully_sharded)
            model = LoRAModel.from_local_checkpoint(
                path,
                base=base.for_reader(base_dtype),
                config=config,
                dtype=dtype,
                name=name,
                sharding=sharding,
            )
            sizes.append(_tensor_bytes(model))
    except LorafleetError as error:
        return Fit(base.folder.name, error.message, type(error).__name__)
    return Fit(base.folder.name, bytes_per_gpu=sizes, dtype=_name(dtype))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _files(folder: Path) -> dict[str, int]:
    """Returns the regular files with their sizes in bytes. Links are followed."""
    found = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):  # A link may lead nowhere, or in a circle.
                if entry.is_file():
                    found[entry.name] = entry.stat().st_size
    return dict(sorted(found.items())[:MAX_FILES_LISTED])


def _refused(found: Inspection, error: LorafleetError) -> Inspection:
    return dataclasses.replace(found, refusal=error.message, error=type(error).__name__)


def _with_tensors(found: Inspection, path: Path) -> Inspection:
    infos = tensor_infos(path)
    values = {name: torch.Size(info.shape).numel() for name, info in infos.items()}
    rows = {
        table.split(".")[-2]: info.shape[0]
        for name, info in infos.items()
        for table in _TABLES
        if saved_name(name).startswith(table)
        and name.endswith(("embed_tokens.weight", "lm_head.weight"))
        and info.shape
    }
    return dataclasses.replace(
        found,
        dtypes=dict(Counter(info.dtype for info in infos.values())),
        num_values=sum(values.values()),
        left_out=sorted({part for part in map(left_out_part, infos) if part}),
        vocabulary=rows,
    )


def _with_forms(found: Inspection, forms: AdapterForms) -> Inspection:
    tables = {name: form for name, form in (("embed_tokens", forms.embedding), ("lm_head", forms.head)) if form}
    pairs = [*(form.low_rank for form in forms.linears.values()), *(form.low_rank for form in tables.values())]
    ranks = [pair.rank for pair in pairs if pair is not None]
    ranks += [stack.rank for experts in forms.experts.values() for stack in experts.stacks]
    shapes: dict[str, set[tuple[int, int]]] = {}
    for name, form in forms.linears.items():
        if form.low_rank is not None:
            inputs, outputs = form.low_rank.a_RD.shape[1], form.low_rank.b_OR.shape[0]
            shapes.setdefault(name.rpartition(".")[2], set()).add((inputs, outputs))
    modules = [*forms.linears, *forms.experts, *forms.norms, *tables]
    modules += [] if forms.classifier is None else ["score"]
    layers = [int(name.split(".")[1]) for name in modules if name.startswith("layers.")]
    return dataclasses.replace(
        found,
        ranks=dict(sorted(Counter(ranks).items())),
        targets=dict(Counter(name.rpartition(".")[2] for name in modules)),
        num_layers=1 + max(layers, default=-1),
        shapes={leaf: sorted(found) for leaf, found in shapes.items()},
    )


def _tensor_bytes(held: object) -> int:
    return sum(tensor.numel() * tensor.itemsize for tensor in _tensors(held))


def _tensors(held: object) -> list[Tensor]:
    """Returns all tensors inside a dataclass, a mapping or a sequence."""
    if isinstance(held, Tensor):
        return [held]
    if isinstance(held, Mapping):
        parts = [*held.values()]
    elif isinstance(held, list | tuple):
        parts = [*held]
    elif dataclasses.is_dataclass(held) and not isinstance(held, type):
        parts = [getattr(held, field.name) for field in dataclasses.fields(held)]
    else:
        return []
    return [tensor for part in parts for tensor in _tensors(part)]
