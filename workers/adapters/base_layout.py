"""Describes the base's modules and their sizes. An adapter's files are checked against them before values are read.

Modules are named as in the checkpoint, without "model.": "layers.0.self_attn.q_proj", "embed_tokens", "lm_head",
"norm". To support adapters of a new family, extend BaseLayout.of.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from lorafleet.workers.adapters.spellings import ROOTS_OF_TEXT, Roots, Spelled
from lorafleet.workers.bases.layer_config import NORMS_AROUND, NORMS_BEFORE, AttentionConfig
from lorafleet.workers.bases.model_config import ModelConfig
from lorafleet.workers.bases.module_names import COMMON_NAMES, ModuleNames
from lorafleet.workers.bases.per_layer_config import TABLE
from lorafleet.workers.bases.rope_config import RopeConfig

EMBEDDING = "embed_tokens"
HEAD = "lm_head"
TABLES = (EMBEDDING, HEAD)
# Tinker's and SGLang's names of a projection of all experts, whose tensors have the experts as their first dimension.
BATCHED_NAMES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


@dataclass(frozen=True, slots=True)
class ExpertsLayout:
    """The mixtures of experts in the base."""

    modules: frozenset[str]  # the mixtures, such as "layers.0.mlp.experts"
    count: int  # experts of each mixture
    shapes: Mapping[str, tuple[int, int]]  # (in, out) of each expert's projections
    routers: frozenset[str]  # such as "layers.0.mlp.gate"
    interleaved: bool = False  # outputs of gate and up alternate in the parameter of both
    swapped: bool = False  # PEFT takes the parameters' inputs for outputs

    @property
    def first(self) -> tuple[str, ...]:
        """The projections before the activation, in the order of their outputs in one parameter."""
        return tuple(leaf for leaf in self.shapes if leaf != "down_proj")

    @property
    def parameters(self) -> dict[str, tuple[str, ...]]:
        """The projections in each parameter of all experts, in the order in which transformers defines these."""
        return {"gate_up_proj" if len(self.first) == 2 else self.first[0]: self.first, "down_proj": ("down_proj",)}

    def expert(self, module: str, number: int, leaf: str) -> str:
        return f"{module}.{number}.{leaf}"

    def has(self, module: str) -> bool:
        """Returns whether the module is a mixture, a mixture that PEFT has wrapped, or a projection of one expert or of
        all."""
        head, found, tail = module.partition(".experts")
        if not found or head + found not in self.modules:
            return False
        if tail in ("", ".base_layer") or BATCHED_NAMES.get(tail[1:], tail[1:]) in self.shapes:
            return True
        match = _OF_EXPERT.fullmatch(tail)
        return match is not None and int(match[1]) < self.count and match[2] in self.shapes


_LAYER = re.compile(r"(?:^|\.)(?:layers|h)\.(\d+)\.")
_OF_EXPERT = re.compile(r"\.(0|[1-9][0-9]{0,5})\.([a-z_]+)")


@dataclass(frozen=True, slots=True)
class BaseLayout:
    """The base's modules and their sizes."""

    linears: Mapping[str, tuple[int, int]]  # (in, out) of every linear except the head and the experts
    vocab_size: int
    hidden_size: int
    attention_heads: tuple[int, int]  # (query heads, KV heads)
    tied: bool = False  # the head is the embedding
    is_only_called_tied: bool = False  # it is another tensor, but config.json, which PEFT believes, calls them tied
    biased: frozenset[str] = frozenset()  # linears with a bias, of which the head may be one
    absorbed: frozenset[str] = frozenset()  # linears that are never applied as such, see Projection.is_absorbed
    norms: Mapping[str, int] = field(default_factory=dict)  # size of each norm
    norm_offset: float = 0.0  # added to a norm's stored weight
    experts: ExpertsLayout | None = None
    is_text_part: bool = False  # the checkpoint has a part for pictures too
    absent: frozenset[str] = frozenset()  # modules whose tensors have no effect, see ModelConfig.absent_modules
    norms_values: bool = False  # attention norms the values of some layer
    names: ModuleNames = COMMON_NAMES  # those that adapters use
    tables: frozenset[str] = frozenset(TABLES)  # those of TABLES that adapters may change
    unserved: frozenset[str] = frozenset()  # other modules that have parameters, which adapters may not change
    has_root: bool = True  # the checkpoint's names begin with "model."
    can_scale_norms: bool = True  # the inputs of Llama's modules come from norms with Llama's names, without biases
    rope: RopeConfig | None = None  # that an adapter's own rope scaling replaces; None: adapters cannot have one
    rope_positions: int = 0  # number of tokens that the rope would be for without scaling
    is_generic: bool = False  # nothing is known of how the modules are connected
    roots: Roots = ROOTS_OF_TEXT  # beginnings of the modules' names in PEFT's patterns, see as_named_in()

    @classmethod
    def of(cls, config: ModelConfig) -> BaseLayout:
        projections, first = config.projections(), config.attentions[0]
        return cls(
            linears={module: projection.shape for module, projection in projections.items()},
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            attention_heads=(first.num_heads, first.num_kv_heads),
            tied=config.tie_word_embeddings,
            is_only_called_tied=config.is_only_called_tied,
            biased=frozenset(
                [
                    *(module for module, projection in projections.items() if projection.has_bias),
                    *([HEAD] if config.head_bias else []),
                ]
            ),
            absorbed=frozenset(module for module, projection in projections.items() if projection.is_absorbed),
            norms=config.norm_sizes(),
            norm_offset=1.0 if config.norm.adds_one else 0.0,
            experts=_experts(config),
            is_text_part=config.is_text_part,
            rope=config.adapters_rope,
            rope_positions=config.rope_positions,
            absent=config.absent_modules,
            unserved=frozenset() if config.per_layer is None else frozenset([TABLE]),
            norms_values=any(isinstance(a, AttentionConfig) and a.value_norm for a in config.attentions),
            names=config.names,
            can_scale_norms=not config.norm.has_bias
            and all(layer.norms in (NORMS_BEFORE, NORMS_AROUND) for layer in config.layers),
        )

    @property
    def ties_adapters(self) -> bool:
        """Whether PEFT ties the head's trained tokens to the embedding's, and what ensure_weight_tying asks for."""
        return self.tied or self.is_only_called_tied

    def targetable(self, module: str) -> bool:
        """Returns whether the base has this module and an adapter's tensors can be for it."""
        if module in self.linears or module in self.norms or module in self.tables:
            return True
        return self.experts is not None and self.experts.has(module)

    def is_router(self, module: str) -> bool:
        return self.experts is not None and module in self.experts.routers

    def engine_name(self, module: str) -> str:
        """Returns the name used here for a module that the file names, without prefixes."""
        return self.names.engine_name(module)

    def spelled(self, module: str) -> Spelled:
        """Returns the module's names in PEFT's patterns."""
        return self.roots.spell(self.names.own_names(module))

    def newest_names(self, module: str) -> Spelled:
        """Returns the names in classes of the newest transformers."""
        return self.roots.spell(self.names.own_names(module)[:1])

    def older_names(self, module: str) -> Spelled:
        """Returns the names in classes of older transformers."""
        return self.roots.spell(self.names.own_names(module)[-1:])

    def as_named_in(self, root: str | None) -> BaseLayout:
        """Returns the same layout for an adapter whose file has this root before the modules' names; None: unknown."""
        return replace(self, roots=Roots.of(self.served_root, self.names.root, root))

    @property
    def served_root(self) -> str:
        """The beginning of the modules' names in the base's own class."""
        if self.is_text_part:
            return "model.language_model."
        return "model." if self.has_root else ""

    def describe(self) -> str:
        layers = {found[1] for found in map(_LAYER.search, self.linears) if found is not None}
        leaves = sorted({m.rpartition(".")[2] for m in self.linears})
        return f"{len(layers)} layers of {', '.join(leaves)}"


def _experts(config: ModelConfig) -> ExpertsLayout | None:
    if config.experts is None:
        return None
    return ExpertsLayout(
        modules=frozenset(f"layers.{i}.{config.experts.prefix}experts" for i in config.experts.layers),
        count=config.experts.count,
        shapes=config.expert_shapes(),
        routers=frozenset(
            f"layers.{i}.{config.experts.prefix}{config.experts.router_name}" for i in config.experts.layers
        ),
        interleaved=config.experts.interleaved,
        swapped=config.experts.adapters_swapped,
    )


def peft_name(module: str) -> str:
    """Returns the module's name in PEFT's patterns."""
    return module if module == HEAD else f"model.{module}"
