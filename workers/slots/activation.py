"""Where an activated LoRA begins to work: tokens before the last invocation in the prompt are the base's, and so are
their keys and values, which base requests and other activated adapters share.

Source: Activated LoRA, arXiv 2504.12397; PEFT's calculate_alora_offsets.
"""

from __future__ import annotations

from collections.abc import Sequence

NEVER = 1 << 62  # later than any token


def first_adapted(prompt: Sequence[int], invocation_tokens: Sequence[int]) -> int:
    """The first token that the adapter works on; NEVER where the prompt does not have its invocation tokens, as in
    PEFT: then the whole answer is the base's."""
    size, wanted = len(invocation_tokens), list(invocation_tokens)
    starts = range(len(prompt) - size, -1, -1)
    return next((at for at in starts if prompt[at] == wanted[0] and list(prompt[at : at + size]) == wanted), NEVER)
