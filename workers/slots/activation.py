"""Finds the token at which an activated LoRA begins to work.

The tokens before the last invocation in the prompt belong to the base model. Their keys and values are the base's too,
so base requests and other activated adapters share them.

Source: Activated LoRA, arXiv 2504.12397; PEFT's calculate_alora_offsets.
"""

from __future__ import annotations

from collections.abc import Sequence

NEVER = 1 << 62  # later than any token


def first_adapted(prompt: Sequence[int], invocation_tokens: Sequence[int]) -> int:
    """Returns the index of the first token that the adapter works on, or NEVER if its invocation tokens are not in the
    prompt. The whole answer is then the base's, as in PEFT."""
    size, wanted = len(invocation_tokens), list(invocation_tokens)
    starts = range(len(prompt) - size, -1, -1)
    return next((i for i in starts if prompt[i] == wanted[0] and list(prompt[i : i + size]) == wanted), NEVER)
