"""Divides a module of transformers among ranks: its experts, its tables, and what it knows of its attention.

adapted_modules.py has the linears, which adapters change.
"""

# E experts · W this rank's part of the vocabulary

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lorafleet.protocol.errors import UnsupportedModel
from lorafleet.workers.models.generic.attention_probe import probe
from lorafleet.workers.models.generic.generic_shard import GenericShard
from lorafleet.workers.models.generic.module_paths import engine_path
from lorafleet.workers.tp.group import TPGroup


def check_division(empty: Any, shard: GenericShard) -> None:
    """Raises UnsupportedModel unless the module runs with the heads of one rank. Divides `empty`, which must be on the
    meta device and have weights that are not used otherwise."""
    config = shard.whole
    divide_attention(empty, shard)
    _divide_experts(empty, shard)
    for path, module in list(empty.named_modules()):
        name = engine_path(path)
        if name in config.linears and name not in config.plan.gathered:
            [rows] = shard.outputs(name)
            columns, has_bias = shard.input(name), module.bias is not None
            with torch.device("meta"):
                local = nn.Linear(columns.stop - columns.start, rows.stop - rows.start, has_bias, dtype=torch.bfloat16)
            parent, _, leaf = path.rpartition(".")
            setattr(empty.get_submodule(parent), leaf, local)
    found = probe(empty, f"{config.architecture} with tensor_parallel_size={shard.size}", config.context_limit)
    if found.attention != shard.local.attention:
        raise UnsupportedModel(
            f"{config.architecture} cannot be divided among {shard.size} ranks: its module attends with "
            f"{found.attention.num_heads} query heads and {found.attention.num_kv_heads} KV heads where "
            f"{shard.local.attention.num_heads} and {shard.local.attention.num_kv_heads} were expected.",
            "tensor_parallel_size",
        )


def divide_attention(model: Any, shard: GenericShard) -> None:
    """Corrects the number of query heads for each KV head, which transformers' own attention reads."""
    local = shard.local.attention
    for path in local.modules:
        module = model.get_submodule(path)
        if hasattr(module, "num_key_value_groups"):
            module.num_key_value_groups = local.num_heads // local.num_kv_heads


def divide_experts(model: Any, shard: GenericShard, group: TPGroup) -> None:
    """Leaves the rank its part of every expert's intermediate size. Outputs are summed over the ranks."""
    for module in _divide_experts(model, shard):
        module.register_forward_hook(lambda _module, _inputs, output: group.all_reduce(output))


def _divide_experts(model: Any, shard: GenericShard) -> list[nn.Module]:
    found = []
    for path, styles in shard.whole.plan.experts.items():
        module = model.get_submodule(path)
        for name, style in styles.items():
            whole = getattr(module, name)
            own = nn.Parameter(_part_of_experts(whole.data, style, shard), requires_grad=False)
            setattr(module, name, own)
        found.append(module)
    return found


def _part_of_experts(whole_EOD: Tensor, style: str, shard: GenericShard) -> Tensor:
    """Returns this rank's rows or columns of all experts' matrices [E, out, in]. Two matrices are packed in one if the
    style says so."""
    if style == "rowwise":
        return whole_EOD.chunk(shard.size, dim=2)[shard.rank].clone()
    matrices = whole_EOD.chunk(2, dim=1) if style == "packed_colwise" else (whole_EOD,)
    return torch.cat([matrix.chunk(shard.size, dim=1)[shard.rank] for matrix in matrices], dim=1)


def divide_tables(embedding: nn.Embedding, head: nn.Linear, shard: GenericShard) -> None:
    """Leaves the rank its rows of both tables, with zeros where the vocabulary ends. Tied tables stay one tensor."""
    is_tied = head.weight is embedding.weight
    embedding.weight = _own_rows(embedding.weight, shard)
    head.weight = embedding.weight if is_tied else _own_rows(head.weight, shard)
    if head.bias is not None:
        head.bias = _own_rows(head.bias, shard)


def _own_rows(table: Tensor, shard: GenericShard) -> nn.Parameter:
    own = table.data[shard.vocabulary]
    part = own.new_zeros(shard.vocab_per_rank, *table.shape[1:])
    part[: len(own)] = own
    return nn.Parameter(part, requires_grad=False)
