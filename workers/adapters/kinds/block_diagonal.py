"""Reads BD-LoRA adapters, in which A or B is block-diagonal. The file stacks its n blocks: [r, D / n] or [O, r / n].

Source: PEFT 0.21's BdLoraLinearVariant.
"""

# R rank · D in features · O out features

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lorafleet.protocol.errors import AdapterMalformed
from lorafleet.protocol.strict_json import shown
from lorafleet.workers.adapters.kinds.kind import Target
from lorafleet.workers.adapters.kinds.pairs import check_pair

_KEYS = {"match_strict", "nblocks", "target_modules_bd_a", "target_modules_bd_b"}


def check(target: Target, a: str, b: str) -> None:
    inputs, outputs = target.shape
    blocks, side = _num_blocks(target), _side(target)
    divided = {"A": inputs, "B": outputs}.get(side)
    if divided is None:
        check_pair(target, a, b, target.rank)
        return
    if divided % blocks or target.rank % blocks:
        raise AdapterMalformed(
            f"{target.module}: nblocks={blocks} of use_bdlora does not divide both the rank {target.rank} and the "
            f"{divided} {'inputs' if side == 'A' else 'outputs'}."
        )
    target.expect(a, target.rank, inputs // blocks if side == "A" else inputs)
    target.expect(b, outputs, target.rank // blocks if side == "B" else target.rank)


def pair(target: Target, a: str, b: str) -> tuple[Tensor, Tensor]:
    side = _side(target)
    a_RD, b_OR = target.value(a), target.value(b)
    if side == "A":
        a_RD = _whole(a_RD, _num_blocks(target))
    elif side == "B":
        b_OR = _whole(b_OR, _num_blocks(target))
    return a_RD, b_OR


def _whole(stacked: Tensor, blocks: int) -> Tensor:
    whole: Tensor = torch.block_diag(*stacked.chunk(blocks))
    return whole


def _config(target: Target) -> Mapping[str, object]:
    config = target.helper.fields.get("use_bdlora")
    if not isinstance(config, dict) or not config.keys() <= _KEYS:
        raise AdapterMalformed(
            f"use_bdlora is {shown(config)}; it must be an object with no other keys than {', '.join(sorted(_KEYS))}."
        )
    return config


def _num_blocks(target: Target) -> int:
    blocks = _config(target).get("nblocks", 1)
    if type(blocks) is not int or blocks < 1:
        raise AdapterMalformed(f"nblocks of use_bdlora is {shown(blocks)}; it must be an integer of at least 1.")
    return blocks


def _side(target: Target) -> str:
    """Returns which matrix is block-diagonal, A or B, or an empty string for neither.

    PEFT searches for the patterns within the last part of the module's name.
    """
    config = _config(target)
    leaf = target.module.rpartition(".")[2]
    sides = [side for side in "AB" if _matches(config.get(f"target_modules_bd_{side.lower()}"), leaf)]
    strict = config.get("match_strict", True)
    if len(sides) > 1 or (strict and not sides):
        raise AdapterMalformed(
            f"{target.module} matches {' and '.join(sides) or 'neither A nor B'} in use_bdlora; it must match "
            f"{'exactly' if strict else 'at most'} one of target_modules_bd_a and target_modules_bd_b."
        )
    return sides[0] if sides else ""


def _matches(patterns: object, leaf: str) -> bool:
    if patterns is None:
        return False
    if not isinstance(patterns, list) or not all(isinstance(pattern, str) for pattern in patterns):
        raise AdapterMalformed(f"use_bdlora has {shown(patterns)} where a list of module names is expected.")
    return any(pattern in leaf for pattern in patterns)
