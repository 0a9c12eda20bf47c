"""Makes random EAGLE-3 heads, and computes their drafts in plain torch as the paper says."""

# T tokens · D hidden size

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

HIDDEN, HEADS, KV_HEADS, INNER, VOCAB, DRAFTED = 64, 4, 2, 96, 320, 200
HEAD_DIM = 32
EPS = 1e-5


def make_head(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """Writes a head for the tiny Llamas, with the names that its authors' checkpoints have."""
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "num_hidden_layers": 1,
        "max_position_embeddings": 64,
        "rms_norm_eps": EPS,
        "rope_theta": 10000.0,
        "vocab_size": VOCAB,
        "draft_vocab_size": DRAFTED,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config | changes))
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * 0.2

    chosen = torch.randperm(VOCAB, generator=generator)[:DRAFTED].sort().values
    tensors = {
        "fc.weight": random(HIDDEN, 3 * HIDDEN),
        "lm_head.weight": random(DRAFTED, HIDDEN),
        "norm.weight": 1 + random(HIDDEN),
        "midlayer.input_layernorm.weight": 1 + random(HIDDEN),
        "midlayer.hidden_norm.weight": 1 + random(HIDDEN),
        "midlayer.post_attention_layernorm.weight": 1 + random(HIDDEN),
        "midlayer.self_attn.q_proj.weight": random(HEADS * HEAD_DIM, 2 * HIDDEN),
        "midlayer.self_attn.k_proj.weight": random(KV_HEADS * HEAD_DIM, 2 * HIDDEN),
        "midlayer.self_attn.v_proj.weight": random(KV_HEADS * HEAD_DIM, 2 * HIDDEN),
        "midlayer.self_attn.o_proj.weight": random(HIDDEN, HEADS * HEAD_DIM),
        "midlayer.mlp.gate_proj.weight": random(INNER, HIDDEN),
        "midlayer.mlp.up_proj.weight": random(INNER, HIDDEN),
        "midlayer.mlp.down_proj.weight": random(HIDDEN, INNER),
        "d2t": chosen - torch.arange(DRAFTED),
        "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, chosen, True),
    }
    save_file(tensors, folder / "model.safetensors")
    return folder


class EagleReference:
    """Drafts from a transformers model's hidden states."""

    def __init__(self, folder: Path, *, norms_residual: bool = False) -> None:
        self._tensors = load_file(folder / "model.safetensors")
        self._norms_residual = norms_residual

    @torch.no_grad()
    def drafts(self, target: PreTrainedModel, tokens: list[int], count: int) -> list[int]:
        """Returns the tokens that the head drafts behind these."""
        decoder = target.get_base_model() if hasattr(target, "get_base_model") else target
        states = target(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        num_layers = decoder.config.num_hidden_layers
        taps = [states[layer][0] for layer in (2, num_layers // 2, num_layers - 3)]
        features_TD = F.linear(torch.cat(taps, dim=1), self._tensors["fc.weight"])[:-1]
        found: list[int] = []
        for _ in range(count):
            embedded_TD = decoder.get_input_embeddings()(torch.tensor([*tokens[1:], *found]))
            hidden_TD = self._layer(embedded_TD, features_TD)
            last_D = F.rms_norm(hidden_TD[-1], (HIDDEN,), self._tensors["norm.weight"], EPS)
            drafted = int(F.linear(last_D, self._tensors["lm_head.weight"]).argmax())
            found.append(drafted + int(self._tensors["d2t"][drafted]))
            features_TD = torch.cat([features_TD, hidden_TD[-1:]])
        return found

    def _layer(self, embedded_TD: Tensor, features_TD: Tensor) -> Tensor:
        """Returns the hidden states before the last norm."""
        normed_TD = self._norm(features_TD, "hidden_norm")
        x_TD = torch.cat([self._norm(embedded_TD, "input_layernorm"), normed_TD], dim=1)
        hidden_TD = (normed_TD if self._norms_residual else features_TD) + self._attention(x_TD)
        x_TD = self._norm(hidden_TD, "post_attention_layernorm")
        gated_TI = F.silu(self._linear(x_TD, "mlp.gate_proj")) * self._linear(x_TD, "mlp.up_proj")
        return hidden_TD + self._linear(gated_TI, "mlp.down_proj")

    def _attention(self, x_TD: Tensor) -> Tensor:
        q, k, v = (
            self._linear(x_TD, f"self_attn.{name}_proj").unflatten(1, (-1, HEAD_DIM)).transpose(0, 1) for name in "qkv"
        )
        k, v = (part.repeat_interleave(HEADS // KV_HEADS, dim=0) for part in (k, v))
        scores = _rotated(q) @ _rotated(k).transpose(1, 2) / math.sqrt(HEAD_DIM)
        scores += torch.full(scores.shape[1:], float("-inf")).triu(1)
        return self._linear((scores.softmax(-1) @ v).transpose(0, 1).flatten(1), "self_attn.o_proj")

    def _linear(self, x_TD: Tensor, name: str) -> Tensor:
        return F.linear(x_TD, self._tensors[f"midlayer.{name}.weight"])

    def _norm(self, x_TD: Tensor, name: str) -> Tensor:
        return F.rms_norm(x_TD, (HIDDEN,), self._tensors[f"midlayer.{name}.weight"], EPS)


def _rotated(x_HTP: Tensor) -> Tensor:
    frequency_F = 10000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angle_TF = torch.arange(x_HTP.shape[1])[:, None] * frequency_F
    cos, sin = angle_TF.cos().repeat(1, 2), angle_TF.sin().repeat(1, 2)
    first, second = x_HTP.chunk(2, dim=-1)
    return x_HTP * cos + torch.cat([-second, first], dim=-1) * sin
