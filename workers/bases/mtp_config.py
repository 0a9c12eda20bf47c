"""Describes a layer behind a decoder's last one that predicts one token more (multi-token prediction, MTP).

Its input for a place is a linear of two norms side by side: of the next token's embedding, and of the place's hidden
state. Embedding and head are the decoder's. The engine calls these modules enorm, hnorm and eh_proj, as DeepSeek does.

Source: DeepSeek-V3, arXiv 2412.19437, section 2.2.
"""

from __future__ import annotations

from dataclasses import dataclass

from lorafleet.workers.bases.layer_config import LayerConfig
from lorafleet.workers.bases.module_names import OF_BASE, Pairs


@dataclass(frozen=True, slots=True)
class MTPConfig:
    """The description of one such layer. It has experts if the decoder has any."""

    layer: LayerConfig
    names: Pairs  # ModuleNames.part of a model that has this layer alone, as "layers.0"
    # Whether further tokens are predicted from the output of the layer's last norm, rather than from what it norms.
    feeds_norm: bool


def qwen_mtp(layer: LayerConfig) -> MTPConfig:
    """Returns the first layer of those that Qwen's checkpoints have below "mtp."."""
    names = (
        ("mtp.fc.", "model.eh_proj."),
        ("mtp.pre_fc_norm_embedding.", "model.enorm."),
        ("mtp.pre_fc_norm_hidden.", "model.hnorm."),
        ("mtp.layers.0.", "model.layers.0."),
        ("mtp.layers.", OF_BASE),  # further layers
        ("mtp.", "model."),
    )
    return MTPConfig(layer, names, feeds_norm=True)


def deepseek_mtp(layer: LayerConfig, prefix: str) -> MTPConfig:
    """Returns the layer whose tensors begin with `prefix`, as DeepSeek's and GLM's checkpoints have it.

    They repeat the embedding and the head there, which are not read again.
    """
    own = ("enorm.", "hnorm.", "eh_proj.")
    names = (
        *((f"{prefix}{name}", f"model.{name}") for name in own),
        (f"{prefix}shared_head.norm.", "model.norm."),
        (f"{prefix}shared_head.head.", OF_BASE),
        (f"{prefix}embed_tokens.", OF_BASE),
        (prefix, "model.layers.0."),
    )
    return MTPConfig(layer, names, feeds_norm=False)
