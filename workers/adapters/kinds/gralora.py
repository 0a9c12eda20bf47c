"""Turns GraLoRA adapters into low-rank forms.

W is divided into k x k blocks, each with its own LoRA of rank r / k. An input block yields r numbers, and each output
block gets r / k of them. The whole update therefore has rank k r, and B contains blocks of zeros. hybrid_r adds a
plain LoRA of that rank.
Source: arXiv 2505.20355; PEFT 0.21's gralora/layer.py.
"""

# N input blocks · Q output blocks · R rank · S r / k · I inputs and O outputs of a block

from __future__ import annotations

import torch
from torch import Tensor

from lorafleet.protocol.errors import AdapterMalformed
from lorafleet.workers.adapters.forms import LinearForm, LowRank
from lorafleet.workers.adapters.kinds.kind import Kind, Target, each

A, B = "gralora_A", "gralora_B"
A_GENERAL, B_GENERAL = "gralora_A_general.weight", "gralora_B_general.weight"


def check(target: Target) -> int:
    k, hybrid_r = target.helper.integer("gralora_k", 2), target.helper.integer("hybrid_r", 0)
    inputs, outputs = target.shape
    if k < 1 or inputs % k or outputs % k or target.rank % k:
        raise AdapterMalformed(
            f"gralora_k={k} does not divide all of the rank {target.rank}, the {inputs} inputs and the {outputs} "
            f"outputs of {target.module}."
        )
    target.expect_leaves(A, B, *((A_GENERAL, B_GENERAL) if hybrid_r else ()))
    target.expect(A, k, inputs // k, target.rank)
    target.expect(B, k, target.rank, outputs // k)
    if hybrid_r:
        target.expect(A_GENERAL, hybrid_r, inputs)
        target.expect(B_GENERAL, outputs, hybrid_r)
    return k * target.rank + hybrid_r


def form(target: Target) -> LinearForm:
    hybrid_r = target.helper.integer("hybrid_r", 0)
    a_RD, b_OR = _whole_a(target.float32(A)), _whole_b(target.float32(B))
    if hybrid_r:
        a_RD = torch.cat([a_RD, target.float32(A_GENERAL)])
        b_OR = torch.cat([b_OR, target.float32(B_GENERAL)], dim=1)
    return LinearForm(LowRank(a_RD, b_OR, target.helper.alpha / (target.rank + hybrid_r)))


def _whole_a(a_NIR: Tensor) -> Tensor:
    whole: Tensor = torch.block_diag(*a_NIR.transpose(1, 2))
    return whole


def _whole_b(b_QRO: Tensor) -> Tensor:
    """Returns B as one matrix, in which output block q reads the q-th part of each input block's numbers."""
    k, rank, outputs = b_QRO.shape
    whole_QONQS = b_QRO.new_zeros(k, outputs, k, k, rank // k)
    for q in range(k):
        whole_QONQS[q, :, :, q] = b_QRO[q].view(k, rank // k, outputs).permute(2, 0, 1)
    return whole_QONQS.view(k * outputs, k * rank)


GRALORA = Kind("GraLoRA", (A, B, A_GENERAL, B_GENERAL), check, each(form))
