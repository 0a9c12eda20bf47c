"""Builds the base model, and fills it or a model that drafts beside it from a checkpoint."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import torch
from torch import nn

from lorafleet.protocol.engine_config import EngineConfig
from lorafleet.workers.bases.checkpoint_model import CheckpointModel
from lorafleet.workers.bases.model_config import ModelConfig
from lorafleet.workers.bases.weights import Progress, fill_randomly, load_weights
from lorafleet.workers.models.decoder import DecoderModel
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
