"""Pairs of neighbors, norms behind the rotation, and heads that are not rotated: the twin against complex numbers, the
kernel against the twin."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lorafleet.kernels.decoder.rope_store import rotate, rotate_and_store
from tests.kernels.decoder.test_rope_store import HEADS, make_case
from tests.kernels.harness import poison_free_memory, run_interpreted

STYLES = [(norms_rotated, is_interleaved) for norms_rotated in (False, True) for is_interleaved in (False, True)]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4e-2}


@pytest.mark.parametrize("pairs", [0, 5, 8])
def test_neighbors_are_the_pairs(pairs: int) -> None:
    generator = torch.Generator().manual_seed(pairs)
    x_THD = torch.randn(3, 2, 16, generator=generator, dtype=torch.float64)
    angle_T1F = torch.rand(3, 1, pairs, generator=generator, dtype=torch.float64)
    turned = torch.view_as_complex(x_THD[..., : 2 * pairs].unflatten(-1, (pairs, 2))) * torch.polar(
        torch.ones_like(angle_T1F), angle_T1F
    )
    want = torch.cat((torch.view_as_real(turned).flatten(-2), x_THD[..., 2 * pairs :]), dim=-1)
    torch.testing.assert_close(rotate(x_THD, angle_T1F.cos(), angle_T1F.sin(), is_interleaved=True), want)


def test_the_norm_stands_before_or_behind_the_rotation() -> None:
    case = make_case(9, HEADS["gqa"], 24, True, torch.float32)
    q_norm, _ = case.norms
    assert q_norm is not None
    q_THD = case.qkv.view(9, -1, 24)[:, :4]

    def normed(x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * q_norm

    before = rotate_and_store(*case.arguments())
    behind = rotate_and_store(*case.arguments(), norms_rotated=True)
    torch.testing.assert_close(before, rotate(normed(q_THD), case.cos, case.sin))
    torch.testing.assert_close(behind, normed(rotate(q_THD, case.cos, case.sin)))


def check_kernel(num_tokens: int, heads: tuple[int, int], head_dim: int, dtype: torch.dtype, device: str) -> None:
    """Compares the kernel with the twin, both in float32 steps."""
    from lorafleet.kernels.decoder.rope_store_triton import rotate_and_store_triton

    within = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype], "equal_nan": True}
    for norms_rotated, is_interleaved in STYLES:
        for norm in (False, True):
            for pairs in (0, 3, head_dim // 2):
                twin = make_case(num_tokens, heads, head_dim, norm, dtype, "cpu", True, pairs)
                want = rotate_and_store(*twin.arguments(), norms_rotated=norms_rotated, is_interleaved=is_interleaved)
                case = make_case(num_tokens, heads, head_dim, norm, dtype, device, True, pairs)
                if device == "cuda":
                    poison_free_memory()
                found = rotate_and_store_triton(
                    *case.arguments(), norms_rotated=norms_rotated, is_interleaved=is_interleaved
                )
                torch.testing.assert_close(found.cpu(), want, **within)
                torch.testing.assert_close(case.k.cpu(), twin.k, **within)
                torch.testing.assert_close(case.v.cpu(), twin.v, **within)


def test_interpreted_kernel() -> None:
    run_interpreted("""
        from tests.kernels.decoder.test_rotation_styles import check_kernel

        check_kernel(3, (4, 2), 16, torch.float32, "cpu")
    """)


class TestOnGPU:
    pytestmark = pytest.mark.gpu

    @pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
    @pytest.mark.parametrize(("heads", "head_dim"), [("llama_8b", 128), ("gqa", 80)])
    def test_every_style(self, heads: str, head_dim: int, dtype: torch.dtype) -> None:
        check_kernel(19, HEADS[heads], head_dim, dtype, "cuda")
