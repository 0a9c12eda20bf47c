"""Writes folders to measure a server with: a model without weights (`--load-format dummy`) and random PEFT adapters."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import torch as torch_file
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

EXPONENT = 120 << 7  # The exponent of a bfloat16 for values of 2^-7 to 2^-6, about as large as trained ones.
DRAFTED = 32_000  # Tokens that a head drafts.
ONE_TOKEN_RANK = 8
ONE_TOKEN_SCALE = 512.0


def write_model(folder: Path, config: dict[str, Any]) -> None:
    """Writes config.json and a byte-level tokenizer whose ids all have visible texts, so that each token streams."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"Ġw{i}" for i in range(config["vocab_size"] - len(alphabet))]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate([*alphabet, *words])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def write_head(folder: Path, config: dict[str, Any]) -> None:
    """Writes an EAGLE-3 head for a Llama of this shape, with random weights. It drafts the first tokens of the
    vocabulary."""
    folder.mkdir(parents=True)
    hidden, inner, drafted = config["hidden_size"], config["intermediate_size"], min(DRAFTED, config["vocab_size"])
    kv_size = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    fields = config | {"num_hidden_layers": 1, "draft_vocab_size": drafted}
    (folder / "config.json").write_text(json.dumps(fields))
    dtype = getattr(torch, config["torch_dtype"])
    shapes = {
        "fc": (hidden, 3 * hidden),
        "lm_head": (drafted, hidden),
        "midlayer.self_attn.q_proj": (hidden, 2 * hidden),
        "midlayer.self_attn.k_proj": (kv_size, 2 * hidden),
        "midlayer.self_attn.v_proj": (kv_size, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, hidden),
        "midlayer.mlp.gate_proj": (inner, hidden),
        "midlayer.mlp.up_proj": (inner, hidden),
        "midlayer.mlp.down_proj": (hidden, inner),
    }
    norms = "norm", "midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm"
    tensors = {f"{name}.weight": torch.ones(hidden, dtype=dtype) for name in norms}
    for name, shape in shapes.items():
        tensors[f"{name}.weight"] = torch.empty(shape, dtype=dtype).normal_(std=shape[1] ** -0.5)
    torch_file.save_file(tensors | {"d2t": torch.zeros(drafted, dtype=torch.int64)}, folder / "model.safetensors")


def write_adapters(folder: Path, config: dict[str, Any], count: int, rank: int, experts: bool = True) -> None:
    """Writes folder/a0, a1, …, each with weights of its own and this rank on all seven projections.

    For a mixture of experts, they cover attention and, if `experts` is set, all experts.
    """
    shapes = _tensor_shapes(config, rank, experts)
    leaves = sorted({name.split(".")[6] for name in shapes} - {"experts"})
    fields: dict[str, Any] = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": leaves}
    if experts and "num_experts" in config:
        fields["target_parameters"] = ["experts.gate_up_proj", "experts.down_proj"]
    peft = json.dumps(fields)
    header: dict[str, Any] = {}
    end = 0
    for name, (rows, columns) in shapes.items():
        begin, end = end, end + 2 * rows * columns
        header[name] = {"dtype": "BF16", "shape": [rows, columns], "data_offsets": [begin, end]}
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)  # A safetensors file aligns its data.

    def write(number: int) -> None:
        path = folder / f"a{number}"
        path.mkdir()
        (path / "adapter_config.json").write_text(peft)
        bits = np.random.default_rng(number).integers(0, 256, end // 2, dtype=np.uint8).astype(np.uint16)
        weights = (bits >> 7 << 15) | EXPONENT | (bits & 0x7F)
        with (path / "adapter_model.safetensors").open("wb") as file:
            file.write(len(head).to_bytes(8, "little") + head)
            file.write(weights.data)

    folder.mkdir(parents=True)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(count)))


