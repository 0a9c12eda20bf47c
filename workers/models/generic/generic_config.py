"""The configuration of a model that runs as transformers' module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from lorafleet.workers.adapters.base_layout import TABLES, BaseLayout
from lorafleet.workers.attention.attention_backend import LayerAttention
from lorafleet.workers.bases.model_config import NormStyle
from lorafleet.workers.bases.quantization import Quantization
from lorafleet.workers.bases.recurrence_config import StateShape
from lorafleet.workers.bases.rope_config import RopeConfig
from lorafleet.workers.bases.stored_names import AS_WRITTEN, StoredNames
from lorafleet.workers.models.generic.attention_probe import AttentionTraits
from lorafleet.workers.models.generic.module_paths import ROOT
from lorafleet.workers.models.generic.sharding_plan import ShardingPlan


@dataclass(frozen=True, slots=True)
class GenericConfig:
    """Describes a module of transformers to the engine, from its config and from a run of its empty copy."""

    architecture: str
    vocab_size: int
    hidden_size: int
    context_limit: int  # tokens, max_position_embeddings
    eos_token_ids: tuple[int, ...]
    dtype: torch.dtype | None  # the checkpoint's own; None if config.json does not say
    tie_word_embeddings: bool
    attention: AttentionTraits
    plan: ShardingPlan  # the division among ranks
    linears: Mapping[str, tuple[int, int]]  # (in, out) of every linear that adapters may target, by engine name
    biased: frozenset[str]  # those of them that have a bias
    tables: frozenset[str]  # embed_tokens and lm_head, where adapters may change them
    unserved: frozenset[str]  # modules with parameters that adapters may not change, by engine name
    has_root: bool  # modules' names in the checkpoint begin with ROOT
    is_only_called_tied: bool = False  # config.json calls head and embedding tied, and the files have two that differ
    stored_names: StoredNames = AS_WRITTEN  # how names in the files differ from the class's own
    quantization: Quantization | None = None
    has_head: bool = field(default=True, init=False)  # transformers makes up a head that a checkpoint lacks; refused
    final_softcap: float | None = field(default=None, init=False)  # the class itself caps logits, see HeadTable
    logits_scale: float = field(default=1.0, init=False)
    norm: NormStyle = field(default=NormStyle(0.0), init=False)  # norms are the module's own
    experts: None = field(default=None, init=False)  # adapters do not reach experts here
    states: tuple[StateShape, ...] = field(default=(), init=False)  # layers with a state are rejected

    @property
    def attentions(self) -> tuple[LayerAttention, ...]:
        traits = self.attention
        return tuple(
            LayerAttention(
                num_heads=traits.num_heads,
                num_kv_heads=traits.num_kv_heads,
                head_dim=traits.head_dim,
                scale=traits.scale,
                window=window,
                softcap=traits.softcap,
            )
            for window in traits.windows
        )

    @property
    def rope_positions(self) -> int:
        """Number of tokens of the context. No adapter extends it, since the module itself rotates."""
        return self.context_limit

    @property
    def attention_layers(self) -> range:
        return range(len(self.attention.windows))

    @property
    def rope(self) -> RopeConfig:
        """A rope whose angles do not depend on a sequence's length. The module itself rotates."""
        return RopeConfig(self.attention.head_dim, 1.0, self.context_limit)

    def layout(self) -> BaseLayout:
        """Returns the modules that adapters are checked against."""
        return BaseLayout(
            linears=self.linears,
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            attention_heads=(self.attention.num_heads, self.attention.num_kv_heads),
            tied=self.tie_word_embeddings,
            is_only_called_tied=self.is_only_called_tied,
            biased=self.biased,
            tables=self.tables,
            unserved=self.unserved,
            has_root=self.has_root,
            is_generic=True,
        )


def served_tables(embedding: str, head: str, *, head_has_bias: bool) -> frozenset[str]:
    """Returns the tables that adapters may change: those with the usual names. A head with a bias is left out."""
    usual = dict(zip(TABLES, (embedding == f"{ROOT}{TABLES[0]}", head == TABLES[1] and not head_has_bias), strict=True))
    return frozenset(table for table, is_served in usual.items() if is_served)
