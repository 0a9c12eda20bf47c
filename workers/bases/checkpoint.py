"""Reads a Hugging Face config.json into what the engine needs, and refuses by name what it does not do.

Both spellings are read: transformers 4's (rope_scaling, torch_dtype) and 5's (rope_parameters, dtype). What sets the
architectures apart is in workers/bases/model_families.py; weights are read in workers/bases/weights.py.
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
    """A decoder of the Llama kind. sliding_windows: tokens a query of that layer sees, its own included; None is all.

    dtype: the checkpoint's own, None where config.json does not say. eos_token_ids: of generation_config.json where
    there is one, else of config.json. experts: None where every layer's MLP is dense. sliding_rope: of the layers with
    a window, where it is another than rope. attention_scale: multiplies q.k. attention_softcap, final_softcap: of the
    scores and the logits, see AttentionSpec. embed_scale: multiplies the embedding, as rounded to the model's dtype.
    norm_adds_one: the checkpoint keeps norm weights less one. branch_norms: attention and MLP are normed before the
    residual is added, too. fused_linears: q, k and v are one linear in the checkpoint and to adapters, and so are gate
    and up. quantization: None where all is in dtype.
    """

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
    sliding_windows: tuple[int | None, ...]
    dtype: torch.dtype | None
    eos_token_ids: tuple[int, ...]
    attention_scale: float
    experts: ExpertsConfig | None = None
    activation: Activation = "silu"
    sliding_rope: RopeConfig | None = None
    attention_softcap: float | None = None
    final_softcap: float | None = None
    embed_scale: float = 1.0
    norm_adds_one: bool = False
    branch_norms: bool = False
    fused_linears: bool = False
    quantization: Quantization | None = None

    @property
    def is_text_part(self) -> bool:
        """Of a checkpoint that is of pictures too."""
        return self.architecture in LANGUAGE_MODEL_OF

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    def norm_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Of the norms' weights in a model of `dtype`, which might not hold what is added to one."""
        return torch.float32 if self.norm_adds_one else dtype

    @property
    def context_limit(self) -> int:
        """Tokens that the rope scaling was made for."""
        if self.rope.rope_type == "yarn":
            return max(self.max_position_embeddings, int(self.rope.original_max_position_embeddings * self.rope.factor))
        counts_scaling = self.sliding_rope is not None  # Gemma 3's max_position_embeddings
        if self.rope.rope_type in ("linear", "dynamic") and not counts_scaling:
            return int(self.max_position_embeddings * self.rope.factor)
        return self.max_position_embeddings

    def experts_of(self, layer: int) -> ExpertsConfig | None:
        """None where the layer's MLP is dense."""
        return self.experts if self.experts is not None and layer in self.experts.layers else None

    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """(in, out) of every projection that plain LoRA may target, by module path below the model; the experts' are
        not among them, see expert_shapes()."""
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
        """(in, out) of each expert's projections; empty without experts."""
        if self.experts is None:
            return {}
        hidden, inner = self.hidden_size, self.experts.intermediate_size
        return {"gate_proj": (hidden, inner), "up_proj": (hidden, inner), "down_proj": (inner, hidden)}


def read_model_config(folder: Path) -> ModelConfig:
    """Raises ConfigError where the folder or file is missing or damaged, UnsupportedModel naming what is not done."""
    if not folder.is_dir():
        raise ConfigError(f"model {str(folder)!r} is not a folder; give a local Hugging Face checkpoint.", "model")
    raw = read_json(folder / "config.json")
    names = raw.get("architectures") or []
    if len(names) != 1 or names[0] not in (*FAMILIES, *LANGUAGE_MODEL_OF):
        raise UnsupportedModel(
            f"architecture {', '.join(map(str, names)) or 'missing'} in {folder / 'config.json'} is not supported; "
            f"supported are {', '.join(sorted((*FAMILIES, *LANGUAGE_MODEL_OF)))}.",
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
        raise UnsupportedModel(f"hidden_act={_activation(raw)!r} is not supported for experts; silu is.")
    generation = folder / "generation_config.json"
    eos = (read_json(generation) if generation.exists() else {}).get("eos_token_id", raw.get("eos_token_id"))
    vocab_size = integer(raw, "vocab_size", 32000)
    num_heads = integer(raw, "num_attention_heads", 32)
    hidden = integer(raw, "hidden_size", 4096)
    head_dim = raw.get("head_dim") or family.default_head_dim or hidden // num_heads
    kv_heads = raw.get("num_key_value_heads", family.default_kv_heads) or num_heads
    if num_heads % kv_heads:
        raise UnsupportedModel(f"num_attention_heads={num_heads} is no multiple of num_key_value_heads={kv_heads}.")
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
                f"eos_token_id={token!r} of generation_config.json or config.json is no token of the model; its "
                f"vocabulary has ids 0 to {vocab_size - 1}. Correct the file.",
                "model",
            )
    return tuple(ids)


def _refuse_options(raw: dict[str, Any]) -> None:
    if _activation(raw) not in ACTIVATIONS:
        raise UnsupportedModel(f"hidden_act={_activation(raw)!r} is not supported; {', '.join(ACTIVATIONS)} are.")
    if raw.get("use_bidirectional_attention"):
        raise UnsupportedModel("use_bidirectional_attention is not supported; models that generate do not have it.")


def _activation(raw: dict[str, Any]) -> str:
    """Gemma's configs name it twice, and the first is what counts."""
    return str(raw.get("hidden_activation") or raw.get("hidden_act") or "silu")


def _dtype(raw: dict[str, Any]) -> torch.dtype | None:
    name = raw.get("dtype") or raw.get("torch_dtype")
    if name is None:
        return None
    if name not in DTYPES:
        raise UnsupportedModel(f"config.json's dtype {name!r} is not supported; {', '.join(DTYPES)} are.")
    return DTYPES[name]
