from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lorafleet.kernels.decoder.rms_norm import NormWeight, add_rms_norm, rms_norm
from lorafleet.kernels.lora.linear_output import LinearOutput
from tests.kernels.harness import poison_free_memory, run_interpreted
from tests.kernels.vector_cases import own_affine, own_vectors

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
EPS = 1e-5
AddRMSNorm = Callable[[LinearOutput, Tensor, NormWeight, float, NormWeight | None], Tensor]


def make_inputs(shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(shape[-1])
    x, residual, weight = (torch.randn(s, generator=generator).to(dtype) for s in (shape, shape, shape[-1:]))
    return x.to(device), (8 * residual).to(device), weight.to(device)


def reference(x: Tensor, weight: Tensor) -> Tensor:
    x64 = x.double()
    return x64 / (x64.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def assert_near(out: Tensor, want: Tensor) -> None:
    tolerance = TOLERANCE[out.dtype]
    torch.testing.assert_close(out.double(), want, atol=tolerance, rtol=tolerance)


def check_norm(x: Tensor, weight: Tensor, out: Tensor) -> None:
    assert out.shape == x.shape and out.dtype == x.dtype
    assert_near(out, reference(x, weight))


def check_add(x: Tensor, delta: Tensor | None, before: Tensor, residual: Tensor, weight: Tensor, out: Tensor) -> None:
    """The sum is the very one that torch rounds to, once, and the norm is the norm of that."""
    added = x.float() if delta is None else x.float() + delta.float()
    assert torch.equal(residual, (added + before.float()).to(before.dtype))
    check_norm(residual, weight, out)


def check_branch(
    x: Tensor, delta: Tensor | None, before: Tensor, residual: Tensor, weights: tuple[Tensor, Tensor], out: Tensor
) -> None:
    """Both weights in float32, of which the first is the branch's."""
    added = (x.float() if delta is None else x.float() + delta.float()).to(x.dtype)
    assert_near(residual, reference(added, weights[0]).to(x.dtype).double() + before.double())
    check_norm(residual, weights[1], out)


def branch_weights(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Which no half precision holds."""
    return 1 + weight.float() / 1000, 1.25 + weight.flip(0).float() / 1000


def deltas(x: Tensor) -> tuple[Tensor | None, ...]:
    """What adapters add: nothing, or another tensor."""
    return None, x.flip(0).flip(1).contiguous()


def check_tokens_own(shape: tuple[int, int], dtype: torch.dtype, device: str, norms: AddRMSNorm) -> None:
    """Tokens with their own scale and bias of x, and their own weights of both norms."""
    x, residual, weight = make_inputs(shape, dtype, device)
    affine = own_affine(*shape, device)
    own, own_branch = (own_vectors(*shape, 0.0, device, seed) for seed in (5, 6))
    weights = branch_weights(weight)
    chosen = [
        torch.where(own.address_T[:, None] == 0, weight, own.value_TO)
        for weight, own in zip(weights, (own_branch, own), strict=True)
    ]
    branch, norm = NormWeight(weights[0], own_branch.address_T), NormWeight(weights[1], own.address_T)
    for delta in deltas(x):
        for has_branch in (False, True):
            before = residual.clone()
            out = norms(LinearOutput(x, delta, affine.affine_2T), residual, norm, EPS, branch if has_branch else None)
            added = affine.of(x, delta)
            if has_branch:
                added = reference(added.to(dtype), chosen[0]).to(dtype)
            within = {"atol": 3 * TOLERANCE[dtype], "rtol": 3 * TOLERANCE[dtype]}  # rounded up to three times
            torch.testing.assert_close(residual.double(), added + before.double(), **within)
            assert_near(out, reference(residual, chosen[1]))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", [(1, 64), (5, 100)], ids=str)
def test_on_a_cpu(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, residual, weight = make_inputs(shape, dtype)
    check_norm(x, weight, rms_norm(x, NormWeight(weight), EPS))
    for delta in deltas(x):
        before = residual.clone()
        check_add(
            x, delta, before, residual, weight, add_rms_norm(LinearOutput(x, delta), residual, NormWeight(weight), EPS)
        )


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_branch_may_have_a_norm_of_its_own(dtype: torch.dtype) -> None:
    x, residual, weight = make_inputs((5, 100), dtype)
    branch, after = branch_weights(weight)
    for delta in deltas(x):
        before = residual.clone()
        out = add_rms_norm(LinearOutput(x, delta), residual, NormWeight(after), EPS, NormWeight(branch))
        check_branch(x, delta, before, residual, (branch, after), out)


def test_interpreted_kernel() -> None:
    run_interpreted("""
        import torch
        from lorafleet.kernels.lora.linear_output import LinearOutput
        from lorafleet.kernels.decoder.rms_norm import NormWeight
        from lorafleet.kernels.decoder.rms_norm_triton import rms_norm_triton
        from tests.kernels.decoder.test_rms_norm import (
            EPS, branch_weights, check_add, check_branch, check_norm, check_tokens_own, deltas, make_inputs
        )

        for shape in ((3, 64), (2, 77), (1, 1)):
            x, residual, weight = make_inputs(shape, torch.float32)
            check_norm(x, weight, rms_norm_triton(LinearOutput(x), None, NormWeight(weight), EPS))
            for delta in deltas(x):
                before = residual.clone()
                out = rms_norm_triton(LinearOutput(x, delta), residual, NormWeight(weight), EPS)
                check_add(x, delta, before, residual, weight, out)
                before, (branch, after) = residual.clone(), branch_weights(weight)
                out = rms_norm_triton(LinearOutput(x, delta), residual, NormWeight(after), EPS, NormWeight(branch))
                check_branch(x, delta, before, residual, (branch, after), out)
            check_tokens_own((9, shape[1]), torch.float32, "cpu", rms_norm_triton)
    """)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 7, 256, 2049])
@pytest.mark.parametrize("size", [1, 77, 128, 896, 4096, 5120, 18432])
class TestOnGPU:
    pytestmark = pytest.mark.gpu

    def test_norm(self, size: int, num_tokens: int, dtype: torch.dtype) -> None:
        x, _, weight = make_inputs((num_tokens, size), dtype, "cuda")
        poison_free_memory()
        check_norm(x, weight, rms_norm(x, NormWeight(weight), EPS))

    def test_add(self, size: int, num_tokens: int, dtype: torch.dtype) -> None:
        x, residual, weight = make_inputs((num_tokens, size), dtype, "cuda")
        for delta in deltas(x):
            before = residual.clone()
            poison_free_memory()
            check_add(
                x,
                delta,
                before,
                residual,
                weight,
                add_rms_norm(LinearOutput(x, delta), residual, NormWeight(weight), EPS),
            )

    def test_a_branch_with_a_norm_of_its_own(self, size: int, num_tokens: int, dtype: torch.dtype) -> None:
        x, residual, weight = make_inputs((num_tokens, size), dtype, "cuda")
        branch, after = branch_weights(weight)
        for delta in deltas(x):
            before = residual.clone()
            poison_free_memory()
            out = add_rms_norm(LinearOutput(x, delta), residual, NormWeight(after), EPS, NormWeight(branch))
            check_branch(x, delta, before, residual, (branch, after), out)

    def test_tokens_with_vectors_of_their_own(self, size: int, num_tokens: int, dtype: torch.dtype) -> None:
        poison_free_memory()
        check_tokens_own((num_tokens, size), dtype, "cuda", add_rms_norm)

    def test_a_row_gets_the_same_bits_alone(self, size: int, num_tokens: int, dtype: torch.dtype) -> None:
        x, residual, weight = make_inputs((num_tokens, size), dtype, "cuda")
        last = add_rms_norm(LinearOutput(x[-1:]), residual[-1:].clone(), NormWeight(weight), EPS)
        assert torch.equal(add_rms_norm(LinearOutput(x), residual, NormWeight(weight), EPS)[-1:], last)
