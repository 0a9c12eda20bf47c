"""Stands in for the linears and the embedding in a module of transformers, so that adapters can change them."""

# T tokens · D in or hidden size · O out

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from lorafleet.kernels.extras.affine import apply_affine
from lorafleet.kernels.quant.base_weight import PlainWeight, QuantizedWeight, Scheme
from lorafleet.workers.bases.stored_tensors import TensorInMemory
from lorafleet.workers.bases.tensor_parts import QuantizedPart
from lorafleet.workers.models.generic.generic_shard import GenericShard
from lorafleet.workers.models.generic.step_state import StepState
from lorafleet.workers.models.layers import PackedLinear
from lorafleet.workers.models.linear_weights import LinearWeights
from lorafleet.workers.models.vocab_table import VocabTable
from lorafleet.workers.tp.adapter_sharding import AdapterSharding
from lorafleet.workers.tp.group import TPGroup


@dataclass(frozen=True, slots=True)
class RankExchange:
    """The exchange of the ranks around a linear."""

    group: TPGroup
    own_input: slice | None = None  # This rank's part of an input that is whole; None: the input is the rank's own.
    result: Literal["own", "sum", "gathered"] = "own"  # The output is the rank's own, or the same on all ranks.

    @classmethod
    def of(cls, name: str, shard: GenericShard, group: TPGroup) -> RankExchange:
        """Returns the exchange around the linear with this engine name."""
        is_gathered = name in shard.whole.plan.gathered
        if shard.is_row_parallel(name):
            return cls(group, shard.input(name) if is_gathered else None, "sum")
        return cls(group, result="gathered" if is_gathered else "own")

    def finish(self, y_TO: Tensor) -> Tensor:
        if self.result == "sum":
            return self.group.all_reduce(y_TO)
        if self.result == "gathered":
            return self.group.all_gather(y_TO).transpose(0, 1).flatten(1)
        return y_TO


class AdaptedLinear(nn.Module):
    """A linear that adds the adapters of the step's tokens. Its input has one row for each of them, in their order."""

    def __init__(self, packed: PackedLinear, state: StepState, exchange: RankExchange) -> None:
        super().__init__()
        self.packed = packed
        self._state = state
        self._exchange = exchange

    def forward(self, x: Tensor) -> Tensor:
        x_TD = x.reshape(-1, x.shape[-1])
        if self._exchange.own_input is not None:
            x_TD = x_TD[:, self._exchange.own_input]
        y_TO = apply_affine(self.packed(x_TD.contiguous(), self._state.lora))
        return self._exchange.finish(y_TO).view(*x.shape[:-1], -1)

    @property
    def bias(self) -> Tensor | None:
        """The bias, which some modules look at."""
        return self.packed.bias


class AdaptedEmbedding(nn.Module):
    """An embedding that applies the adapters of the step's tokens. Its input has one row for each of them."""

    def __init__(self, table: VocabTable, state: StepState) -> None:
        super().__init__()
        self.table = table
        self._state = state

    def forward(self, token: Tensor) -> Tensor:
        embedded_TD = self.table.embed(token.flatten(), self._state.lora)
        return self.table.group.all_reduce(embedded_TD).view(*token.shape, -1)

    @property
    def weight(self) -> Tensor:
        """The table, whose dtype some modules look at."""
        return self.table.weight


def packed(
    linear: nn.Linear,
    name: str,
    sharding: AdapterSharding,
    scheme: Scheme | None,
    weights: LinearWeights,
    device: torch.device,
) -> PackedLinear:
    """Returns our linear with this rank's part of the weight and bias of transformers' own. The weight is quantized if
    there is a scheme. `name` is the linear's engine name."""
    values_OD = linear.weight.data
    columns, [rows] = sharding.input(name), sharding.shard.outputs(name)
    num_rows, num_columns = rows.stop - rows.start, columns.stop - columns.start
    made = PackedLinear(num_columns, (num_rows,), False, values_OD.dtype, device, sharding.adds_bias(name))
    if linear.bias is not None:
        made.bias = nn.Parameter(_part(linear.bias.data, rows), requires_grad=False)
    if scheme is None:
        made.weight = PlainWeight(_part(values_OD, rows, columns))
        return made
    made.weight = weights.empty(scheme, num_rows, num_columns, values_OD.dtype)
    held = cast(QuantizedWeight, made.weight)
    whole_shape = list(values_OD.shape)
    part = QuantizedPart(held, scheme, True, device, 0, num_rows, [(rows, columns)], whole_shape)
    part.fill(TensorInMemory(values_OD))
    return made


def _part(whole: Tensor, *places: slice) -> Tensor:
    """Returns a part of a tensor, which does not keep the whole in memory."""
    part = whole[places]
    return whole if part.shape == whole.shape else part.clone()


def replace_module(model: Any, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)
