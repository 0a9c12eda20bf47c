"""Adapters of other kinds than LoRA, and LoRA with more than A and B."""

from __future__ import annotations

import json
from typing import Any

import torch

from lorafleet.protocol.errors import AdapterMalformed, AdapterMismatch, AdapterTooLarge, RankTooLarge
from tests.workers.adapters.bad_adapters.damage import SLOW_REGEX, Case, Damage, config_has, joined, parted


def kind_is(method: str, tensors: dict[str, Any], target: str = "layers.0.self_attn.q_proj", **config: Any) -> Damage:
    """An adapter of another method on one module, [32, 32]. tensors: by leaf, of a shape or with values."""

    def damage(a: Any) -> None:
        fields = {"peft_type": method, "task_type": "CAUSAL_LM", "target_modules": [target], **config}
        (a.path / "adapter_config.json").write_text(json.dumps(fields))
        module = f"base_model.model.model.{target}"
        named = {
            leaf if leaf.startswith("base_model") else f"{module}.{leaf}": (
                value if isinstance(value, torch.Tensor) else torch.ones(value)
            )
            for leaf, value in tensors.items()
        }
        a.write(named)

    return damage


def loha(r: int, **config: Any) -> Damage:
    leaves = {"hada_w1_a": (32, r), "hada_w1_b": (r, 32), "hada_w2_a": (32, r), "hada_w2_b": (r, 32)}
    return kind_is("LOHA", leaves, r=config.pop("said_r", r), **config)


def dora(magnitude: torch.Tensor) -> Damage:
    leaves = {"lora_A.weight": (4, 32), "lora_B.weight": (32, 4), "lora_magnitude_vector": magnitude}
    return kind_is("LORA", leaves, r=4, lora_alpha=8, use_dora=True)


def vera(r: int, **config: Any) -> Damage:
    leaves = {"vera_lambda_b": (32,), "vera_lambda_d": (config.pop("kept", r),)}
    return kind_is("VERA", leaves, r=r, save_projection=False, **config)


def adalora(pattern: Any, rank: int = 4, **config: Any) -> Damage:
    leaves = {"lora_A": (rank, 32), "lora_B": (32, rank), "lora_E": (rank, 1)}
    name = "model.layers.0.self_attn.q_proj.lora_E"
    return kind_is("ADALORA", leaves, lora_alpha=8, rank_pattern={name: pattern}, **({"init_r": 4} | config))


def with_tokens(tokens: Any, *shape: int) -> Damage:
    """LoRA with trained tokens of the embedding."""

    def damage(a: Any) -> None:
        a.set(trainable_token_indices=tokens)
        rows = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"
        a.write(a.tensors | {rows: torch.ones(shape)})

    return damage


def vast_tables(a: Any) -> None:
    """Sixty million tokens, in a file of holes."""
    a.set(modules_to_save=["embed_tokens", "lm_head"])
    path = a.path / "adapter_model.safetensors"
    header, body = parted(path.read_bytes())
    end = len(body)
    for name in ("model.embed_tokens", "lm_head"):
        entry = {"dtype": "F32", "shape": [60_000_000, 32], "data_offsets": [end, end + 60_000_000 * 128]}
        header[f"base_model.model.{name}.weight"] = entry
        end = entry["data_offsets"][1]
    with path.open("wb") as file:
        file.write(joined(header, body))
        file.truncate(len(joined(header)) + end)


