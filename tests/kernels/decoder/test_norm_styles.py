"""Layer norms, norms with a bias, scaled branches and sums without a norm: the twin against float64, the kernel against
the twin."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from lorafleet.kernels.decoder.rms_norm import NormWeight, add_rms_norm
from lorafleet.kernels.lora.linear_output import LinearOutput
from tests.kernels.harness import poison_free_memory, run_interpreted

EPS = 1e-5
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4e-2}


def cases(
    num_tokens: int, size: int, dtype: torch.dtype, device: str = "cpu"
) -> Iterator[tuple[LinearOutput, Tensor, NormWeight | None, NormWeight | None, float]]:
    """Yields the arguments of add_rms_norm in every style."""
    generator = torch.Generator().manual_seed(size)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype).to(device)

    for is_centered in (False, True):
        for has_bias in (False, True):
            for places in ("before", "after", "both"):
                norm, branch = (
                    NormWeight(normal(size), None, is_centered, normal(size) if has_bias else None) for _ in range(2)
                )
                x = LinearOutput(normal(num_tokens, size) + 1, normal(num_tokens, size))
                yield (
                    x,
                    normal(num_tokens, size),
                    None if places == "after" else norm,
                    None if places == "before" else branch,
                    1.0 if places == "before" else 0.3,
                )


def normed(x: Tensor, norm: NormWeight) -> Tensor:
    if norm.is_centered:
        x = x - x.mean(-1, keepdim=True)
    out = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * norm.weight.double()
    return out if norm.bias_D is None else out + norm.bias_D.double()


def check(add: Callable[..., Tensor], num_tokens: int, size: int, dtype: torch.dtype, device: str = "cpu") -> None:
    within = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    for x, before, norm, branch, scale in cases(num_tokens, size, dtype, device):
        residual = before.clone()
        if device == "cuda":
            poison_free_memory()
        out = add(x, residual, norm, EPS, branch, scale)
        assert x.delta_TO is not None
        added = x.y_TO.double() + x.delta_TO.double()
        if branch is not None:
            added = normed(added, branch)
        torch.testing.assert_close(residual.double(), before.double() + scale * added, **within)
        if norm is None:
            assert out is residual
        else:
            torch.testing.assert_close(out.double(), normed(residual.double(), norm), **within)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_on_a_cpu(dtype: torch.dtype) -> None:
    check(add_rms_norm, 5, 100, dtype)


def test_interpreted_kernel() -> None:
    run_interpreted("""
        from lorafleet.kernels.decoder.rms_norm_triton import rms_norm_triton
        from tests.kernels.decoder.test_norm_styles import check

        check(rms_norm_triton, 3, 77, torch.float32)
    """)


class TestOnGPU:
    pytestmark = pytest.mark.gpu

    @pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
    @pytest.mark.parametrize(("num_tokens", "size"), [(1, 77), (256, 4096)])
    def test_every_style(self, num_tokens: int, size: int, dtype: torch.dtype) -> None:
        check(add_rms_norm, num_tokens, size, dtype, "cuda")
