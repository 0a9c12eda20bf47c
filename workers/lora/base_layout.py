"""Which modules the base has, and their sizes: what an adapter's files are checked against before values are read.

Modules are called as in the checkpoint without "model.": "layers.0.self_attn.q_proj", "embed_tokens", "lm_head",
"norm". BaseLayout.of is the place to teach adapters a new family.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lorafleet.workers.checkpoint import ModelConfig

EMBEDDING = "embed_tokens"
HEAD = "lm_head"
TABLES = (EMBEDDING, HEAD)


@dataclass(frozen=True, slots=True)
class BaseLayout:
    """linears: (in, out) of every linear but the head. biased: those with a bias. norms: sizes.

    norm_offset: what is added to a norm's stored weight. attention_heads: (query heads, KV heads).
    """

    linears: Mapping[str, tuple[int, int]]
    vocab_size: int
    hidden_size: int
    attention_heads: tuple[int, int]
    tied: bool = False
    biased: frozenset[str] = frozenset()
    norms: Mapping[str, int] = field(default_factory=dict)
    norm_offset: float = 0.0

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
        )

    def targetable(self, module: str) -> bool:
        """Whether the base has such a module, which an adapter's tensors can be for."""
        return module in self.linears or module in self.norms or module in TABLES

    def describe(self) -> str:
        layers = {m.split(".")[1] for m in self.linears if m.startswith("layers.")}
        leaves = sorted({m.rpartition(".")[2] for m in self.linears})
        return f"{len(layers)} layers of {', '.join(leaves)}"


def peft_name(module: str) -> str:
    """As PEFT's patterns see it."""
    return module if module == HEAD else f"model.{module}"
