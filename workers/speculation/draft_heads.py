"""Builds the head that drafts from the base's hidden states: an EAGLE-3 head, or the checkpoint's own layer for one
token more (MTP)."""

from __future__ import annotations

from pathlib import Path

import torch

from lorafleet.protocol.engine_config import EngineConfig
from lorafleet.protocol.errors import ConfigError
from lorafleet.workers.bases.checkpoint import has_mtp_tensors, read_mtp_config
from lorafleet.workers.bases.model_config import ModelConfig
from lorafleet.workers.model_loading import fill_model
from lorafleet.workers.models.decoder import DecoderModel
from lorafleet.workers.models.engine_model import EngineModel
from lorafleet.workers.speculation.eagle_files import load_eagle_weights, read_eagle_config
from lorafleet.workers.speculation.eagle_head import EagleHead
from lorafleet.workers.speculation.mtp_head import MTPHead
from lorafleet.workers.tp.shard import Shard

DraftHead = EagleHead | MTPHead


def make_head(config: EngineConfig, own: EngineConfig, base: EngineModel, device: torch.device) -> DraftHead:
    """Returns this rank's part of the head that the options ask for, which shares the base's embedding. Its weights are
    empty. Raises ConfigError if it cannot draft for this engine.

    Args:
        own: The head's configuration, from draft_config().
    """
    assert config.speculative_config is not None
    method, reason = config.speculative_config.method, None
    if not isinstance(base, DecoderModel):
        reason = "with a base that transformers' own module runs"
    elif config.kv_host_gib:
        reason = f"with kv_host_gib={config.kv_host_gib}, since features do not leave the GPU with KV blocks"
    if reason is not None or not isinstance(base, DecoderModel):
        raise ConfigError(
            f"speculative_config: method={method!r} is not served {reason}. Leave one of them out, or use "
            "method='draft_model'.",
            "speculative_config",
        )
    make = _make_mtp if method == "mtp" else _make_eagle
    return make(config, own, base, device)


def check_division(config: EngineConfig, target: ModelConfig) -> None:
    """Raises ConfigError if an EAGLE-3 head cannot be divided among the ranks. MTP layers can, since the base can."""
    options = config.speculative_config
    if options is None or options.method != "eagle3":
        return
    folder = Path(str(options.model))
    try:
        Shard.of(read_eagle_config(folder, target).layer, 0, config.tensor_parallel_size)
    except ConfigError as error:
        if error.param != "tensor_parallel_size":
            raise
        raise ConfigError(f"speculative_config: the head {str(folder)!r}: {error.message}", error.param) from None


def fill_head(own: EngineConfig, head: DraftHead) -> None:
    """Fills the head from its checkpoint. `own` is as above."""
    if isinstance(head, EagleHead):
        load_eagle_weights(head, Path(own.model))
    else:
        fill_model(own, head)


def _make_eagle(config: EngineConfig, own: EngineConfig, base: DecoderModel, device: torch.device) -> EagleHead:
    folder = Path(own.model)
    read = read_eagle_config(folder, base.config)
    return EagleHead(
        read.layer,
        base,
        base.embed_tokens.weight.dtype,
        device,
        norms_residual=read.norms_residual,
        most_tokens=own.max_num_batched_tokens,
        most_rows=config.most_sampled,
    )


def _make_mtp(config: EngineConfig, own: EngineConfig, base: DecoderModel, device: torch.device) -> MTPHead:
    folder, target = Path(config.model), base.config
    reason = None
    if target.mtp is None:
        reason = f"its config.json ({target.architecture}) describes none that can draft"
    elif config.load_format != "dummy" and not has_mtp_tensors(folder, target.mtp_names):
        reason = f"it has no tensor whose name begins with {' or '.join(map(repr, target.mtp_names))}"
    if reason is not None:
        raise ConfigError(
            f"speculative_config: method='mtp' needs a checkpoint with a layer for several tokens (MTP), and "
            f"{config.model!r} has none: {reason}. Serve the original checkpoint if it was left out there, or use "
            "method='ngram' or 'draft_model'.",
            "speculative_config",
        )
    return MTPHead(
        read_mtp_config(folder, target),
        base,
        base.embed_tokens.weight.dtype,
        device,
        most_tokens=own.max_num_batched_tokens,
        most_rows=config.most_sampled,
    )
