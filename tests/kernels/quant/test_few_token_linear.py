"""Products of few tokens with e4m3 weights: the CUDA kernel, emulated on this CPU, against float64."""

from __future__ import annotations

import ctypes
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lorafleet.kernels.decoder.scratch import Scratch
from lorafleet.kernels.quant import few_tokens_cuda
from lorafleet.kernels.quant.few_tokens_cuda import (
    FEW_TOKENS,
    FewTokenKernel,
    few_token_kernel,
    few_token_linear,
    options,
)
from lorafleet.kernels.quant.fp8 import FP8
from lorafleet.kernels.quant.scaled_weight import ScaledScheme, ScaledWeight
from tests.kernels.harness import needs_gpu, poison_free_memory
from tests.kernels.quant.emulation import MOST_WARPS, compiled_emulation

FOLDER = Path(few_tokens_cuda.__file__).parent


def weight_of(outputs: int, inputs: int, block: int | None, dtype: torch.dtype, device: str) -> ScaledWeight:
    scheme = ScaledScheme("fp8", FP8, block)
    weight = ScaledWeight(outputs, inputs, dtype, torch.device(device), Scratch(dtype, torch.device(device)), scheme)
    generator = torch.Generator().manual_seed(outputs)
    values_OD = torch.randn(outputs, inputs, generator=generator) * (1 + torch.arange(outputs)[:, None] % 3)
    weight.fill(0, scheme.quantize(values_OD), (slice(0, outputs), slice(0, inputs)))
    return weight


def check(y_TO: Tensor, x_TD: Tensor, weight: ScaledWeight, bias_O: Tensor | None) -> None:
    code_OGg = weight.code_OD.double().unflatten(1, (-1, weight.group))
    want_TO = x_TD.double() @ (code_OGg * weight.scale_OG.double()[..., None]).flatten(1).T
    if bias_O is not None:
        want_TO += bias_O.double()
    assert (y_TO.double() - want_TO).norm() < 0.004 * want_TO.norm()


@pytest.mark.parametrize(("block", "dtype"), [(None, torch.bfloat16), (128, torch.float16)])
def test_the_source_multiplies(block: int | None, dtype: torch.dtype, tmp_path: Path) -> None:
    fewer = {"WARPS": MOST_WARPS, "LINEAR_TEAM": 2}
    kept = [option for option in options(dtype) if option.startswith("-D") and option[2:].split("=")[0] not in fewer]
    sources = {"OPERANDS_SOURCE": FOLDER / "code_operands.cuh", "LINEAR_SOURCE": FOLDER / "few_tokens.cu"}
    library = compiled_emulation([*kept, *(f"-D{name}={number}" for name, number in fewer.items())], sources, tmp_path)
    kernel = FewTokenKernel(lambda programs, arguments: library.emulate(programs, ctypes.byref(arguments)), 2)
    for tokens, inputs in ((1, 384), (FEW_TOKENS, 128)):
        weight = weight_of(80, inputs, block, dtype, "cpu")
        x_TD, bias_O = torch.randn(tokens, inputs).to(dtype), torch.randn(80).to(dtype) if tokens == 1 else None
        check(few_token_linear(x_TD, weight.code_OD, weight.scale_OG, bias_O, kernel), x_TD, weight, bias_O)


class TestOnGPU:
    pytestmark = needs_gpu

    @pytest.mark.parametrize("block", [None, 128])
    def test_small_weights_are_multiplied_by_the_kernel(self, block: int | None) -> None:
        assert few_token_kernel(torch.bfloat16, torch.device("cuda", 0)) is not None
        for (outputs, inputs), tokens in product(((5120, 2048), (2048, 4096), (48, 128)), (1, 3, FEW_TOKENS)):
            weight = weight_of(outputs, inputs, block, torch.bfloat16, "cuda")
            x_TD = torch.randn(tokens, inputs, device="cuda").bfloat16()
            for bias_O in (None, torch.randn(outputs, device="cuda").bfloat16()):
                poison_free_memory()
                y_TO = weight.linear(x_TD, bias_O)
                check(y_TO, x_TD, weight, bias_O)
                assert torch.equal(y_TO, weight.linear(x_TD, bias_O))
