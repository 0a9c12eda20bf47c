"""Penalties for tokens that a sequence has already. The kernel in draw_tokens_triton.py has the same rule.

Source: `repetition_penalty` is that of CTRL (arXiv 1909.05858); the other two are those of OpenAI's API.
"""

# V vocabulary

from __future__ import annotations

import torch
from torch import Tensor

IN_PROMPT = 1 << 30  # bit that is set in the count of a prompt token; answers are far shorter


def penalize(logits_V: Tensor, count_V: Tensor, repetition: float, presence: float, frequency: float) -> None:
    """Changes the float32 logits in place. `count_V` is int32: how often the answer has each token, with the bit
    IN_PROMPT if the prompt has it."""
    num_shared = min(len(logits_V), len(count_V))
    logits_V, count_V = logits_V[:num_shared], count_V[:num_shared]
    repeated_V = torch.where(logits_V > 0, logits_V / repetition, logits_V * repetition)
    generated_V = count_V & (IN_PROMPT - 1)
    before_V = torch.where(count_V > 0, repeated_V, logits_V)
    penalty_V = torch.where(generated_V > 0, generated_V * frequency + presence, 0.0)
    logits_V.copy_(before_V - penalty_V)
