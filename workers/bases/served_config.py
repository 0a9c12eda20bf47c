"""Defines what the engine reads of a base model's configuration, whichever implementation runs the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from lorafleet.workers.bases.experts_config import ExpertsConfig
from lorafleet.workers.bases.layer_config import LatentAttentionConfig
from lorafleet.workers.bases.model_config import NormStyle
from lorafleet.workers.bases.quantization import Quantization
from lorafleet.workers.bases.recurrence_config import StateShape
from lorafleet.workers.bases.rope_config import RopeConfig
from lorafleet.workers.bases.stored_names import StoredNames


class ServedAttention(Protocol):
    """One layer's attention, as LayerAttention has it."""

    @property
    def num_heads(self) -> int: ...

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def scale(self) -> float: ...

    @property
    def window(self) -> int | None: ...

    @property
    def chunk(self) -> int | None: ...

    @property
    def softcap(self) -> float | None: ...

    @property
    def has_sinks(self) -> bool: ...

    @property
    def cache_layer(self) -> int | None: ...


class ServedConfig(Protocol):
    """The settings of a decoder. ModelConfig has them for our own, GenericConfig for transformers' modules."""

    @property
    def architecture(self) -> str: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def attentions(self) -> Sequence[ServedAttention | LatentAttentionConfig]:
        """The attention of each layer that has one."""

    @property
    def attention_layers(self) -> Sequence[int]:
        """The layers that have attention."""

    @property
    def states(self) -> Sequence[StateShape]:
        """The state of each recurrent layer."""

    @property
    def logits_scale(self) -> float: ...

    @property
    def final_softcap(self) -> float | None: ...

    @property
    def context_limit(self) -> int: ...

    @property
    def rope_positions(self) -> int: ...

    @property
    def rope(self) -> RopeConfig: ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype | None: ...

    @property
    def tie_word_embeddings(self) -> bool: ...

    @property
    def has_head(self) -> bool: ...

    @property
    def stored_names(self) -> StoredNames: ...

    @property
    def norm(self) -> NormStyle: ...

    @property
    def experts(self) -> ExpertsConfig | None: ...

    @property
    def quantization(self) -> Quantization | None: ...
