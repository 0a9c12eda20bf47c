"""Several plain LoRAs served as one, unmerged: their ranks side by side, each with its weight.

What a mix adds is the sum of weight_i * scaling_i * B_i A_i, as in PEFT's add_weighted_adapter(combination_type="cat").
A mix has a digest of its own, of its parts' digests and weights, so that slots, prefixes and reports know it as they
know an adapter; in whatever order the parts are named, it is the same.
"""

# R LoRA rank · D in features · O out features

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections.abc import Sequence
from itertools import pairwise

import torch

from lorafleet.workers.errors import AdapterUnsupported, InvalidRequest, RankTooLarge
from lorafleet.workers.lora.forms import AdapterForms, LinearForm, LowRank
from lorafleet.workers.lora.request import LoRAPart, LoRARequest

SIGN = "+"  # between the names; no adapter's own name has it
MAX_PARTS = 8
MAX_WEIGHT = 1e4


def check_count(num_parts: int) -> None:
    if num_parts > MAX_PARTS:
        raise InvalidRequest(f"`model` mixes {num_parts} adapters; at most {MAX_PARTS} can be mixed.", "model")


def mixed(loras: Sequence[LoRARequest], weights: Sequence[float] | None) -> LoRARequest:
    """weights: one each; None is 1 for each. Raises InvalidRequest."""
    check_count(len(loras))
    weights = [1.0] * len(loras) if weights is None else weights
    if len(weights) != len(loras):
        raise InvalidRequest(
            f"`lora_weights` has {len(weights)} numbers for {len(loras)} adapters in `model`; give one for each.",
            "lora_weights",
        )
    for weight in weights:
        if not math.isfinite(weight) or abs(weight) > MAX_WEIGHT:
            raise InvalidRequest(
                f"`lora_weights` has {weight!r}; a weight is a finite number of at most {MAX_WEIGHT:g} in magnitude.",
                "lora_weights",
            )
    parts = [LoRAPart(lora, float(weight)) for lora, weight in zip(loras, weights, strict=True)]
    parts.sort(key=lambda part: part.lora.digest)
    for one, other in pairwise(parts):
        if one.lora.digest == other.lora.digest:
            raise InvalidRequest(
                f"`model` mixes {one.lora.lora_name!r} with {other.lora.lora_name!r}, which are the same adapter. "
                "Name it once, with the sum of the weights.",
                "model",
            )
    digest = _digest(parts)
    return LoRARequest(
        lora_name=SIGN.join(lora.lora_name for lora in loras),
        lora_int_id=1 + zlib.crc32(digest.encode()),
        lora_path=" + ".join(lora.lora_path for lora in loras),
        digest=digest,
        base_model_name=loras[0].base_model_name,
        parts=tuple(parts),
    )


def _digest(parts: Sequence[LoRAPart]) -> str:
    named = [(part.lora.digest, part.weight.hex()) for part in parts]
    return hashlib.sha256(b"lorafleet mix 1\0" + json.dumps(named).encode()).hexdigest()


def mix(parts: Sequence[tuple[LoRAPart, AdapterForms]], max_rank: int) -> AdapterForms:
    """One adapter's forms of several's. Raises AdapterUnsupported naming a part that is more than plain LoRA, and
    RankTooLarge where the sum of the ranks on one module is over max_rank."""
    for part, forms in parts:
        _check_plain(part.lora.lora_name, forms)
    modules = dict.fromkeys(module for _, forms in parts for module in forms.linears)
    return AdapterForms({module: LinearForm(_stacked(module, parts, max_rank)) for module in modules})


def _check_plain(name: str, forms: AdapterForms) -> None:
    others = {
        "changes the embedding": forms.embedding is not None,
        "changes the head": forms.head is not None,
        "replaces norms": bool(forms.norms),
        "works only from its invocation tokens on (aLoRA)": bool(forms.invocation_tokens),
        "scales or replaces outputs (DoRA, IA3, biases)": any(
            form.out_scale_O is not None or form.bias_O is not None for form in forms.linears.values()
        ),
        "is a Kronecker product (LoKr)": any(form.kronecker is not None for form in forms.linears.values()),
    }
    for what, is_so in others.items():
        if is_so:
            raise AdapterUnsupported(f"adapter {name!r} {what}, and only plain LoRA can be mixed.", "model")


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
    # B takes the weights: it is scaled in float32 and rounded once, to the serving dtype.
    a_RD = torch.cat([low_rank.a_RD.float() for _, low_rank in present])
    b_OR = torch.cat([low_rank.b_OR.float() * (part.weight * low_rank.scaling) for part, low_rank in present], dim=1)
    return LowRank(a_RD, b_OR)
