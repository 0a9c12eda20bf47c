"""Builds the base model, and fills it or a model that drafts beside it from a checkpoint."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from lorafleet.protocol.engine_config import EngineConfig
from lorafleet.protocol.errors import ConfigError
from lorafleet.workers.bases.checkpoint import check_same_tables, read_model_config
from lorafleet.workers.bases.checkpoint_model import CheckpointModel
from lorafleet.workers.bases.model_config import ModelConfig
from lorafleet.workers.bases.quantization import resolved
from lorafleet.workers.bases.weights import Progress, fill_randomly, load_weights
from lorafleet.workers.bases.weights_digest import weights_digest
from lorafleet.workers.models.decoder import DecoderModel
from lorafleet.workers.models.engine_model import EngineModel
from lorafleet.workers.models.fixed_order import fix_order
from lorafleet.workers.tp.group import TPGroup

log = logging.getLogger(__name__)


def load_model(
    config: EngineConfig,
    model_config: ModelConfig,
    group: TPGroup,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None,
) -> DecoderModel:
    """Returns this rank's part of the model in the folder `config.model`."""
    started = time.monotonic()
    model = DecoderModel(model_config, group, dtype, device)
    if config.batch_invariant and device.type == "cuda":
        fix_order(model)
    fill_model(config, model, progress)
    quantization = (
        ""
        if model_config.quantization is None
        else f", linear layers in {' and '.join(model_config.quantization.names)}"
    )
    log.info(
        "loaded %.2f GiB of weights in %.1f s%s", weight_bytes(model) / 2**30, time.monotonic() - started, quantization
    )
    return model


def weight_bytes(model: nn.Module) -> int:
    """Returns the bytes of a model's parameters."""
    return sum(parameter.numel() * parameter.itemsize for parameter in model.parameters())


@torch.inference_mode()
def fill_model(config: EngineConfig, model: CheckpointModel, progress: Progress | None = None) -> None:
    """Fills the model with the checkpoint's weights, or with random ones for `load_format="dummy"`."""
    if config.load_format == "dummy":
        fill_randomly(model)
    else:
        load_weights(model, Path(config.model), progress)


def refill_model(config: EngineConfig, model: CheckpointModel, served: ModelConfig) -> None:
    """Fills the model that was built from the configuration `served` again, with the weights that the checkpoint has
    now. Raises ConfigError if these are of another configuration."""
    check_same_tables(Path(config.model), served)
    if served_model_config(config) != served:
        raise ConfigError(
            f"{config.model} has the configuration of another model than when the server started. Put the former "
            "config.json back, or restart the server.",
            "model",
        )
    fill_model(config, model)


def served_model_config(config: EngineConfig) -> ModelConfig:
    """Returns the configuration in the folder `config.model`, with the quantization that is served.

    Raises ConfigError.
    """
    read = read_model_config(Path(config.model))
    return replace(read, quantization=resolved(read.quantization, config.quantization))


def digest_of(model: EngineModel) -> str:
    """Returns the digest of this rank's weights."""
    return weights_digest((str(i), parameter) for i, parameter in enumerate(model.parameters()))
