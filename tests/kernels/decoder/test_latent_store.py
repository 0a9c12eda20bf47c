from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lorafleet.kernels.decoder.latent_store import store_latent
from lorafleet.kernels.decoder.rms_norm import NormWeight
from lorafleet.kernels.quant.fp8 import FP8
from tests.kernels.harness import poison_free_memory, run_interpreted
from tests.kernels.vector_cases import OwnVectors, own_vectors

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
PAGE, EPS = 16, 1e-3
SIZES = {"even": (32, 8), "odd": (20, 3), "deepseek": (512, 32)}  # numbers of the latent vector, and rotated pairs


@dataclass(frozen=True, slots=True)
class Case:
    """A cache of NaN with places for twice the tokens, and rows that lie in a wider matrix."""

    x_TE: Tensor
    cos: Tensor
    sin: Tensor
    weight: Tensor
    cache: Tensor
    slots: Tensor
    is_interleaved: bool
    scale: float = 1.0
    own: OwnVectors | None = None

    def arguments(self) -> tuple[Any, ...]:
        norm = NormWeight(self.weight, None if self.own is None else self.own.address_T)
        return self.x_TE, self.cos, self.sin, norm, EPS, self.cache, self.slots, self.scale, self.is_interleaved


def make_case(
    num_tokens: int, sizes: tuple[int, int], is_interleaved: bool, dtype: torch.dtype, device: str = "cpu"
) -> Case:
    latent_dim, pairs = sizes
    generator = torch.Generator().manual_seed(num_tokens)
    width, blocks = latent_dim + 2 * pairs, -(-2 * num_tokens // PAGE)
    angle = 100 * torch.rand(num_tokens, 1, pairs, generator=generator)
    return Case(
        x_TE=torch.randn(num_tokens, 5 + width, generator=generator).to(device, dtype)[:, 5:],
        cos=angle.cos().to(device, dtype),
        sin=angle.sin().to(device, dtype),
        weight=torch.randn(latent_dim, generator=generator).to(device, dtype),
        cache=torch.full((blocks, PAGE, 1, width), torch.nan, dtype=dtype, device=device),
        slots=torch.randperm(blocks * PAGE, generator=generator)[:num_tokens].to(device),
        is_interleaved=is_interleaved,
    )


def check(case: Case) -> None:
    """Against complex numbers in float64; places that no token maps to must still hold NaN."""
    latent_dim, pairs = len(case.weight), case.cos.shape[-1]
    latent, key = case.x_TE.double().split((latent_dim, 2 * pairs), dim=1)
    weight = case.weight.double()
    if case.own is not None:
        weight = torch.where(case.own.address_T[:, None] == 0, weight, case.own.value_TO.double())
    latent = latent / (latent.square().mean(1, keepdim=True) + EPS).sqrt() * weight
    halves = (key[:, ::2], key[:, 1::2]) if case.is_interleaved else key.chunk(2, dim=1)
    turned = torch.complex(*halves) * torch.complex(case.cos.double(), case.sin.double())[:, 0]
    key = torch.view_as_real(turned).flatten(1) if case.is_interleaved else torch.cat((turned.real, turned.imag), dim=1)
    stored = case.slots >= 0
    places, want = case.slots[stored], torch.cat((latent, key), dim=1)[stored]
    rows = case.cache.double().flatten(0, 2)
    tolerance = TOLERANCE[case.x_TE.dtype]
    within = {"atol": tolerance, "rtol": tolerance}
    if case.cache.dtype == FP8:  # three bits behind the leading one
        want = want.clamp(-448 * case.scale, 448 * case.scale)
        within = {"atol": tolerance + case.scale / 1024, "rtol": tolerance + 1 / 16}
    torch.testing.assert_close(rows[places] * case.scale, want, **within)
    untouched = torch.ones(len(rows), dtype=torch.bool, device=rows.device).index_fill_(0, places, False)
    assert rows[untouched].isnan().all()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("is_interleaved", [False, True])
def test_on_a_cpu(is_interleaved: bool, dtype: torch.dtype) -> None:
    for sizes in SIZES.values():
        case = make_case(9, sizes, is_interleaved, dtype)
        store_latent(*case.arguments())
        check(case)
        case = replace(make_case(9, sizes, is_interleaved, dtype), scale=0.03)
        case = replace(case, cache=case.cache.to(FP8))
        store_latent(*case.arguments())
        check(case)


def test_interpreted_kernel() -> None:
    run_interpreted("""
        from dataclasses import replace
        import torch
        from lorafleet.kernels.decoder.latent_store_triton import store_latent_triton
        from tests.kernels.decoder.test_latent_store import SIZES, check, make_case
        from tests.kernels.vector_cases import own_vectors

        for sizes in list(SIZES.values())[:2]:
            for is_interleaved in (False, True):
                case = make_case(5, sizes, is_interleaved, torch.float32)
                case.slots[1] = -1
                store_latent_triton(*case.arguments())
                check(case)
            case = replace(make_case(7, sizes, True, torch.float16), own=own_vectors(7, sizes[0], 0.0))
            store_latent_triton(*case.arguments())
            check(case)
    """)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
class TestOnGPU:
    pytestmark = pytest.mark.gpu

    def test_equals_the_formula(self, sizes: str, is_interleaved: bool, dtype: torch.dtype) -> None:
        for num_tokens in (1, 19, 1000):
            case = make_case(num_tokens, SIZES[sizes], is_interleaved, dtype, "cuda")
            own = own_vectors(num_tokens, SIZES[sizes][0], 0.0, "cuda")
            fp8 = replace(case, cache=case.cache.to(FP8), scale=0.03)
            for each in (case, replace(case, own=own, cache=case.cache.clone()), fp8):
                poison_free_memory()
                store_latent(*each.arguments())
                check(each)
