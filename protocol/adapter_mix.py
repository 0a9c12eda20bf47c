"""Builds the request for several plain LoRAs that are served as one, unmerged, each with its weight.

A mix has a digest of its own, computed from the digests and weights of its parts, so that slots, prefixes and reports
can treat it as an adapter. The order in which the parts are named does not matter. mixed_forms.py builds the served
form.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Sequence
from itertools import pairwise

from lorafleet.protocol.errors import InvalidRequest
from lorafleet.protocol.limits import MAX_MIXED, MIX_WEIGHT
from lorafleet.protocol.lora_request import LoRAPart, LoRARequest

SIGN = "+"  # Separates the names; no adapter's own name contains it.


def check_count(num_parts: int) -> None:
    if num_parts > MAX_MIXED:
        raise InvalidRequest(f"`model` mixes {num_parts} adapters; at most {MAX_MIXED} can be mixed.", "model")


def mixed(loras: Sequence[LoRARequest], weights: Sequence[float] | None) -> LoRARequest:
    """Returns the request for the mix of these adapters. `weights` has one weight per adapter; None means 1 for each.

    Raises InvalidRequest.
    """
    check_count(len(loras))
    weights = [1.0] * len(loras) if weights is None else weights
    if len(weights) != len(loras):
        raise InvalidRequest(
            f"`lora_weights` has {len(weights)} numbers for {len(loras)} adapters in `model`; give one for each.",
            "lora_weights",
        )
    for weight in weights:
        MIX_WEIGHT.check("lora_weights", weight)
    parts = [LoRAPart(lora, float(weight)) for lora, weight in zip(loras, weights, strict=True)]
    parts.sort(key=lambda part: part.lora.digest)
    for part, next_part in pairwise(parts):
        if part.lora.digest == next_part.lora.digest:
            raise InvalidRequest(
                f"`model` mixes {part.lora.lora_name!r} with {next_part.lora.lora_name!r}, which are the same adapter. "
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
        origin=SIGN.join(lora.lora_name for lora in loras),
    )


def _digest(parts: Sequence[LoRAPart]) -> str:
    named = [(part.lora.digest, part.weight.hex()) for part in parts]
    return hashlib.sha256(b"lorafleet mix 1\0" + json.dumps(named).encode()).hexdigest()
