"""Names the weights that sampled each token of an answer, for requests with `return_weight_versions`.

The spans have the form of vLLM's `weight_versions`, and the digest besides.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from lorafleet.protocol.lora_request import LoRARequest
from lorafleet.protocol.messages import WeightSwitch


@dataclass(slots=True)
class WeightSpans:
    """The spans of one sequence, by the index of its generated tokens."""

    lora: LoRARequest | None  # The version that the request found; None for the base model.
    switches: list[WeightSwitch] = field(default_factory=list)

    @property
    def last(self) -> LoRARequest | None:
        """The version that sampled the last token."""
        return self.switches[-1].lora if self.switches else self.lora

    def spans(self, num_tokens: int) -> list[dict[str, object]]:
        """Returns the JSON of the spans of an answer with so many tokens, which may be fewer than were sampled."""
        starts = [0, *(switch.start for switch in self.switches)]
        loras = [self.lora, *(switch.lora for switch in self.switches)]
        ends = [*starts[1:], num_tokens]
        return [
            {**named(lora), "start": start, "end": min(end, num_tokens)}
            for lora, start, end in zip(loras, starts, ends, strict=True)
            if start < min(end, num_tokens)
        ]


def named(lora: LoRARequest | None) -> dict[str, object]:
    """Returns the version and digest of an adapter. The base model has neither, and a mix has no version."""
    if lora is None:
        return {"version": None, "digest": None}
    return {"version": str(lora.version) if lora.version else None, "digest": lora.digest}
