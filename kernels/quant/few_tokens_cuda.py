"""Compiles and launches few_tokens.cu: products of at most 8 tokens with e4m3 weights."""

# T tokens · D in · O out

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from lorafleet.kernels.linear.linear_tuning import may_start_early
from lorafleet.kernels.nvrtc import CudaCode, CudaCodeError, machine_code
from lorafleet.kernels.quant.code_operands import MatrixArguments, operands_source
from lorafleet.kernels.quant.code_tiles import TILE

log = logging.getLogger(__name__)

FEW_TOKENS = 8
# The most numbers of a weight for which the kernel is used. It was faster than the e4m3 GEMM with 5120 x 2048 and
# 2048 x 4096, and slower with an 8B model's linears. In between nothing was measured.
MOST_NUMBERS = 12 << 20
ROWS = 16  # outputs of an item
WARPS, TEAM, DEPTH = 16, 16, 4  # as in few_tokens.cu
ROOM = 0x28000  # bytes of shared memory
LEAST_CAPABILITY = (9, 0)


class FewTokenLinearArguments(ctypes.Structure):
    """struct FewTokenLinear in few_tokens.cu."""

    _fields_ = (
        ("weight", MatrixArguments),
        *((name, ctypes.c_void_p) for name in ("pairs", "x", "bias", "y")),
        *((name, ctypes.c_int) for name in ("tokens", "outputs")),
    )


Launch = Callable[[int, FewTokenLinearArguments], None]  # Takes the number of programs.


@dataclass(frozen=True, slots=True)
class FewTokenKernel:
    """The compiled kernel on one GPU."""

    launch: Launch
    num_sms: int


def options(dtype: torch.dtype) -> list[str]:
    """Returns the compiler's options for x of this dtype."""
    numbers = {"IS_HALF": int(dtype == torch.float16), "BITS": 8, "SCALE": 0, "SUB": 1, "ZEROS": 0, "WARPS": WARPS}
    numbers |= {"LINEAR_TEAM": TEAM, "LINEAR_DEPTH": DEPTH, "ROOM": ROOM}
    return ["--std=c++17", *(f"-D{name}={number}" for name, number in numbers.items())]


def source() -> str:
    return operands_source() + Path(__file__).with_name("few_tokens.cu").read_text()


def is_few_token_size(outputs: int, inputs: int, group: int) -> bool:
    """Returns whether the kernel can multiply a weight of these sizes, and is worth it."""
    return outputs * inputs <= MOST_NUMBERS and outputs % ROWS == inputs % TILE == group % TILE == 0


@cache
def few_token_kernel(dtype: torch.dtype, device: torch.device) -> FewTokenKernel | None:
    """Returns the kernel, or None if this machine cannot compile or run it. The cause is logged once."""
    if torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        return None
    try:
        with torch.cuda.device(device):
            torch.cuda.synchronize()  # makes the device's context current in this thread
            code = CudaCode(machine_code(source(), options(dtype), device))
            launch = code.kernel("linear", WARPS * 32, ROOM, early=may_start_early(device))
            return FewTokenKernel(launch, torch.cuda.get_device_properties(device).multi_processor_count)
    except CudaCodeError as error:
        log.warning("e4m3 weights of few tokens are multiplied by a slower kernel: %s", error)
        return None


def few_token_linear(
    x_TD: Tensor, code_OD: Tensor, scale_OG: Tensor, bias_O: Tensor | None, kernel: FewTokenKernel
) -> Tensor:
    """Returns x @ (scale * code).T + bias in x's dtype, for at most FEW_TOKENS tokens.

    scale_OG has a scale for each group of columns of a row, float32. All tensors are contiguous.
    """
    (num_tokens, inputs), (outputs, num_groups) = x_TD.shape, scale_OG.shape
    group = inputs // num_groups
    assert 0 < num_tokens <= FEW_TOKENS and code_OD.shape == (outputs, inputs)
    assert outputs % ROWS == inputs % TILE == group % TILE == 0
    assert x_TD.is_contiguous() and x_TD.data_ptr() % 16 == 0
    y_TO = torch.empty(num_tokens, outputs, dtype=x_TD.dtype, device=x_TD.device)
    arguments = FewTokenLinearArguments(
        weight=MatrixArguments.of(code_OD, scale_OG, None, inputs, group),
        x=x_TD.data_ptr(),
        bias=None if bias_O is None else bias_O.data_ptr(),
        y=y_TO.data_ptr(),
        tokens=num_tokens,
        outputs=outputs,
    )
    kernel.launch(kernel.num_sms, arguments)
    return y_TO
