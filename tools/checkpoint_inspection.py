"""Reports what a base's checkpoint holds, what serving it takes on each GPU, and what remains (`lorafleet inspect`)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

from lorafleet.protocol.engine_config import EngineConfig
from lorafleet.protocol.errors import ConfigError
from lorafleet.tools.checkpoint_contents import MTP, TensorGroup, read_contents
from lorafleet.workers.auto_options import base_dtype
from lorafleet.workers.bases.checkpoint import read_model_config
from lorafleet.workers.bases.linear_schemes import form_of, linear_scheme
from lorafleet.workers.bases.model_config import ModelConfig
from lorafleet.workers.memory_estimate import Card, MetaEngine, Needs, Room, unquantized_model
from lorafleet.workers.models.generic.architecture import implementation
from lorafleet.workers.models.generic.generic_loading import read_generic_config

MIB = 1 << 20
# Total memory of each card as its driver reports it with error correction, its compute capability, and the name that
# CUDA reports if there are data for it.
CARDS = {
    "a100-40": Card("A100 40 GB", 40960 * MIB, (8, 0)),
    "a100-80": Card("A100 80 GB", 81920 * MIB, (8, 0)),
    "h100-80": Card("H100 80 GB", 81559 * MIB, (9, 0), "NVIDIA H100 80GB HBM3"),
    "h200-141": Card("H200 141 GB", 143771 * MIB, (9, 0), "NVIDIA H200"),
    "l4-24": Card("L4 24 GB", 23034 * MIB, (8, 9)),
    "l40s-48": Card("L40S 48 GB", 46068 * MIB, (8, 9)),
    "rtx3090-24": Card("RTX 3090 24 GB", 24576 * MIB, (8, 6)),
    "rtx4090-24": Card("RTX 4090 24 GB", 24564 * MIB, (8, 9)),
}
SIZES = (1, 2, 4, 8)  # Numbers of GPUs that are shown if none is given.


@dataclass(frozen=True, slots=True)
class GPUShare:
    """The part of each GPU if so many share the model."""

    tensor_parallel_size: int
    needs: Needs | None = None
    room: Room | None = None  # On the card, or on a CPU if none is named.
    refusal: str | None = None  # The server's error message; None if the model can be divided this way.


@dataclass(frozen=True, slots=True)
class CheckpointInspection:
    path: str
    architecture: str | None = None
    # Whether transformers' own module runs it. What such a module takes of a GPU is not computed.
    is_generic: bool = False
    dtype: str = ""  # The serving dtype.
    kv_dtype: str = ""
    linears: dict[str, int] = field(default_factory=dict)  # Number of packed linears in each form of weights.
    experts: dict[str, int] = field(default_factory=dict)  # The same of mixtures' linears; one is that of all experts.
    context_limit: int = 0
    num_parameters: int = 0  # Numbers of the served model before quantization.
    tensors: list[TensorGroup] = field(default_factory=list)  # In the files, those of a part for pictures included.
    shares: list[GPUShare] = field(default_factory=list)
    # It has a layer for several tokens (MTP) that can draft. `shares` count it only if the options have it draft.
    drafts_itself: bool = False
    refusal: str | None = None  # The server's error message; None if it serves the checkpoint.
    error: str | None = None  # The class of the error.

    @property
    def is_refused(self) -> bool:
        """Whether the server refuses the checkpoint, each way to divide it, or the memory that is given."""
        return self.refusal is not None or (
            bool(self.shares)
            and all(
                share.refusal is not None or (share.room is not None and share.room.refusal is not None)
                for share in self.shares
            )
        )


def inspect_checkpoint(config: EngineConfig, card: Card | None, sizes: tuple[int, ...]) -> CheckpointInspection:
    """Inspects the checkpoint at config.model without reading its weights.

    Args:
        config: The options of the server. tensor_parallel_size is replaced by each of `sizes`.
        card: The GPU of each rank, or None for a CPU.
    """
    folder = Path(config.model)
    found = CheckpointInspection(config.model)
    try:
        found = replace(found, tensors=read_contents(folder))
        if implementation("auto", folder) == "transformers":
            return _of_module(found, folder)
        model = read_model_config(folder)
        found = replace(found, architecture=model.architecture, context_limit=model.context_limit)
        if model.mtp_names:
            found = replace(found, tensors=read_contents(folder, model.mtp_names))
            has_mtp = any(group.kind == MTP for group in found.tensors)
            found = replace(found, drafts_itself=has_mtp and model.mtp is not None)
        shares = [_share(replace(config, tensor_parallel_size=size), card) for size in sizes]
        engine = MetaEngine.build(replace(config, tensor_parallel_size=1), card)
    except ConfigError as error:
        return replace(found, refusal=error.message, error=type(error).__name__)
    served = engine.model.config
    return replace(
        found,
        dtype=_name(engine.dtype),
        kv_dtype=_name(engine.spec.kv_dtype),
        linears=dict(Counter(form_of(linear_scheme(served, names)) for names, _ in engine.model.packed_linears())),
        experts=dict(
            Counter(form_of(scheme) for _, mixture in engine.model.mixtures() for scheme in mixture.schemes())
        ),
        num_parameters=_num_parameters(served),
        shares=shares,
    )


def _of_module(found: CheckpointInspection, folder: Path) -> CheckpointInspection:
    """Returns what is known of a checkpoint that transformers' own module runs. Raises ConfigError if it is refused."""
    config = read_generic_config(folder)
    dtype = base_dtype(EngineConfig(str(folder)), config, folder)
    return replace(
        found,
        architecture=config.architecture,
        is_generic=True,
        dtype=_name(dtype),
        kv_dtype=_name(dtype),
        linears={"plain": len(config.linears)},
        context_limit=config.context_limit,
    )


def _share(config: EngineConfig, card: Card | None) -> GPUShare:
    size = config.tensor_parallel_size
    try:
        engine = MetaEngine.build(config, card)
    except ConfigError as error:
        return GPUShare(size, refusal=error.message)
    return GPUShare(size, engine.needs, engine.room(card))


def _num_parameters(config: ModelConfig) -> int:
    return sum(parameter.numel() for parameter in unquantized_model(config).parameters())


def _name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
