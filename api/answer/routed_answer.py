"""Writes the experts of an answer's tokens, for requests with `return_routed_experts`.

/generate has SGLang's form: base64 of int32 numbers. The other routes have vLLM's: base64 of a .npy file of uint8, or
of uint16 if there are more than 256 experts. The shape of both is [tokens, layers, experts a token]. The tokens are
those of prompt and answer but for the last, which has not been computed.
"""

# T tokens · L layers · K experts a token

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lorafleet.protocol.errors import InvalidRequest
from lorafleet.protocol.limits import MAX_ROUTED_BYTES
from lorafleet.protocol.messages import EngineHello, RoutedShape

BYTES_PER_VALUE = 256  # Bytes of experts that take no longer to write than one logprob.

Rows = np.ndarray[tuple[int, int, int], np.dtype[Any]]


@dataclass(slots=True)
class RoutedAnswer:
    """The experts that have been received for one sample so far."""

    shape: RoutedShape
    received: bytearray = field(default_factory=bytearray)

    def rows(self, num_tokens: int) -> Rows:
        """Returns the experts of at most so many tokens, uint8 or uint16 [T, L, K]."""
        dtype = np.dtype(np.uint8 if self.shape.itemsize == 1 else np.uint16)
        rows = np.frombuffer(self.received, dtype).reshape(-1, self.shape.num_layers, self.shape.per_token)
        return rows[:num_tokens]

    def as_vllm(self, num_tokens: int) -> str:
        file = io.BytesIO()
        np.save(file, self.rows(num_tokens), allow_pickle=False)
        return base64.b64encode(file.getvalue()).decode()

    def as_sglang(self, num_tokens: int) -> str:
        return base64.b64encode(self.rows(num_tokens).astype(np.int32).tobytes()).decode()


def check_routed(hello: EngineHello, lengths: Sequence[int]) -> RoutedShape:
    """Returns the shape of the experts of a token. `lengths` are the largest lengths of prompt and answer together, of
    all samples of a request. Raises InvalidRequest if the experts cannot be returned."""
    if hello.routed is None:
        raise InvalidRequest(
            "`return_routed_experts` needs a base with experts, on a server that was started with "
            "--enable-return-routed-experts; leave it out.",
            "return_routed_experts",
        )
    shape = hello.routed
    num_bytes = sum(lengths) * shape.num_layers * shape.per_token * shape.itemsize
    if num_bytes > MAX_ROUTED_BYTES:
        raise InvalidRequest(
            f"`return_routed_experts` would return up to {num_bytes} bytes for {sum(lengths)} tokens of prompts and "
            f"answers; at most {MAX_ROUTED_BYTES} are allowed in one request. Lower max_tokens or n.",
            "return_routed_experts",
        )
    return shape
