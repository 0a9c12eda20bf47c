"""Reads a Hugging Face config.json into what the engine needs, and rejects by name what the engine does not support.

Both spellings are read: transformers 4's (rope_scaling, torch_dtype) and 5's (rope_parameters, dtype).
workers/bases/model_families.py has the differences between architectures, and workers/bases/weights.py reads weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lorafleet.kernels.decoder.gated_mul import Activation
from lorafleet.protocol.config_json import integer, read_json
from lorafleet.protocol.errors import ConfigError, UnsupportedModel
from lorafleet.workers.bases.model_families import DEFAULTS, FAMILIES, ExpertsConfig
from lorafleet.workers.bases.quantization import Quantization, stored_quantization
from lorafleet.workers.bases.rope_config import RopeConfig
from lorafleet.workers.bases.rope_parameters import read_rope
from lorafleet.workers.bases.text_part import LANGUAGE_MODEL_OF, text_config

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The settings of a decoder of the Llama kind."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_windows: tuple[int | None, ...]  # by layer, tokens that a query sees, including its own; None means all
    dtype: torch.dtype | None  # the checkpoint's own; None if config.json does not say
    eos_token_ids: tuple[int, ...]  # from generation_config.json if it has them, else from config.json
    attention_scale: float  # multiplies q.k
    experts: ExpertsConfig | None = None  # None if every layer's MLP is dense
    activation: Activation = "silu"
    sliding_rope: RopeConfig | None = None  # of the layers with a window, if it differs from rope
    attention_softcap: float | None = None  # of the scores, see AttentionSpec
    final_softcap: float | None = None  # of the logits, in the same way
    embed_scale: float = 1.0  # multiplies the embedding, once rounded to the model's dtype
    norm_adds_one: bool = False  # the checkpoint stores norm weights minus one
    branch_norms: bool = False  # the outputs of attention and MLP are normed too, before the residual is added
    fused_linears: bool = False  # in checkpoint and adapters, q, k and v are one linear, and so are gate and up
    quantization: Quantization | None = None  # None if all weights are in dtype

    @property
    def is_text_part(self) -> bool:
        """Whether the checkpoint has a part for pictures too."""
        return self.architecture in LANGUAGE_MODEL_OF

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    def norm_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Returns the dtype of the norms' weights in a model of `dtype`.

        It is float32 if the checkpoint stores them minus one, since `dtype` might not hold what is added to one.
        """
        return torch.float32 if self.norm_adds_one else dtype

    @property
    def context_limit(self) -> int:
        """The number of tokens that the rope scaling was made for."""
        if self.rope.rope_type == "yarn":
            return max(self.max_position_embeddings, int(self.rope.original_max_position_embeddings * self.rope.factor))
        counts_scaling = self.sliding_rope is not None  # Gemma 3's max_position_embeddings includes the scaling
        if self.rope.rope_type in ("linear", "dynamic") and not counts_scaling:
            return int(self.max_position_embeddings * self.rope.factor)
        return self.max_position_embeddings

    def experts_of(self, layer: int) -> ExpertsConfig | None:
        """Returns the layer's experts, or None if its MLP is dense."""
        return self.experts if self.experts is not None and layer in self.experts.layers else None

    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """Returns (in, out) of every projection that plain LoRA may target, by module path below the model.

        expert_shapes() has the projections of the experts.
        """
        hidden, inner = self.hidden_size, self.intermediate_size
        attention = {"self_attn.o_proj": (self.q_size, hidden)}
        dense = {"mlp.down_proj": (inner, hidden)}
        if self.fused_linears:
            attention["self_attn.qkv_proj"] = (hidden, self.q_size + 2 * self.kv_size)
            dense["mlp.gate_up_proj"] = (hidden, 2 * inner)
        else:
            attention |= {f"self_attn.{kv}_proj": (hidden, self.kv_size) for kv in "kv"}
            attention["self_attn.q_proj"] = (hidden, self.q_size)
            dense |= {f"mlp.{half}_proj": (hidden, inner) for half in ("gate", "up")}
        shapes: dict[str, tuple[int, int]] = {}
        for i in range(self.num_layers):
            experts = self.experts_of(i)
            mlp = dense if experts is None else {"mlp.gate": (hidden, experts.count)}
            shapes |= {f"layers.{i}.{name}": shape for name, shape in (attention | mlp).items()}
        return shapes

    def expert_shapes(self) -> dict[str, tuple[int, int]]:
        """Returns (in, out) of each expert's projections, or nothing if there are no experts."""
        if self.experts is None:
            return {}
        hidden, inner = self.hidden_size, self.experts.intermediate_size
        return {"gate_proj": (hidden, inner), "up_proj": (hidden, inner), "down_proj": (inner, hidden)}


