"""What a checkpoint says of its rotary position embedding, and what follows for keys that are used again.

models/rope.py computes the angles, and names the sources.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Literal

RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """rope_type "default" uses theta and rotary_dim alone; the other fields are each scaling's own.

    rotary_dim: how many of a head's numbers are rotated, the first ones.
    """

    rotary_dim: int
    theta: float
    max_position_embeddings: int
    rope_type: RopeType = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    @property
    def depends_on_length(self) -> bool:
        """Past the trained length a token's angles depend on how long its sequence is."""
        return self.rope_type in ("dynamic", "longrope")

    def turns_anew(self, num_rotated: int, num_tokens: int) -> bool:
        """Whether a sequence of num_tokens, of which the first num_rotated were a prompt, must be computed from its
        beginning again: longrope turns all keys otherwise past the trained length."""
        return self.rope_type == "longrope" and num_rotated <= self.original_max_position_embeddings < num_tokens

    def key_variant(self, num_rotated: int, num_tokens: int) -> Hashable:
        """Keys of the same tokens at the same places are the same if this is: of a sequence as in turns_anew."""
        if self.rope_type == "dynamic" and num_tokens > self.max_position_embeddings:
            return num_rotated
        return self.rope_type == "longrope" and num_tokens > self.original_max_position_embeddings
