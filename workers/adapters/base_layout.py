"""Describes the base's modules and their sizes. An adapter's files are checked against them before values are read.

Modules are named as in the checkpoint, without "model.": "layers.0.self_attn.q_proj", "embed_tokens", "lm_head",
"norm". To support adapters of a new family, extend BaseLayout.of.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from lorafleet.workers.bases.checkpoint import ModelConfig
from lorafleet.workers.bases.expert_names import engine_name, mixtral_name
from lorafleet.workers.bases.text_part import PREFIXES

EMBEDDING = "embed_tokens"
HEAD = "lm_head"
TABLES = (EMBEDDING, HEAD)


@dataclass(frozen=True, slots=True)
class ExpertsLayout:
    """The mixtures of experts in the base."""

    modules: frozenset[str]  # the mixtures, such as "layers.0.mlp.experts"
    count: int  # experts of each mixture
    shapes: Mapping[str, tuple[int, int]]  # (in, out) of each expert's projections
    is_mixtral: bool  # an adapter may use Mixtral's own names

    def expert(self, module: str, number: int, leaf: str) -> str:
        return f"{module}.{number}.{leaf}"

    def has(self, module: str) -> bool:
        """Returns whether the module is a mixture, a mixture that PEFT has wrapped, or a projection of one expert."""
        head, found, tail = module.partition(".experts")
        if not found or head + found not in self.modules:
            return False
        if tail in ("", ".base_layer"):
            return True
        match = _OF_EXPERT.fullmatch(tail)
        return match is not None and int(match[1]) < self.count and match[2] in self.shapes


_OF_EXPERT = re.compile(r"\.(0|[1-9][0-9]{0,5})\.([a-z_]+)")


@dataclass(frozen=True, slots=True)
class BaseLayout:
    """The base's modules and their sizes."""

    linears: Mapping[str, tuple[int, int]]  # (in, out) of every linear except the head and the experts
    vocab_size: int
    hidden_size: int
    attention_heads: tuple[int, int]  # (query heads, KV heads)
    tied: bool = False  # the head is the embedding
    biased: frozenset[str] = frozenset()  # linears with a bias
    norms: Mapping[str, int] = field(default_factory=dict)  # size of each norm
    norm_offset: float = 0.0  # added to a norm's stored weight
    experts: ExpertsLayout | None = None
    is_text_part: bool = False  # the checkpoint has a part for pictures too

    @classmethod
    def of(cls, config: ModelConfig) -> BaseLayout:
        linears = config.linear_shapes()
        biases = {
            **dict.fromkeys(("q_proj", "k_proj", "v_proj", "qkv_proj"), config.qkv_bias),
            "o_proj": config.o_bias,
            **dict.fromkeys(("gate_proj", "up_proj", "gate_up_proj", "down_proj"), config.mlp_bias),
        }
        places = ["input", "post_attention", *(("pre_feedforward", "post_feedforward") if config.branch_norms else ())]
        norms = {"norm": config.hidden_size}
        for i in range(config.num_layers):
            norms |= {f"layers.{i}.{place}_layernorm": config.hidden_size for place in places}
            if config.qk_norm:
                norms |= {f"layers.{i}.self_attn.{side}_norm": config.head_dim for side in "qk"}
        return cls(
            linears=linears,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            attention_heads=(config.num_heads, config.num_kv_heads),
            tied=config.tie_word_embeddings,
            biased=frozenset(module for module in linears if biases.get(module.rpartition(".")[2])),
            norms=norms,
            norm_offset=1.0 if config.norm_adds_one else 0.0,
            experts=_experts(config),
            is_text_part=config.is_text_part,
        )

    def targetable(self, module: str) -> bool:
        """Returns whether the base has this module and an adapter's tensors can be for it."""
        if module in self.linears or module in self.norms or module in TABLES:
            return True
        return self.experts is not None and self.experts.has(module)

    def is_router(self, module: str) -> bool:
        return self.experts is not None and f"{module.removesuffix('.gate')}.experts" in self.experts.modules

    def engine_name(self, module: str) -> str:
        """Returns the name used here for a module that the file names, without prefixes."""
        return engine_name(module) if self.experts is not None and self.experts.is_mixtral else module

    def peft_names(self, module: str) -> tuple[str, ...]:
        """Returns the module's names in PEFT's patterns: the newest transformers' name, then any older ones."""
        if self.experts is not None and self.experts.is_mixtral and ".mlp." in module:
            return peft_name(module), peft_name(mixtral_name(module))
        if self.is_text_part:
            return (peft_name(module), *(f"{prefix}{module}" for prefix in PREFIXES))
        return (peft_name(module),)

    def describe(self) -> str:
        layers = {m.split(".")[1] for m in self.linears if m.startswith("layers.")}
        leaves = sorted({m.rpartition(".")[2] for m in self.linears})
        return f"{len(layers)} layers of {', '.join(leaves)}"


def _experts(config: ModelConfig) -> ExpertsLayout | None:
    if config.experts is None:
        return None
    return ExpertsLayout(
        modules=frozenset(f"layers.{i}.mlp.experts" for i in config.experts.layers),
        count=config.experts.count,
        shapes=config.expert_shapes(),
        is_mixtral=config.architecture == "MixtralForCausalLM",
    )


def peft_name(module: str) -> str:
    """Returns the module's name in PEFT's patterns."""
    return module if module == HEAD else f"model.{module}"
