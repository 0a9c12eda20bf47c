"""Computes the row scale of DoRA, which gives each row of W + s B A a trained length m.

The output is y = g * ((W + s B A) x) with g = m / |row|. The bias is added afterwards and is not scaled by g.
Source: arXiv 2402.09353, section 4.3; PEFT 0.21's lora/dora.py.
"""

# R rank · D in features · O out features

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lorafleet.protocol.errors import AdapterMalformed
from lorafleet.workers.adapters.forms import LowRank
from lorafleet.workers.adapters.kinds.kind import on, row_chunks


def row_scale(weight_OD: Tensor, pairs: Sequence[LowRank], magnitude_O: Tensor, module: str) -> Tensor:
    """Returns g as float32 [O] on the CPU, computed on the device of W.

    `pairs` is everything that is added to W. Raises AdapterMalformed if a row of the sum is zero.
    """
    device = weight_OD.device
    factors = [(on(pair.a_RD, device), on(pair.b_OR, device), pair.scaling) for pair in pairs]
    norms = []
    for rows in row_chunks(weight_OD):
        chunk_OD = weight_OD[rows].float()
        for a_RD, b_OR, scaling in factors:
            chunk_OD = torch.addmm(chunk_OD, b_OR[rows], a_RD, alpha=scaling)
        norms.append(torch.linalg.vector_norm(chunk_OD, dim=1))
    scale_O = magnitude_O.float() / torch.cat(norms).cpu()
    if not scale_O.isfinite().all():
        raise AdapterMalformed(
            f"{module}: a row of the base's weight plus LoRA has length zero, and DoRA divides by that length."
        )
    return scale_O
