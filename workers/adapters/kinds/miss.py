"""Turns MiSS adapters into low-rank forms. Input d is added to sum d mod r, and a matrix [r, O] maps the r sums.

A therefore consists of zeros and ones, and B is that matrix. With init_weights="mini" its columns repeat. "bat" is
rejected: it multiplies W by blocks, which is not a low-rank update.
Source: arXiv 2409.15371; PEFT 0.21's miss/layer.py.
"""

# R rank · D in features · O out features

from __future__ import annotations

import torch

from lorafleet.protocol.errors import AdapterMalformed, AdapterUnsupported
from lorafleet.protocol.strict_json import shown
from lorafleet.workers.adapters.forms import LinearForm, LowRank
from lorafleet.workers.adapters.kinds.kind import Kind, Target, each
from lorafleet.workers.adapters.peft_helper import PEFTHelper

BLOCK = "miss_block"


def check_config(helper: PEFTHelper) -> None:
    init = helper.fields.get("init_weights", True)
    if init == "bat":
        raise AdapterUnsupported(
            "MiSS with init_weights='bat' is not supported: it multiplies W by blocks, which is not a low-rank update."
        )
    if not isinstance(init, bool) and init != "mini":
        raise AdapterMalformed(f"init_weights is {shown(init)}; PEFT's MiSS accepts true, false, 'bat' and 'mini'.")


def _is_mini(helper: PEFTHelper) -> bool:
    return helper.fields.get("init_weights") == "mini"


def check(target: Target) -> int:
    target.expect_leaves(BLOCK)
    inputs, outputs = target.shape
    width = outputs
    if _is_mini(target.helper):
        width = target.helper.integer("mini_r", 1)
        if width < 1 or outputs % width:
            raise AdapterMalformed(f"{target.module}: mini_r={width} does not divide its {outputs} outputs.")
    if target.rank > inputs:
        raise AdapterMalformed(f"{target.module} has rank {target.rank} but only {inputs} inputs.")
    target.expect(BLOCK, target.rank, width)
    return target.rank


def form(target: Target) -> LinearForm:
    inputs, outputs = target.shape
    block_RO = target.value(BLOCK)
    if _is_mini(target.helper):
        block_RO = block_RO.repeat(1, outputs // block_RO.shape[1])
    a_RD = torch.zeros(target.rank, inputs)
    place_D = torch.arange(inputs)
    a_RD[place_D % target.rank, place_D] = 1.0
    return LinearForm(LowRank(a_RD, block_RO.T.contiguous()))


MISS = Kind("MiSS", (BLOCK,), check, each(form), (), check_config)