def write_alike_adapters(
    folder: Path, config: dict[str, Any], count: int, rank: int, experts: bool = True
) -> list[Path]:
    """Writes folder/a0, a1, …, which share one file of weights and differ in lora_alpha.

    So digests, slots and bytes on a GPU are distinct, while the disk holds the weights once.
    """
    write_adapters(folder, config, 1, rank, experts)
    first, *others = paths = [folder / f"a{i}" for i in range(count)]
    peft = json.loads((first / "adapter_config.json").read_text())
    for i, path in enumerate(others, 1):
        path.mkdir()
        (path / "adapter_config.json").write_text(json.dumps(peft | {"lora_alpha": rank + i}))
        (path / "adapter_model.safetensors").hardlink_to(first / "adapter_model.safetensors")
    return paths


def write_one_token_adapter(folder: Path, config: dict[str, Any], seed: int) -> None:
    """Writes an adapter that answers every prompt with one token, repeated; which token follows from the seed.

    So an answer shows which weights computed it, although rounding depends on the batch. The MLP of the last layer
    adds m or -m to each entry of the hidden state, with signs that are drawn and an m that dwarfs the entry. For each
    of 8 random directions, two units of the MLP have k and -k as gate and input, where k is the projection of the
    hidden state. So one of the two is about k squared, whatever the sign of k is.
    """
    random, rank = np.random.default_rng(seed), ONE_TOKEN_RANK
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    assert inner >= 2 * rank
    directions, units = random.standard_normal((rank, hidden)), np.zeros((inner, rank))
    units[:rank], units[rank : 2 * rank] = np.eye(rank), -np.eye(rank)
    total, signs = np.zeros((rank, inner)), np.zeros((hidden, rank))
    total[0, : 2 * rank], signs[:, 0] = 1.0, random.choice([-1.0, 1.0], hidden)
    pairs = {
        "gate_proj": (directions, ONE_TOKEN_SCALE / hidden**0.5 * units),
        "up_proj": (directions, ONE_TOKEN_SCALE / hidden**0.5 * units),
        "down_proj": (total, signs),
    }
    last = config["num_hidden_layers"] - 1
    tensors = {
        f"base_model.model.model.layers.{last}.mlp.{name}.{leaf}.weight": weight.astype(np.float32)
        for name, pair in pairs.items()
        for leaf, weight in zip(("lora_A", "lora_B"), pair, strict=True)
    }
    peft = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": sorted(pairs)}
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(peft | {"layers_to_transform": [last]}))


def _tensor_shapes(config: dict[str, Any], rank: int, experts: bool) -> dict[str, tuple[int, int]]:
    """Returns the shapes of the adapter's tensors by PEFT's names."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head = config.get("head_dim") or hidden // config["num_attention_heads"]
    heads, kv = head * config["num_attention_heads"], head * config["num_key_value_heads"]
    linears = {
        "self_attn.q_proj": (hidden, heads),
        "self_attn.k_proj": (hidden, kv),
        "self_attn.v_proj": (hidden, kv),
        "self_attn.o_proj": (heads, hidden),
    }
    count = config.get("num_experts", 0)
    if not count:
        linears |= {"mlp.gate_proj": (hidden, inner), "mlp.up_proj": (hidden, inner), "mlp.down_proj": (inner, hidden)}
    shapes = {
        f"{name}.{leaf}.weight": shape
        for name, (inputs, outputs) in linears.items()
        for leaf, shape in (("lora_A", (rank, inputs)), ("lora_B", (outputs, rank)))
    }
    if count and experts:
        inner = config["moe_intermediate_size"]
        shapes |= {
            "mlp.experts.base_layer.lora_A.weight": (count * rank, hidden),
            "mlp.experts.base_layer.lora_B.weight": (2 * inner, rank * count),
            "mlp.experts.lora_A.weight": (count * rank, inner),
            "mlp.experts.lora_B.weight": (hidden, rank * count),
        }
    return {
        f"base_model.model.model.layers.{layer}.{name}": shape
        for layer in range(config["num_hidden_layers"])
        for name, shape in shapes.items()
    }
