"""A request for several plain LoRAs served as one, unmerged, each with its weight; mixed_forms.py makes what is served.

A mix has a digest of its own, of its parts' digests and weights, so that slots, prefixes and reports know it as they
know an adapter; in whatever order the parts are named, it is the same.
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

SIGN = "+"  # between the names; no adapter's own name has it


def check_count(num_parts: int) -> None:
    if num_parts > MAX_MIXED:
        raise InvalidRequest(f"`model` mixes {num_parts} adapters; at most {MAX_MIXED} can be mixed.", "model")


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
        MIX_WEIGHT.check("lora_weights", weight)
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
