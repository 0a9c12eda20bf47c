"""Names, shapes and values of the tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch

from lorafleet.protocol.errors import AdapterMalformed, AdapterMismatch, AdapterUnsupported
from tests.workers.adapters.bad_adapters.damage import Q0, Case, Damage, config_has


def tensor_is(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Damage:
    return lambda a: a.map(lambda k, v: (k, change(v) if k == f"{Q0}.{name}" else v))


def without(part: str) -> Damage:
    return lambda a: a.write({k: v for k, v in a.tensors.items() if part not in k})


def with_tensor(name: str, *shape: int) -> Damage:
    return lambda a: a.write(a.tensors | {name: torch.ones(shape)})


def renamed(old: str, new: str) -> Damage:
    return lambda a: a.map(lambda k, v: (k.replace(old, new), v))


CASES: dict[str, Case] = {
    "magnitude vector": (
        with_tensor(f"{Q0}.lora_magnitude_vector", 32),
        AdapterMalformed,
        "magnitude_vector' does not",
    ),
    "tensors of another method": (with_tensor(f"{Q0}.hada_w1_a", 32, 4), AdapterUnsupported, "LoHa"),
    "embedding LoRA": (
        with_tensor("base_model.model.model.embed_tokens.lora_embedding_A", 4, 64),
        AdapterMalformed,
        "embed_tokens",
    ),
    "head of another size": (with_tensor("base_model.model.lm_head.weight", 64, 16), AdapterMismatch, "lm_head"),
    "head alone resized": (with_tensor("base_model.model.lm_head.weight", 70, 32), AdapterMalformed, "saved whole"),
    "LoRA on the head": (with_tensor("base_model.model.lm_head.lora_A.weight", 4, 32), AdapterMalformed, "lm_head"),
    "norm that is not saved": (with_tensor("base_model.model.model.norm.weight", 32), AdapterMalformed, "for norm"),
    "linear that is not saved": (with_tensor(f"{Q0}.weight", 32, 32), AdapterMalformed, "q_proj.weight"),
    "saved bias": (with_tensor(f"{Q0}.base_layer.bias", 32), AdapterMalformed, "base_layer.bias"),
    "bias on B": (with_tensor(f"{Q0}.lora_B.bias", 32), AdapterMalformed, "lora_B.bias"),
    "mlx tensors": (renamed(".lora_A.weight", ".lora_a"), AdapterUnsupported, "mlx"),
    "tensor name of megabytes": (with_tensor("a." * 3_000_000 + "weight", 1), AdapterMalformed, "6000006 characters"),
    "unknown tensor": (with_tensor("surprise", 1), AdapterMalformed, "'surprise'"),
    "unknown infix": (renamed("lora_A.weight", "lora_A.other.weight"), AdapterUnsupported, "lora_A.other"),
    "two names for one": (with_tensor(f"{Q0}.lora_A.default.weight", 4, 32), AdapterMalformed, "are both lora_A"),
    "A without B": (without("layers.1.self_attn.q_proj.lora_B"), AdapterMalformed, "without lora_B"),
    "B without A": (without("layers.1.self_attn.q_proj.lora_A"), AdapterMalformed, "without lora_A"),
    "no tensors": (without("lora"), AdapterMalformed, "no tensors"),
    "missing module": (without("layers.2.self_attn.v_proj"), AdapterMalformed, "targets layers.2.self_attn.v_proj"),
    "stray modules": (config_has(target_modules=["q_proj"]), AdapterMalformed, "layers.0.self_attn.v_proj"),
    "head targeted, not saved": (
        config_has(target_modules=["q_proj", "v_proj", "lm_head"]),
        AdapterMalformed,
        "lm_head",
    ),
    "layer of a larger model": (renamed("layers.2.", "layers.40."), AdapterMismatch, "layers.40"),
    "module of another family": (renamed("q_proj", "query_key_value"), AdapterMismatch, "query_key_value"),
    "experts": (renamed("self_attn.q_proj", "mlp.experts.0.w1"), AdapterMismatch, "mlp.experts.0.w1"),
    "ranks of A and B differ": (tensor_is("lora_B.weight", lambda t: t[:, :3]), AdapterMalformed, "rank 3 in lora_B"),
    "wrong input size": (tensor_is("lora_A.weight", lambda t: t[:, :16]), AdapterMismatch, "[4, 16]"),
    "wrong output size": (tensor_is("lora_B.weight", lambda t: t.repeat(2, 1)), AdapterMismatch, "[64, 4]"),
    "transposed": (lambda a: a.map(lambda k, v: (k, v.T)), AdapterMismatch, "transposed"),
    "vector for a matrix": (tensor_is("lora_A.weight", lambda t: t[0]), AdapterMalformed, "must be a matrix"),
    "ZeRO-3": (tensor_is("lora_A.weight", lambda _: torch.empty(0)), AdapterMalformed, "ZeRO-3"),
    "integers": (tensor_is("lora_A.weight", lambda t: t.to(torch.int32)), AdapterUnsupported, "I32"),
    "float8": (tensor_is("lora_A.weight", lambda t: t.to(torch.float8_e4m3fn)), AdapterUnsupported, "F8_E4M3"),
    "NaN": (tensor_is("lora_A.weight", lambda t: t.index_fill(1, torch.tensor(5), torch.nan)), AdapterMalformed, "NaN"),
    "infinity": (tensor_is("lora_B.weight", lambda t: t / 0), AdapterMalformed, "infinite"),
    "NaN in float16": (
        lambda a: a.map(lambda k, v: (k, v.to(torch.float16).index_fill(1, torch.tensor(0), torch.nan))),
        AdapterMalformed,
        "NaN",
    ),
    "values that no float32 holds": (
        tensor_is("lora_A.weight", lambda t: t.double() * 1e300),
        AdapterMalformed,
        "overflow",
    ),
    "no rows": (tensor_is("lora_A.weight", lambda t: t[:0]), AdapterMalformed, "must be a matrix"),
    "a number for a matrix": (tensor_is("lora_A.weight", lambda t: t.sum()), AdapterMalformed, "must be a matrix"),
    "many dimensions": (
        tensor_is("lora_A.weight", lambda t: t.reshape(*[1] * 60, *t.shape)),
        AdapterMalformed,
        "must be a matrix",
    ),
    "a name of a million characters": (with_tensor("a" * 10**6, 1), AdapterMalformed, "aaa…"),
    "a name with control characters": (with_tensor("\x1b[2J\x00", 1), AdapterMalformed, "\\x1b[2J\\x00"),
    "a name that climbs": (with_tensor("../../../etc/passwd", 1), AdapterMalformed, "not one that PEFT writes"),
}
