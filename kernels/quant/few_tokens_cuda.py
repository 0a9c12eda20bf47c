"""Compiles and launches few_tokens.cu: products of at most 8 tokens with e4m3 weights, which are limited by the codes' bytes."""

# T tokens · D in · O out

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lorafleet.kernels.nvrtc import CudaCode, CudaCodeError, machine_code
from lorafleet.kernels.quant.code_tiles import TILE

if TYPE_CHECKING:
    from lorafleet.kernels.quant.scaled_weight import ScaledWeight

log = logging.getLogger(__name__)

MOST_TOKENS = 8
ROWS = 16  # outputs of an item
WARPS, TEAM, DEPTH = 16, 16, 4  # as in few_tokens.cu
ROOM = 0x28000  # bytes of shared memory
LEAST_CAPABILITY = (9, 0)
SOURCES = ("four_bit_primitives.cuh", "code_operands.cuh", "few_tokens.cu")


class MatrixArguments(ctypes.Structure):
    """struct Matrix in code_operands.cuh."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("codes", "scales", "zeros")),
        *((name, ctypes.c_int) for name in ("inputs", "groups")),
        ("inverse", ctypes.c_uint),
    )


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
    return "".join(Path(__file__).with_name(name).read_text() for name in SOURCES)


@cache
def few_token_kernel(dtype: torch.dtype, device: torch.device, early: bool) -> FewTokenKernel | None:
    """Returns the kernel, or None if this machine cannot compile or run it. The cause is logged once."""
    if torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        return None
    try:
        with torch.cuda.device(device):
            torch.cuda.synchronize()  # makes the device's context current in this thread
            code = CudaCode(machine_code(source(), options(dtype), device))
            launch = code.kernel("linear", WARPS * 32, ROOM, early=early)
            return FewTokenKernel(launch, torch.cuda.get_device_properties(device).multi_processor_count)
    except CudaCodeError as error:
        log.warning("e4m3 weights of few tokens are multiplied by a slower kernel: %s", error)
        return None


def few_token_linear(x_TD: Tensor, weight: ScaledWeight, bias_O: Tensor | None, kernel: FewTokenKernel) -> Tensor:
    """Returns x @ (scale * code).T + bias in x's dtype, for at most MOST_TOKENS tokens. All tensors are contiguous."""
    code_OD, scale_OG = weight.code_OD, weight.scale_OG
    (num_tokens, inputs), outputs = x_TD.shape, len(code_OD)
    assert 0 < num_tokens <= MOST_TOKENS and code_OD.shape[1] == inputs
    assert outputs % ROWS == inputs % TILE == weight.group % TILE == 0
    assert x_TD.is_contiguous() and x_TD.data_ptr() % 16 == 0 and code_OD.is_contiguous() and scale_OG.is_contiguous()
    y_TO = torch.empty(num_tokens, outputs, dtype=x_TD.dtype, device=x_TD.device)
    blocks = weight.group // TILE
    inverse = -(-(1 << 32) // blocks) if blocks > 1 else 0
    matrix = MatrixArguments(code_OD.data_ptr(), scale_OG.data_ptr(), None, inputs, scale_OG.shape[1], inverse)
    arguments = FewTokenLinearArguments(
        weight=matrix,
        x=x_TD.data_ptr(),
        bias=None if bias_O is None else bias_O.data_ptr(),
        y=y_TO.data_ptr(),
        tokens=num_tokens,
        outputs=outputs,
    )
    kernel.launch(kernel.num_sms, arguments)
    return y_TO
