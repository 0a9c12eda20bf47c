from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lorafleet.kernels.decoder.gated_mul import Activation, gated_mul
from lorafleet.kernels.lora.linear_output import LinearOutput
from tests.kernels.harness import needs_gpu, poison_free_memory, run_interpreted
from tests.kernels.vector_cases import OwnAffine, own_affine

ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu_tanh")
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
    active = gate / (1 + (-gate).exp())
    if activation == "gelu_tanh":
        active = gate / 2 * (1 + ((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)).tanh())
    torch.testing.assert_close(out.double(), active * up, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_on_a_cpu(dtype: torch.dtype, activation: Activation) -> None:
    gate_up = make_input(3, 50, dtype)
    for delta in deltas(gate_up):
        check(gate_up, delta, gated_mul(LinearOutput(gate_up.clone(), delta), activation), activation)


def test_interpreted_kernel() -> None:
    run_interpreted("""
        import torch
        from lorafleet.kernels.decoder import gated_mul_triton
        from lorafleet.kernels.lora.linear_output import LinearOutput
        from tests.kernels.decoder.test_gated_mul import ACTIVATIONS, check, deltas, make_input
        from tests.kernels.vector_cases import own_affine

        gated_mul_triton.BLOCK_I = 32
        for num_tokens, size in ((3, 64), (2, 77), (1, 1)):
            gate_up = make_input(num_tokens, size, torch.float32)
            for delta in deltas(gate_up):
                for activation in ACTIVATIONS:
                    out = gated_mul_triton.gated_mul_triton(LinearOutput(gate_up, delta), activation)
                    check(gate_up, delta, out, activation)
                own = own_affine(num_tokens, 2 * size)
                out = gated_mul_triton.gated_mul_triton(LinearOutput(gate_up, delta, own.affine_2T))
                check(gate_up, delta, out, own=own)
    """)


class TestOnGPU:
    pytestmark = needs_gpu

    @pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
    @pytest.mark.parametrize("num_tokens", [1, 7, 256, 2049])
    @pytest.mark.parametrize("size", [1, 77, 1024, 4864, 14336])
    @pytest.mark.parametrize("activation", ACTIVATIONS)
    def test_equals_the_formula(self, activation: Activation, size: int, num_tokens: int, dtype: torch.dtype) -> None:
        gate_up = make_input(num_tokens, size, dtype, "cuda")
        for delta in deltas(gate_up):
            poison_free_memory()
            check(gate_up, delta, gated_mul(LinearOutput(gate_up, delta), activation), activation)

    @pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
    @pytest.mark.parametrize(("num_tokens", "size"), [(1, 77), (7, 14336), (256, 1024), (2049, 77)])
    def test_tokens_scale_and_bias_their_gate_and_up(self, num_tokens: int, size: int, dtype: torch.dtype) -> None:
        gate_up = make_input(num_tokens, size, dtype, "cuda")
        own = own_affine(num_tokens, 2 * size, "cuda")
        for delta in deltas(gate_up):
            poison_free_memory()
            check(gate_up, delta, gated_mul(LinearOutput(gate_up, delta, own.affine_2T)), own=own)