def read_model_config(folder: Path) -> ModelConfig:
    """Reads the config of the checkpoint in `folder`.

    Raises ConfigError if the folder or file is missing or damaged, and UnsupportedModel naming what is not supported.
    """
    if not folder.is_dir():
        raise ConfigError(f"model {str(folder)!r} is not a folder; give a local Hugging Face checkpoint.", "model")
    raw = read_json(folder / "config.json")
    names = raw.get("architectures") or []
    if len(names) != 1 or names[0] not in (*FAMILIES, *LANGUAGE_MODEL_OF):
        raise UnsupportedModel(
            f"architecture {', '.join(map(str, names)) or 'missing'} in {folder / 'config.json'} is not supported; "
            f"supported architectures: {', '.join(sorted((*FAMILIES, *LANGUAGE_MODEL_OF)))}.",
            "model",
        )
    language_model = LANGUAGE_MODEL_OF.get(names[0], names[0])
    raw = DEFAULTS.get(language_model, {}) | (raw if language_model == names[0] else text_config(raw))
    _refuse_options(raw)
    family = FAMILIES[language_model](raw)
    if language_model != names[0] and family.final_softcap is not None:
        raise UnsupportedModel(
            f"final_logit_softcapping of {names[0]} is not supported; transformers does not apply it."
        )
    if family.experts is not None and ACTIVATIONS[_activation(raw)] != "silu":
        raise UnsupportedModel(f"hidden_act={_activation(raw)!r} is not supported for experts; only silu is.")
    generation = folder / "generation_config.json"
    eos = (read_json(generation) if generation.exists() else {}).get("eos_token_id", raw.get("eos_token_id"))
    vocab_size = integer(raw, "vocab_size", 32000)
    num_heads = integer(raw, "num_attention_heads", 32)
    hidden = integer(raw, "hidden_size", 4096)
    head_dim = raw.get("head_dim") or family.default_head_dim or hidden // num_heads
    kv_heads = raw.get("num_key_value_heads", family.default_kv_heads) or num_heads
    if num_heads % kv_heads:
        raise UnsupportedModel(f"num_attention_heads={num_heads} is not a multiple of num_key_value_heads={kv_heads}.")
    limit = integer(raw, "max_position_embeddings", family.default_positions)
    return ModelConfig(
        architecture=names[0],
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=integer(raw, "intermediate_size", 11008),
        num_layers=integer(raw, "num_hidden_layers", 32),
        num_heads=num_heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=float(raw.get("rms_norm_eps", family.default_eps)),
        max_position_embeddings=limit,
        rope=family.rope or read_rope(raw, head_dim, limit, family.default_theta),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=family.qkv_bias,
        o_bias=family.o_bias,
        mlp_bias=family.mlp_bias,
        qk_norm=family.qk_norm,
        sliding_windows=family.sliding_windows,
        dtype=_dtype(raw),
        eos_token_ids=_eos_token_ids(eos, vocab_size),
        experts=family.experts,
        attention_scale=family.attention_scale or head_dim**-0.5,
        activation=ACTIVATIONS[_activation(raw)],
        sliding_rope=family.sliding_rope,
        attention_softcap=family.attention_softcap,
        final_softcap=family.final_softcap,
        embed_scale=family.embed_scale,
        norm_adds_one=family.is_gemma,
        branch_norms=family.is_gemma,
        fused_linears=family.fused_linears,
        quantization=stored_quantization(raw.get("quantization_config"), folder),
    )


def _eos_token_ids(given: object, vocab_size: int) -> tuple[int, ...]:
    ids = given if isinstance(given, list) else [] if given is None else [given]
    for token in ids:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise ConfigError(
                f"eos_token_id={token!r} of generation_config.json or config.json is not a token of the model; its "
                f"vocabulary has ids 0 to {vocab_size - 1}. Correct the file.",
                "model",
            )
    return tuple(ids)


def _refuse_options(raw: dict[str, Any]) -> None:
    if _activation(raw) not in ACTIVATIONS:
        raise UnsupportedModel(f"hidden_act={_activation(raw)!r} is not supported; only {', '.join(ACTIVATIONS)} are.")
    if raw.get("use_bidirectional_attention"):
        raise UnsupportedModel("use_bidirectional_attention is not supported; models that generate do not have it.")


def _activation(raw: dict[str, Any]) -> str:
    """Returns the activation's name. Gemma's configs have two keys for it, of which the first one counts."""
    return str(raw.get("hidden_activation") or raw.get("hidden_act") or "silu")


def _dtype(raw: dict[str, Any]) -> torch.dtype | None:
    name = raw.get("dtype") or raw.get("torch_dtype")
    if name is None:
        return None
    if name not in DTYPES:
        raise UnsupportedModel(f"config.json's dtype {name!r} is not supported; only {', '.join(DTYPES)} are.")
    return DTYPES[name]
