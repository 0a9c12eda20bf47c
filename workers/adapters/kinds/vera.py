"""Turns VeRA adapters into low-rank forms. The update is diag(b) B diag(d) A, where b and d are trained.

A and B are random and shared by all modules. Each module takes the first columns of A and the first rows of B.
Without save_projection they are not in the file. PEFT then generates them from projection_prng_key with torch's CPU
generator, and so does this module.
Source: arXiv 2310.11454; PEFT 0.21's vera/model.py.
"""

# R rank · D in features · O out features

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from lorafleet.protocol.errors import AdapterMalformed, AdapterUnsupported
from lorafleet.protocol.strict_json import shown
from lorafleet.protocol.yield_gil import yielding_gil
from lorafleet.workers.adapters.forms import AdapterForms, LinearForm, LowRank
from lorafleet.workers.adapters.kinds.kind import Kind, Target
from lorafleet.workers.adapters.kinds.pairs import matrix
from lorafleet.workers.adapters.peft_helper import PEFTHelper

A, B = "vera_A", "vera_B"
LAMBDA_B, LAMBDA_D = "vera_lambda_b", "vera_lambda_d"


def check(target: Target) -> int:
    target.expect_leaves(LAMBDA_B, LAMBDA_D)
    inputs, outputs = target.shape
    target.expect(LAMBDA_B, outputs)
    target.expect(LAMBDA_D, target.rank)
    if (A in target.shared) != (B in target.shared) or (A in target.shared) != _saves_projection(target.helper):
        raise AdapterMalformed(
            "the weights file must have vera_A and vera_B if save_projection is true, and neither of them otherwise."
        )
    if A in target.shared:
        a, b = matrix(target, A), matrix(target, B)
        if a[0] != target.rank or b[1] != target.rank or a[1] < inputs or b[0] < outputs:
            raise AdapterMalformed(
                f"vera_A {list(a)} and vera_B {list(b)} do not cover {target.module}, which needs rank {target.rank}, "
                f"{inputs} inputs and {outputs} outputs."
            )
    return target.rank


def _saves_projection(helper: PEFTHelper) -> bool:
    return "save_projection" not in helper.fields or helper.flag("save_projection")


def forms(targets: Sequence[Target]) -> AdapterForms:
    first = targets[0]
    if A in first.shared:
        a_RD, b_OR = first.value(A), first.value(B)
    else:
        a_RD, b_OR = _made_again(targets)
    linears = {}
    for target in yielding_gil(targets):
        inputs, outputs = target.shape
        own_a_RD = target.float32(LAMBDA_D).unsqueeze(1) * a_RD[:, :inputs].float()
        own_b_OR = target.float32(LAMBDA_B).unsqueeze(1) * b_OR[:outputs].float()
        linears[target.module] = LinearForm(LowRank(own_a_RD, own_b_OR))
    return AdapterForms(linears)


def _made_again(targets: Sequence[Target]) -> tuple[Tensor, Tensor]:
    """Returns A and B by PEFT's kaiming_uniform, A first, by one generator, as large as the largest module needs."""
    key, rank = targets[0].helper.integer("projection_prng_key", 0), targets[0].rank
    generator = torch.Generator("cpu").manual_seed(key)
    a_RD = _kaiming(generator, rank, max(target.shape[0] for target in targets))
    return a_RD, _kaiming(generator, max(target.shape[1] for target in targets), rank)


def _kaiming(generator: torch.Generator, rows: int, columns: int) -> Tensor:
    bound = math.sqrt(3.0) * (math.sqrt(2.0) / math.sqrt(columns))
    return torch.empty(rows, columns).uniform_(-bound, bound, generator=generator)


def _check_left_out(left_out: Collection[str], shared: Collection[str]) -> None:
    if left_out and A not in shared:
        raise AdapterUnsupported(
            f"the tensor {shown(next(iter(left_out)))} belongs to a part for pictures or sound, whose sizes count for "
            "the random numbers of this VeRA. Save it with save_projection=True, or train it on the language model "
            "alone."
        )


VERA = Kind("VeRA", (LAMBDA_B, LAMBDA_D), check, forms, (A, B), check_left_out=_check_left_out)
