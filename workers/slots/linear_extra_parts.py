"""Converts the extras of linears and norms from a LoRAModel's parts to an ExtraBlock's tensors. From these it makes
the tables' addresses and the torch twin's tensors.

A packed linear has one vector for the scale of all its slices' outputs, and one for the bias. The GEMM adds the base's
bias before the scale is applied. The bias vector makes up for that: bias - scale * the base's bias.
"""

# O outputs · P slices · V rows of the tables

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from lorafleet.kernels.extras.extra_tables import ExtraTables, Int64s
from lorafleet.kernels.extras.kronecker import RECORD_FIELDS, KroneckerPart
from lorafleet.kernels.extras.linear_extras import LinearExtras
from lorafleet.protocol.yield_gil import yielding_gil
from lorafleet.workers.slots.base_parts import BasePart, BaseParts
from lorafleet.workers.slots.expert_extras import expert_tensors, write_addresses
from lorafleet.workers.slots.extra_block import ExtraBlock, Extras
from lorafleet.workers.slots.layer_weights import AffineWeights
from lorafleet.workers.slots.lora_model import LoRAModel
from lorafleet.workers.slots.vocab_extras import record_address


def extra_tensors(model: LoRAModel, base: BaseParts) -> Extras:
    """Returns all tensors that the adapter has for linears, norms and experts besides A and B."""
    tensors: dict[str, Tensor] = {}
    for i, part in yielding_gil(enumerate(base.linears)):
        tensors |= _affine(i, part, [model.affines.get(name) for name in part.names])
        tensors |= _kroneckers(i, [model.kroneckers.get(name) for name in part.names])
    norms = {_norm(i): model.norms[name] for i, name in enumerate(base.norms) if name in model.norms}
    tensors |= {name: weight_D + base.norm_added for name, weight_D in norms.items()}
    return {**tensors, **expert_tensors(model, base)}


def address_rows(extra: ExtraBlock, base: BaseParts, tables: ExtraTables) -> Int64s:
    """Returns the addresses that ExtraTables.write_slot takes, [V]. The extras must lie where they are used."""
    address_V = np.zeros(tables.num_rows, np.int64)
    address_V[tables.embedding_row] = record_address(extra)
    for i in range(len(base.linears)):
        row = tables.affine_row(i)
        address_V[row], address_V[row + 1] = extra.address(_scale(i)), extra.address(_bias(i))
        address_V[tables.kronecker_row(i)] = extra.address(_record(i))
    for i in range(len(base.norms)):
        address_V[tables.norm_row(i)] = extra.address(_norm(i))
    write_addresses(extra, base, tables, address_V)
    return address_V


def linear_extras(extra: ExtraBlock, linear: int) -> LinearExtras | None:
    """Returns the extras of one packed linear, or None if the adapter has none there."""
    scale_O, bias_O, record_PF = extra.get(_scale(linear)), extra.get(_bias(linear)), extra.get(_record(linear))
    parts: list[KroneckerPart | None] = []
    for p, record_F in enumerate(() if record_PF is None else record_PF):
        w1, w2 = extra.get(_w1(linear, p)), extra.get(_w2(linear, p))
        if w1 is None or w2 is None:
            parts.append(None)
        else:
            parts.append(KroneckerPart(w1, w2, record_F[6:7].view(torch.float32)[0].item()))
    if scale_O is None and bias_O is None and not parts:
        return None
    return LinearExtras(scale_O, bias_O, tuple(parts))


def norm_weight(extra: ExtraBlock, norm: int) -> Tensor | None:
    return extra.get(_norm(norm))


def _affine(linear: int, part: BasePart, slices: list[AffineWeights | None]) -> dict[str, Tensor]:
    sizes = part.place.sizes
    bases = [None] * len(sizes) if part.bias_O is None else part.bias_O.split(sizes)
    scales, biases = [], []
    for own, base_O, size in zip(slices, bases, sizes, strict=True):
        scale_O = None if own is None else own.scale_O
        bias_O = base_O if own is None or own.bias_O is None else own.bias_O
        if base_O is not None and bias_O is not None:
            bias_O = bias_O - (base_O if scale_O is None else scale_O * base_O)
        scales.append(torch.ones(size) if scale_O is None else scale_O)
        biases.append(torch.zeros(size) if bias_O is None else bias_O)
    has_scale = any(own is not None and own.scale_O is not None for own in slices)
    found = {}
    if has_scale:
        found[_scale(linear)] = torch.cat(scales)
    if any(bias_O.any() for bias_O in biases):
        found[_bias(linear)] = torch.cat(biases)
    return found


def _kroneckers(linear: int, slices: list[KroneckerPart | None]) -> Mapping[str, Tensor]:
    """Returns the tensors with the record first, since its offsets are relative to its own address."""
    if all(own is None for own in slices):
        return {}
    record_PF = torch.zeros(len(slices), RECORD_FIELDS, dtype=torch.int64)
    tensors = {_record(linear): record_PF}
    for p, own in enumerate(slices):
        if own is not None:
            tensors |= {_w1(linear, p): own.w1, _w2(linear, p): own.w2}
    offsets = ExtraBlock.offsets(tensors)
    for p, own in enumerate(slices):
        if own is not None:
            (o1, d1), (o2, d2) = own.w1.shape, own.w2.shape
            places = offsets[_w1(linear, p)], offsets[_w2(linear, p)]
            record_PF[p, :6] = torch.tensor([*places, o1, d1, o2, d2])
            record_PF[p, 6:7].view(torch.float32)[0] = own.scale
    return tensors


def _scale(linear: int) -> str:
    return f"linear {linear} scale"


def _bias(linear: int) -> str:
    return f"linear {linear} bias"


def _record(linear: int) -> str:
    return f"linear {linear} kronecker"


def _w1(linear: int, p: int) -> str:
    return f"linear {linear} slice {p} w1"


def _w2(linear: int, p: int) -> str:
    return f"linear {linear} slice {p} w2"


def _norm(norm: int) -> str:
    return f"norm {norm}"
