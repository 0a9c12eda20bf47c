from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lorafleet.kernels.decoder.gated_mul import Activation, activated, gated_mul
from lorafleet.kernels.lora.linear_output import LinearOutput
from tests.kernels.harness import poison_free_memory, run_interpreted
from tests.kernels.vector_cases import OwnAffine, own_affine

ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu", "gelu_tanh", "relu2")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def make_input(num_tokens: int, size: int, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """Gates far on both sides of zero among them."""
    x = 4 * torch.randn(num_tokens, 2 * size, generator=torch.Generator().manual_seed(size))
    x[0, 0], x[-1, size - 1] = -200.0, 200.0
    return x.to(dtype).to(device)


def deltas(gate_up: Tensor) -> tuple[Tensor | None, ...]:
    """What adapters add: nothing, or another tensor."""
    return None, gate_up.flip(1).div(8)


def check(
    gate_up: Tensor, delta: Tensor | None, out: Tensor, activation: str = "silu", own: OwnAffine | None = None
) -> None:
    summed = gate_up.double() if delta is None else gate_up.double() + delta.double()
    if own is not None:
        summed = own.of(gate_up, delta)
    gate, up = summed.chunk(2, dim=1)
    assert out.dtype == gate_up.dtype
    tolerance = TOLERANCE[out.dtype]
    want = (active(gate, activation) * up).to(out.dtype)  # so that what float16 cannot hold is infinite in both
    torch.testing.assert_close(out.double(), want.double(), atol=tolerance, rtol=tolerance)


def active(gate: Tensor, activation: str) -> Tensor:
    """The formulas, in float64."""
    if activation == "gelu_tanh":
        return gate / 2 * (1 + ((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)).tanh())
    if activation == "gelu":
        return gate / 2 * (1 + torch.special.erf(gate / 2**0.5))
    return gate.clamp(min=0) ** 2 if activation == "relu2" else gate / (1 + (-gate).exp())


def check_without_gate(x: Tensor, delta: Tensor | None, out: Tensor, activation: str) -> None:
    summed = x.double() if delta is None else x.double() + delta.double()
    tolerance = TOLERANCE[out.dtype]
    assert out.shape == x.shape and out.dtype == x.dtype
    torch.testing.assert_close(out.double(), active(summed, activation), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_on_a_cpu(dtype: torch.dtype, activation: Activation) -> None:
    gate_up = make_input(3, 50, dtype)
    for delta in deltas(gate_up):
        check(gate_up, delta, gated_mul(LinearOutput(gate_up.clone(), delta), activation), activation)
        check_without_gate(gate_up, delta, activated(LinearOutput(gate_up.clone(), delta), activation), activation)


def xielu_numbers(dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """alpha_p and alpha_n before softplus, beta and eps."""
    return torch.tensor([0.7, -1.3, 0.5, -1e-6], dtype=dtype, device=device)


def check_xielu(x: Tensor, delta: Tensor | None, out: Tensor, numbers: Tensor) -> None:
    """x of make_input has both signs, and far ones among them."""
    summed = x.double() if delta is None else x.double() + delta.double()
    p, n, beta, eps = numbers.double()
    positive = (1 + p.exp()).log() * summed**2 + beta * summed
    negative = (summed.clamp(max=eps).exp() - 1 - summed) * (beta + (1 + n.exp()).log()) + beta * summed
    assert out.dtype == x.dtype
    tolerance = TOLERANCE[out.dtype]
    torch.testing.assert_close(
        out.double(), torch.where(summed > 0, positive, negative), atol=tolerance, rtol=tolerance
    )


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_xielu_on_a_cpu(dtype: torch.dtype) -> None:
    x, numbers = make_input(3, 25, dtype), xielu_numbers(dtype)
    for delta in deltas(x):
        check_xielu(x, delta, activated(LinearOutput(x.clone(), delta), "xielu", numbers), numbers)


def test_interpreted_kernel() -> None:
    run_interpreted("""
        import torch
        from lorafleet.kernels.decoder import gated_mul_triton
        from lorafleet.kernels.lora.linear_output import LinearOutput
        from tests.kernels.decoder.test_gated_mul import (
            ACTIVATIONS, check, check_without_gate, check_xielu, deltas, make_input, xielu_numbers
        )
        from tests.kernels.vector_cases import own_affine

        gated_mul_triton.BLOCK_I = 32
        for num_tokens, size in ((3, 64), (2, 77), (1, 1)):
            gate_up = make_input(num_tokens, size, torch.float32)
            for delta in deltas(gate_up):
                for activation in ACTIVATIONS:
                    out = gated_mul_triton.gated_mul_triton(LinearOutput(gate_up, delta), activation)
                    check(gate_up, delta, out, activation)
                    out = gated_mul_triton.gated_mul_triton(LinearOutput(gate_up, delta), activation, has_gate=False)
                    check_without_gate(gate_up, delta, out, activation)
                numbers = xielu_numbers(torch.float32)
                out = gated_mul_triton.gated_mul_triton(LinearOutput(gate_up, delta), "xielu", False, numbers)
                check_xielu(gate_up, delta, out, numbers)
                own = own_affine(num_tokens, 2 * size)
                out = gated_mul_triton.gated_mul_triton(LinearOutput(gate_up, delta, own.affine_2T))
                check(gate_up, delta, out, own=own)
    """)


class TestOnGPU:
    pytestmark = pytest.mark.gpu

    @pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
    @pytest.mark.parametrize("num_tokens", [1, 7, 256, 2049])
    @pytest.mark.parametrize("size", [1, 77, 1024, 4864, 14336])
    @pytest.mark.parametrize("activation", ACTIVATIONS)
    def test_equals_the_formula(self, activation: Activation, size: int, num_tokens: int, dtype: torch.dtype) -> None:
        gate_up = make_input(num_tokens, size, dtype, "cuda")
        for delta in deltas(gate_up):
            poison_free_memory()
            check(gate_up, delta, gated_mul(LinearOutput(gate_up, delta), activation), activation)
            check_without_gate(gate_up, delta, activated(LinearOutput(gate_up, delta), activation), activation)

    @pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
    @pytest.mark.parametrize(("num_tokens", "size"), [(1, 77), (256, 1024), (7, 10752)])
    def test_xielu(self, num_tokens: int, size: int, dtype: torch.dtype) -> None:
        x, numbers = make_input(num_tokens, size, dtype, "cuda"), xielu_numbers(dtype, "cuda")
        for delta in deltas(x):
            poison_free_memory()
            check_xielu(x, delta, activated(LinearOutput(x, delta), "xielu", numbers), numbers)

    @pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
    @pytest.mark.parametrize(("num_tokens", "size"), [(1, 77), (7, 14336), (256, 1024), (2049, 77)])
    def test_tokens_scale_and_bias_their_gate_and_up(self, num_tokens: int, size: int, dtype: torch.dtype) -> None:
        gate_up = make_input(num_tokens, size, dtype, "cuda")
        own = own_affine(num_tokens, 2 * size, "cuda")
        for delta in deltas(gate_up):
            poison_free_memory()
            check(gate_up, delta, gated_mul(LinearOutput(gate_up, delta, own.affine_2T)), own=own)
