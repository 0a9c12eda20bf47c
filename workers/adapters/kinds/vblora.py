"""Turns VB-LoRA adapters into low-rank forms. A and B are made of short vectors from a bank that all modules share.

Each short vector is a mix of the few best vectors of the bank. The file has a logit for every vector of the bank.
With save_only_topk_weights it has the indices and weights of the best ones instead. The last weight is left out,
since the weights sum to 1.
Source: arXiv 2405.15179; PEFT 0.21's vblora/layer.py.
"""

# R rank · D in features · O out features · L length of a vector · N vectors of the bank · K best ones
# C vectors that make up a row of A or a column of B

from __future__ import annotations

import torch
from torch import Tensor

from lorafleet.protocol.errors import AdapterMalformed
from lorafleet.protocol.strict_json import shown
from lorafleet.workers.adapters.forms import LinearForm, LowRank
from lorafleet.workers.adapters.kinds.kind import Kind, Target, each
from lorafleet.workers.adapters.weight_files import INDEX_DTYPES

A, B, BANK = "vblora_logits_A", "vblora_logits_B", "vblora_vector_bank"
PLACES, WEIGHTS = "_topk_indices", "_topk_weights"
LEAVES = (A + PLACES, A + WEIGHTS, B + PLACES, B + WEIGHTS, A, B)


def check(target: Target) -> int:
    helper, rank = target.helper, target.rank
    inputs, outputs = target.shape
    if BANK not in target.shared:
        raise AdapterMalformed(f"the weights file has no {BANK}, from which VB-LoRA computes its modules.")
    vectors, length = helper.integer("num_vectors", 256), helper.integer("vector_length", 256)
    target.expect(BANK, vectors, length)
    best = _num_best(target)
    if not length or inputs % length or outputs % length or not 1 <= best <= vectors:
        raise AdapterMalformed(
            f"{target.module}: a bank of {vectors} vectors of length {length} with topk={best} does not fit {inputs} "
            f"inputs and {outputs} outputs."
        )
    shapes = {A: (rank, inputs // length), B: (outputs // length, rank)}
    if helper.flag("save_only_topk_weights"):
        target.expect_leaves(*LEAVES[:4])
        for leaf, shape in shapes.items():
            _expect_places(target, leaf + PLACES, (*shape, best))
            target.expect(leaf + WEIGHTS, *shape, best - 1)
    else:
        target.expect_leaves(A, B)
        for leaf, shape in shapes.items():
            target.expect(leaf, *shape, vectors)
    return rank


def _num_best(target: Target) -> int:
    return target.helper.integer("topk", 2)


def _expect_places(target: Target, leaf: str, shape: tuple[int, ...]) -> None:
    info = target.infos[target.tensors[leaf]]
    if info.dtype not in INDEX_DTYPES or info.shape != shape:
        raise AdapterMalformed(
            f"{target.module} has {leaf} of shape {shown(list(info.shape))} and dtype {shown(info.dtype)}; integers of "
            f"shape {list(shape)} are expected."
        )


def form(target: Target) -> LinearForm:
    bank_NL = target.float32(BANK)
    a_RCL = _mixed(target, A, bank_NL)
    b_CRL = _mixed(target, B, bank_NL)
    return LinearForm(LowRank(a_RCL.flatten(1), b_CRL.transpose(1, 2).flatten(0, 1)))


def _mixed(target: Target, leaf: str, bank_NL: Tensor) -> Tensor:
    if target.helper.flag("save_only_topk_weights"):
        place, weight = _stored(target, leaf, bank_NL.shape[0])
    else:
        logits, place = target.float32(leaf).topk(_num_best(target), dim=-1)
        weight = logits.softmax(dim=-1)
    mixed = torch.zeros(*place.shape[:-1], bank_NL.shape[1])
    for k in range(place.shape[-1]):  # not all K at once, which would take K times the memory of A
        mixed += weight[..., k : k + 1] * bank_NL[place[..., k]]
    return mixed


def _stored(target: Target, leaf: str, num_vectors: int) -> tuple[Tensor, Tensor]:
    place = target.value(leaf + PLACES).long()
    if place.min() < 0 or place.max() >= num_vectors:
        raise AdapterMalformed(f"{target.module} has {leaf + PLACES} outside the bank of {num_vectors} vectors.")
    first = target.float32(leaf + WEIGHTS)
    weight = torch.cat([first, 1 - first.sum(-1, keepdim=True)], dim=-1)
    if weight.min() < 0:
        raise AdapterMalformed(f"{target.module} has values in {leaf + WEIGHTS} that are not weights from 0 to 1.")
    # PEFT stores these as logits and selects the best again, which makes their sum 1 within rounding.
    return place, weight / weight.sum(-1, keepdim=True)


VBLORA = Kind("VB-LoRA", LEAVES, check, each(form), (BANK,))
