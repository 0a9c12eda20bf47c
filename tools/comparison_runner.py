"""Defines what a comparison needs from whatever runs the models: this process's own engine (engine_runner.py) or a
server (server_runner.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from lorafleet.protocol.messages import TokenLogprobs
from lorafleet.tools.examples import Example

BASE = "base"


class Runner(Protocol):
    """Runs the models of a comparison. A model's name is BASE, or an adapter's name in the comparison. Errors are
    LorafleetErrors."""

    def encode(self, example: Example) -> list[int]:
        """Returns the prompt's tokens. Messages go through the base's chat template. For a text without a prompt,
        these are only the tokens that precede it."""
        ...

    def encode_answer(self, text: str) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...

    def generate(self, name: str, prompts: Sequence[list[int]], max_tokens: int) -> list[list[int]]:
        """Returns the tokens of a greedy answer to each prompt."""
        ...

    def score(self, name: str, sequences: Sequence[list[int]], top_k: int) -> list[list[TokenLogprobs | None]]:
        """Returns each token's logprob given the tokens before it, with the k best tokens there. It is None for the
        first token."""
        ...

    def close(self) -> None: ...
