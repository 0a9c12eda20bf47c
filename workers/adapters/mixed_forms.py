"""Mixes several plain LoRAs into one whose ranks lie side by side.

The mix adds the sum of weight_i * scaling_i * B_i A_i, as PEFT's add_weighted_adapter(combination_type="cat") does.
"""

# R LoRA rank · D in features · O out features

from __future__ import annotations

from collections.abc import Sequence

import torch

from lorafleet.protocol.errors import AdapterUnsupported, RankTooLarge
from lorafleet.protocol.lora_request import LoRAPart
from lorafleet.workers.adapters.forms import BASE_ROPE, AdapterForms, LinearForm, LowRank


def mix(parts: Sequence[tuple[LoRAPart, AdapterForms]], max_rank: int) -> AdapterForms:
    """Returns the forms of one adapter that mixes several.

    Raises AdapterUnsupported naming a part that is more than plain LoRA, and RankTooLarge if the sum of the ranks on
    one module is over max_rank.
    """
    for part, forms in parts:
        _check_plain(part.lora.lora_name, forms)
    modules = dict.fromkeys(module for _, forms in parts for module in forms.linears)
    left_out = sorted({part for _, forms in parts for part in forms.left_out})
    linears = {module: LinearForm(_stacked(module, parts, max_rank)) for module in modules}
    return AdapterForms(linears, left_out=tuple(left_out))


def _check_plain(name: str, forms: AdapterForms) -> None:
    others = {
        "changes the embedding": forms.embedding is not None,
        "changes the head": forms.head is not None,
        "changes the experts of a mixture": bool(forms.experts),
        "replaces norms": bool(forms.norms),
        "has a classification head": forms.classifier is not None,
        "has a rope scaling or a context length of its own": forms.own_rope != BASE_ROPE,
        "takes effect only from its invocation tokens on (aLoRA)": bool(forms.invocation_tokens),
        "scales or replaces outputs (DoRA, IA3, biases)": any(
            form.out_scale_O is not None or form.bias_O is not None for form in forms.linears.values()
        ),
        "is a Kronecker product (LoKr)": any(form.kronecker is not None for form in forms.linears.values()),
    }
    for what, is_so in others.items():
        if is_so:
            raise AdapterUnsupported(f"adapter {name!r} {what}; only plain LoRA can be mixed.", "model")


def _stacked(module: str, parts: Sequence[tuple[LoRAPart, AdapterForms]], max_rank: int) -> LowRank:
    present = [
        (part, form.low_rank)
        for part, forms in parts
        if (form := forms.linears.get(module)) is not None and form.low_rank is not None
    ]
    rank = sum(low_rank.rank for _, low_rank in present)
    if rank > max_rank:
        ranks = " + ".join(f"{low_rank.rank} ({part.lora.lora_name})" for part, low_rank in present)
        raise RankTooLarge(
            f"the mix has rank {ranks} = {rank} on {module}; this server allows lora.max_lora_rank={max_rank}. "
            f"Raise lora.max_lora_rank to {rank} and restart, or mix adapters of smaller ranks."
        )
    # The weights go into B, which is scaled in float32 and rounded once, to the serving dtype.
    a_RD = torch.cat([low_rank.a_RD.float() for _, low_rank in present])
    b_OR = torch.cat([low_rank.b_OR.float() * (part.weight * low_rank.scaling) for part, low_rank in present], dim=1)
    return LowRank(a_RD, b_OR)