CASES: dict[str, Case] = {
    "LoHa whose rank squared is too large": (
        loha(100),
        RankTooLarge,
        "10000 (the rank at which LoHa with r=100",
    ),
    "LoHa of rank 10^9": (loha(4, said_r=10**9), AdapterMismatch, "hada_w1_a"),
    "LoHa without a factor": (
        kind_is("LOHA", {"hada_w1_a": (32, 4), "hada_w1_b": (4, 32), "hada_w2_a": (32, 4)}, r=4),
        AdapterMalformed,
        "hada_w2_b",
    ),
    "LoHa of rank 0": (loha(1, said_r=0), AdapterMalformed, "r is 0"),
    "LoKr of other sizes": (
        kind_is("LOKR", {"lokr_w1": (7, 7), "lokr_w2": (5, 5)}, r=4),
        AdapterMismatch,
        "Kronecker product is [35, 35]",
    ),
    "LoKr of a vast product": (
        kind_is("LOKR", {"lokr_w1": (2000, 2000), "lokr_w2": (2000, 2000)}, r=4),
        AdapterMismatch,
        "[4000000, 4000000]",
    ),
    "LoKr of nothing": (
        kind_is("LOKR", {"lokr_w1": (0, 4), "lokr_w2": (8, 8)}, r=4),
        AdapterMalformed,
        "must be a matrix",
    ),
    "LoKr with both a factor and its parts": (
        kind_is("LOKR", {"lokr_w1": (4, 4), "lokr_w1_a": (4, 4), "lokr_w1_b": (4, 4), "lokr_w2": (8, 8)}, r=4),
        AdapterMalformed,
        "lokr_w1_a",
    ),
    "VeRA of rank 10^9": (vera(10**9, kept=8), AdapterMismatch, "vera_lambda_d"),
    "VeRA of rank 10^6 in truth": (vera(10**6), RankTooLarge, "has rank 1000000"),
    "VeRA with a key of 2^70": (vera(8, projection_prng_key=2**70), AdapterMalformed, "projection_prng_key"),
    "VeRA with a negative key": (vera(8, projection_prng_key=-1), AdapterMalformed, "projection_prng_key"),
    "VeRA whose projections are too small": (
        kind_is(
            "VERA",
            {
                "vera_lambda_b": (32,),
                "vera_lambda_d": (8,),
                "base_model.vera_A": (8, 16),
                "base_model.vera_B": (16, 8),
            },
            r=8,
        ),
        AdapterMalformed,
        "do not cover",
    ),
    "AdaLoRA with a long mask": (adalora([True] * 5), AdapterMalformed, "list of 4 booleans"),
    "AdaLoRA with a mask of numbers": (adalora([1, 1, 1, 1]), AdapterMalformed, "list of 4 booleans"),
    "AdaLoRA whose mask keeps less": (adalora([True, False, False, False]), AdapterMismatch, "require [1, 32]"),
    "AdaLoRA of rank 10^9": (adalora(None, init_r=10**9), AdapterMismatch, "[1000000000, 32]"),
    "AdaLoRA of rank 0": (adalora(None, init_r=0), AdapterMalformed, "init_r is 0"),
    "DoRA with NaN": (dora(torch.full((32,), torch.nan)), AdapterMalformed, "NaN"),
    "DoRA with infinities": (dora(torch.full((32,), -torch.inf)), AdapterMalformed, "infinite"),
    "DoRA of another size": (dora(torch.ones(16)), AdapterMismatch, "lora_magnitude_vector"),
    "IA3, turned": (
        kind_is("IA3", {"ia3_l": (1, 32)}, feedforward_modules=[]),
        AdapterMismatch,
        "ia3_l [1, 32]",
    ),
    "IA3 of many dimensions": (
        kind_is("IA3", {"ia3_l": (32, 1, 1)}, feedforward_modules=[]),
        AdapterMismatch,
        "ia3_l [32, 1, 1]",
    ),
    "IA3 by a slow expression": (
        kind_is("IA3", {"ia3_l": (32, 1)}, feedforward_modules=SLOW_REGEX),
        AdapterMalformed,
        "backtracking",
    ),
    "a negative token": (with_tokens([-1], 1, 32), AdapterMalformed, "token"),
    "a token twice": (with_tokens([5, 5], 2, 32), AdapterMalformed, "without duplicates"),
    "a token beyond the vocabulary": (with_tokens([10**9], 1, 32), AdapterMalformed, "token 1000000000"),
    "fewer rows than tokens": (with_tokens([5, 6], 1, 32), AdapterMismatch, "require [2, 32]"),
    "tables of sixty million tokens": (vast_tables, AdapterTooLarge, "60000000 tokens"),
    "aLoRA beyond the vocabulary": (config_has(alora_invocation_tokens=[64]), AdapterMismatch, "tokens 0 to 63"),
    "aLoRA with a negative token": (config_has(alora_invocation_tokens=[-1]), AdapterMalformed, "list of token ids"),
}
