"""Loads one rank's part of the base model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from lorafleet.protocol.engine_config import EngineConfig
from lorafleet.protocol.transport.addresses import RankAddresses
from lorafleet.workers.adapters.base_layout import BaseLayout
from lorafleet.workers.auto_options import base_dtype, choose_device
from lorafleet.workers.bases.read_files import ReadFiles
from lorafleet.workers.bases.weights import Progress, held_tensors
from lorafleet.workers.model_loading import digest_of, load_model, refill_model, served_model_config
from lorafleet.workers.models.engine_model import EngineModel
from lorafleet.workers.models.fixed_order import check_fixed_order
from lorafleet.workers.models.generic.generic_loading import find_shard, load_generic
from lorafleet.workers.sleep.weights_gate import WeightsGate
from lorafleet.workers.speculation.draft_heads import check_division
from lorafleet.workers.tp.group import TPGroup
from lorafleet.workers.tp.shard import Shard


@dataclass(frozen=True, slots=True)
class LoadedBase:
    """The base model's part of one rank."""

    model: EngineModel
    layout: BaseLayout
    held: Mapping[str, Callable[[], Tensor]]  # this rank's part of every tensor, by the checkpoint's name
    reload: Callable[[], None] | None  # fills the model from the checkpoint again, if that is possible
    dtype: torch.dtype
    device: torch.device
    digest: str  # weights_digest of this rank's part
    files: ReadFiles
    gate: WeightsGate = field(default_factory=WeightsGate)


def load_base(
    config: EngineConfig,
    rank: int,
    addresses: RankAddresses | None,
    progress: Progress | None,
    check: Callable[[], None],
) -> LoadedBase:
    """Joins the other ranks and loads this rank's part of the model."""
    device = choose_device(config)
    check_fixed_order(config, device)
    folder = Path(config.model)
    files = ReadFiles(folder)

    def join() -> TPGroup:
        assert (addresses is None) == (config.tensor_parallel_size == 1)
        return TPGroup() if addresses is None else TPGroup.join(rank, addresses.size, addresses.meeting, device, check)

    if config.model_impl == "transformers":
        shard = find_shard(config, rank)  # raises before the other ranks are waited for
        generic = load_generic(config, shard, join(), device)
        dtype = generic.embed_tokens.weight.dtype
        return LoadedBase(
            generic, generic.config.layout(), generic.held_tensors(), None, dtype, device, digest_of(generic), files
        )
    model_config = served_model_config(config)
    dtype = base_dtype(config, model_config, folder)
    Shard.of(model_config, rank, config.tensor_parallel_size)  # raises before the other ranks are waited for
    check_division(config, model_config)  # as above
    model = load_model(config, model_config, join(), dtype, device, progress)
    layout, held, digest = BaseLayout.of(model_config), held_tensors(model), digest_of(model)

    def reload() -> None:
        files.renew()
        refill_model(config, model, model_config)

    return LoadedBase(model, layout, held, reload, dtype, device, digest, files)
