"""Tokens' own vectors for the tests of the kernels that read a linear's output: some have one, some share it, some have
none. Addresses are of the device's memory, or of the host's under Triton's interpreter."""

# T tokens · O size of a vector

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class OwnVectors:
    """address_T: int64, 0 for none. value_TO: float32, `absent` for none. held: what lies at the addresses."""

    address_T: Tensor
    value_TO: Tensor
    held: list[Tensor]


def own_vectors(num_tokens: int, size: int, absent: float, device: str = "cpu", seed: int = 0) -> OwnVectors:
    generator = torch.Generator().manual_seed(seed)
    held = [(1 + torch.randn(size, generator=generator) / 2).to(device) for _ in range(3)]
    choice_T = torch.randint(-1, len(held), (num_tokens,), generator=generator).tolist()
    address_T = torch.tensor([0 if c < 0 else held[c].data_ptr() for c in choice_T], device=device)
    none_O = torch.full((size,), absent, device=device)
    return OwnVectors(address_T, torch.stack([none_O if c < 0 else held[c] for c in choice_T]), held)


@dataclass(frozen=True)
class OwnAffine:
    """affine_2T: as kernels/lora/linear_output.py has it."""

    affine_2T: Tensor
    scale: OwnVectors
    bias: OwnVectors

    def of(self, y_TO: Tensor, delta_TO: Tensor | None = None) -> Tensor:
        """What a reader must take y and delta for, in float64."""
        total_TO = y_TO.double() if delta_TO is None else y_TO.double() + delta_TO.double()
        return self.scale.value_TO.double() * total_TO + self.bias.value_TO.double()


def own_affine(num_tokens: int, size: int, device: str = "cpu", seed: int = 0) -> OwnAffine:
    """Tokens with a scale alone, a bias alone, both and neither."""
    scale = own_vectors(num_tokens, size, 1.0, device, seed)
    bias = own_vectors(num_tokens, size, 0.0, device, seed + 1)
    return OwnAffine(torch.stack([scale.address_T, bias.address_T]), scale, bias)
