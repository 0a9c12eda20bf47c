"""Describes a checkpoint's rotary position embedding, and which cached keys it allows to reuse.

models/rope.py computes the angles, and names the sources.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Literal

RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """The rope settings of a model. rope_type "default" uses only theta and rotary_dim.

    Each of the other fields belongs to one or more scalings.
    """

    rotary_dim: int  # the first rotary_dim numbers of each head are rotated
    theta: float
    max_position_embeddings: int
    rope_type: RopeType = "default"
    factor: float = 1.0  # default: the scaling that theta includes already, as HunYuan's alpha
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
    turning_pairs: int = 0  # proportional: the first pairs, which turn; the others have the frequency 0
    is_local: bool = False  # of layers with a window, which rope scaling leaves alone even if theta is the same
    is_interleaved: bool = False  # pairs are neighbors (2i, 2i + 1); else they are (i, i + rotary_dim / 2)

    @property
    def depends_on_length(self) -> bool:
        """Whether a token's angles depend on the length of its sequence, once that is past the trained length."""
        return self.rope_type in ("dynamic", "longrope")

    def turns_anew(self, num_rotated: int, num_tokens: int) -> bool:
        """Returns whether a sequence must be computed again from its beginning.

        The sequence has num_tokens tokens, of which the first num_rotated were a prompt. Past the trained length,
        longrope rotates all keys differently.
        """
        return self.rope_type == "longrope" and num_rotated <= self.original_max_position_embeddings < num_tokens

    def key_variant(self, num_rotated: int, num_tokens: int) -> Hashable:
        """Returns the variant of a sequence's keys. The arguments are those of turns_anew.

        The same tokens at the same positions have the same keys if their variants are equal.
        """
        if self.rope_type == "dynamic" and num_tokens > self.max_position_embeddings:
            return num_rotated
        return self.rope_type == "longrope" and num_tokens > self.original_max_position_embeddings
