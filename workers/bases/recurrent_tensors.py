"""Says which tensors of a checkpoint fill a recurrent layer, besides those of its linears."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lorafleet.workers.bases.checkpoint_model import CheckpointModel
from lorafleet.workers.bases.layer_config import DeltaNetConfig
from lorafleet.workers.bases.projection import Units
from lorafleet.workers.bases.recurrence_config import Mamba2Config, ShortConvConfig
from lorafleet.workers.bases.tensor_parts import ModelPart, PlainPart
from lorafleet.workers.models.delta_net import DeltaNet
from lorafleet.workers.models.mamba2 import Mamba2
from lorafleet.workers.models.short_conv import ShortConv
from lorafleet.workers.tp.shard import Shard


def recurrent_parts(model: CheckpointModel) -> dict[str, ModelPart]:
    """Returns the parts of every recurrent layer, by the names of the checkpoint's tensors."""
    return {
        f"model.layers.{i}.{name}": part
        for i, layer in model.recurrences().items()
        for name, part in _parts(layer, model.shard, i).items()
    }


def _parts(layer: DeltaNet | Mamba2 | ShortConv, shard: Shard, index: int) -> dict[str, ModelPart]:
    """Returns the parts of one layer by their names below it."""
    whole = shard.whole.layers[index].recurrence
    if isinstance(layer, DeltaNet):
        assert isinstance(whole, DeltaNetConfig)
        values = Units(whole.num_v_heads)
        is_apart = whole.layout == "apart"
        parts = _three_convs(shard, layer, whole) if is_apart else {}
        if not is_apart:
            parts["conv1d.weight"] = _conv(shard, whole.conv_units, layer.conv_CK, None)["weight"]
        parts |= {
            "o_norm.weight" if is_apart else "norm.weight": PlainPart(
                layer.norm_V.data, [(slice(0, whole.v_dim),)], [whole.v_dim]
            ),
            "A_log": _vector(shard, values, layer.a_log_H),
            "dt_bias": _vector(shard, values, layer.dt_bias_H),
        }
        return {f"linear_attn.{name}": part for name, part in parts.items()}
    if isinstance(layer, Mamba2):
        assert isinstance(whole, Mamba2Config)
        heads = Units(whole.num_heads)
        conv = _conv(shard, whole.conv_units, layer.conv_CK, layer.conv_bias_C)
        parts = {f"conv1d.{leaf}": part for leaf, part in conv.items()} | {
            "A_log": _vector(shard, heads, layer.a_log_H),
            "dt_bias": _vector(shard, heads, layer.dt_bias_H),
            "D": _vector(shard, heads, layer.d_H),
        }
        if layer.norm_GW is not None:
            parts["norm.weight"] = _vector(shard, whole.inner, layer.norm_GW.view(-1))
        return {f"mamba.{name}": part for name, part in parts.items()}
    assert isinstance(whole, ShortConvConfig)
    conv = _conv(shard, whole.conv_units, layer.conv_CK, layer.conv_bias_C)
    return {f"conv.conv.{leaf}": part for leaf, part in conv.items()}


def _three_convs(shard: Shard, layer: DeltaNet, whole: DeltaNetConfig) -> dict[str, PlainPart]:
    """Returns the parts of the convolutions of queries, keys and values."""
    rows_of = layer.conv_CK.split([units.total for units in layer.config.conv_units])
    return {
        f"{name}_conv1d.weight": _conv(shard, [units], rows_CK, None)["weight"]
        for name, units, rows_CK in zip("qkv", whole.conv_units, rows_of, strict=True)
    }


def _vector(shard: Shard, units: Units, held: Tensor) -> PlainPart:
    return PlainPart(held.data, [(shard.own(units),)], [units.total])


def _conv(shard: Shard, channels: Sequence[Units], weight_CK: Tensor, bias_C: Tensor | None) -> dict[str, PlainPart]:
    """Returns the parts of a convolution over these channels, one after another."""
    own: list[slice] = []
    total, taps = 0, weight_CK.shape[1]
    for units in channels:
        of_rank = shard.own(units)
        own.append(slice(total + of_rank.start, total + of_rank.stop))
        total += units.total
    places = [(rows, slice(0, 1), slice(0, taps)) for rows in own]
    parts = {"weight": PlainPart(weight_CK.data.unsqueeze(1), list(places), [total, 1, taps])}
    if bias_C is not None:
        parts["bias"] = PlainPart(bias_C.data, [(rows,) for rows in own], [total])
    return parts
