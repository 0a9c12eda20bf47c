"""Makes a model on a GPU compute each token with the same bits in every batch, and refuses what it cannot.

The norms, rotations, activations and LoRA kernels compute rows by themselves already. What is changed here are the
products with the base's weights. workers/attention/paged_backend.py computes the attention.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from lorafleet.kernels.linear.fixed_linear import FixedWeight
from lorafleet.kernels.quant.base_weight import PlainWeight
from lorafleet.protocol.engine_config import EngineConfig
from lorafleet.protocol.errors import AdapterUnsupported, ConfigError
from lorafleet.workers.bases.layer_config import AttentionConfig
from lorafleet.workers.bases.model_config import ModelConfig
from lorafleet.workers.models.decoder import DecoderModel
from lorafleet.workers.slots.lora_model import LoRAModel

OPTION = "batch_invariant"


def check_fixed_order(config: EngineConfig, device: torch.device) -> None:
    """Raises ConfigError if options exclude the same bits in every batch."""
    if not config.batch_invariant:
        return
    if config.tensor_parallel_size > 1:
        raise ConfigError(
            f"{OPTION} is for one GPU, since sums over ranks depend on the batch. Set tensor_parallel_size=1 instead "
            f"of {config.tensor_parallel_size}, or leave {OPTION} out.",
            OPTION,
        )
    if device.type == "cuda" and config.attention_backend not in ("auto", "triton"):
        raise ConfigError(
            f"{OPTION} needs Triton's attention, and not {config.attention_backend!r}. Leave attention_backend out.",
            OPTION,
        )
    if device.type == "cuda" and config.model_impl == "transformers":
        raise ConfigError(
            f"{OPTION} on a GPU is for lorafleet's own decoders, and not for model_impl=transformers. Leave one out.",
            OPTION,
        )


def fix_order(model: DecoderModel) -> None:
    """Replaces the weights of a model that is not filled yet. Raises ConfigError if its parts depend on the batch."""
    reason = next(_reasons(model), None)
    if reason is not None:
        raise ConfigError(
            f"{OPTION} on a GPU is for dense models with plain attention, and {model.config.architecture} has "
            f"{reason}. Leave {OPTION} out, or use another base.",
            OPTION,
        )
    for _, linear in model.packed_linears():
        assert isinstance(linear.weight, PlainWeight)
        linear.weight = FixedWeight(linear.weight.weight.data)
    model.embed_tokens.has_fixed_order = model.lm_head.has_fixed_order = True


def _reasons(model: DecoderModel) -> Iterator[str]:
    """Yields what has no kernels with fixed bits."""
    config: ModelConfig = model.config
    if model.mixtures():
        yield "a mixture of experts"
    if any(not isinstance(linear.weight, PlainWeight) for _, linear in model.packed_linears()):
        yield "quantized linears"
    if any(not isinstance(layer.mixer, AttentionConfig) for layer in config.layers if layer.mixer is not None):
        yield "layers with latent attention or a recurrence"
    if config.per_layer is not None or config.altup is not None:
        yield "per-layer embeddings or several residual streams"
    if any(layer.mlp is not None and layer.mlp.sparsity for layer in config.layers):
        yield "a sparse activation"


def check_adapter(model: LoRAModel) -> None:
    """Raises AdapterUnsupported if the adapter changes the table of the vocabulary: its products, and the width of the
    logits of all rows in a step, depend on the batch."""
    if model.head is not None or model.embedding is not None or model.vocab_size is not None:
        raise AdapterUnsupported(
            f"adapter {model.name!r} changes the vocabulary's table, which --batch-invariant excludes. "
            "Serve it without that option, or train it without tokens, embedding and head."
        )
