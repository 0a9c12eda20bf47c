"""What a comparison asks of whatever runs the models: this process's own engine, or a server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from lorafleet.protocol.messages import TokenLogprobs
from lorafleet.tools.examples import Example

BASE = "base"


class Runner(Protocol):
    """Models are named as in the comparison: BASE, or an adapter's name there. Errors are LorafleetErrors."""

    def encode(self, example: Example) -> list[int]:
        """The prompt's tokens, through the base's chat template for messages; of a text alone what stands before it."""
        ...

    def encode_answer(self, text: str) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...

    def generate(self, name: str, prompts: Sequence[list[int]], max_tokens: int) -> list[list[int]]:
        """Greedy answers."""
        ...

    def score(self, name: str, sequences: Sequence[list[int]], top_k: int) -> list[list[TokenLogprobs | None]]:
        """Each token's logprob given those before it, with the k best there; None for the first."""
        ...

    def close(self) -> None: ...
