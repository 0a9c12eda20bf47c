"""Checks pairs of A and B by their shapes and joins several pairs into one, for kinds whose form is A and B."""

# R rank · D in features · O out features

from __future__ import annotations

import torch

from lorafleet.protocol.errors import AdapterMalformed, AdapterMismatch
from lorafleet.protocol.strict_json import shown
from lorafleet.workers.adapters.forms import LowRank
from lorafleet.workers.adapters.kinds.kind import GATHER, Target


def matrix(target: Target, leaf: str) -> tuple[int, int]:
    shape = target.shape_of(leaf)
    if len(shape) != 2 or 0 in shape:
        name = target.tensors.get(leaf, leaf)
        raise AdapterMalformed(f"the tensor {shown(name)} has shape {shown(list(shape))}; it must be a matrix.")
    return shape[0], shape[1]


def check_pair(target: Target, a_leaf: str, b_leaf: str, rank: int) -> int:
    """Checks that A is [rank, D] and B is [O, rank], and returns the rank. Errors say how the two disagree."""
    a, b = matrix(target, a_leaf), matrix(target, b_leaf)
    if (a[1], b[0]) != target.shape:
        _check_not_sliced(target, a, b)
        raise _other_base(target, a, b)
    names = a_leaf.removesuffix(".weight"), b_leaf.removesuffix(".weight")
    if a[0] != b[1]:
        raise AdapterMalformed(
            f"{target.module} has rank {a[0]} in {names[0]} {list(a)} and rank {b[1]} in {names[1]} {list(b)}."
        )
    if a[0] != rank:
        raise AdapterMalformed(
            f"{target.module} has rank {a[0]} in the weights, but {rank} in adapter_config.json (r, rank_pattern)."
        )
    return rank


def _check_not_sliced(target: Target, a: tuple[int, int], b: tuple[int, int]) -> None:
    """Raises AdapterMalformed for the part of A's and B's rows that one process of a sharded training holds."""
    inputs, outputs = target.shape
    if (a[1], b[1]) == (inputs, target.rank) and a[0] < target.rank and b[0] < outputs:
        raise AdapterMalformed(
            f"{target.module} has lora_A {list(a)} and lora_B {list(b)}, where [{target.rank}, {inputs}] and "
            f"[{outputs}, {target.rank}] are needed: one process of a sharded training (FSDP2) saved its own slices. "
            f"{GATHER}"
        )


def _other_base(target: Target, a: tuple[int, int], b: tuple[int, int]) -> AdapterMismatch:
    inputs, outputs = target.shape
    transposed = (a[0], b[1]) == target.shape and a[1] == b[0]
    hint = (
        "Its matrices are transposed, as mlx-lm writes them: convert them to PEFT's layout."
        if transposed
        else "The adapter was made for another model."
    )
    return AdapterMismatch(
        f"{target.module} has lora_A {list(a)} and lora_B {list(b)}; {target.base.named} has {inputs} inputs and "
        f"{outputs} outputs there, so A must be [r, {inputs}] and B [{outputs}, r]. {hint}"
    )


def joined(*pairs: LowRank) -> LowRank:
    """Returns the sum of the pairs as one pair of small numbers.

    Parts that nearly cancel must not be left to the rounding of the serving dtype. The sum is therefore factored
    anew, into as many columns. A and B each get the square root of each singular value.
    """
    a_RD = torch.cat([pair.a_RD.double() for pair in pairs])
    b_OR = torch.cat([pair.scaling * pair.b_OR.double() for pair in pairs], dim=1)
    q_OR, left_RR = torch.linalg.qr(b_OR)
    q_DR, right_RR = torch.linalg.qr(a_RD.T)
    u_RR, s_R, v_RR = torch.linalg.svd(left_RR @ right_RR.T, full_matrices=False)
    root_R = s_R.sqrt()
    return LowRank((root_R.unsqueeze(1) * (v_RR @ q_DR.T)).float(), ((q_OR @ u_RR) * root_R).float())
