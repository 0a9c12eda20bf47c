"""CUDA sources are compiled for the GPUs that they serve, without one, and kernels fit as their launches need it.

There are few compilations, since each takes seconds: one of each group size, with and without zeros and experts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from lorafleet.kernels import nvrtc
from lorafleet.kernels.moe import few_tokens_codes_cuda
from lorafleet.kernels.moe.few_tokens_codes_cuda import NAMES, CodesVariant
from lorafleet.kernels.quant import code_operands, four_bit_cuda
from lorafleet.kernels.quant.four_bit_cuda import DEQUANTIZE_WARPS, FourBitVariant
from tests.kernels.cuda_sources import KernelUsage, kernel_usage
from tests.kernels.harness import needs_triton

BF16, F32 = torch.bfloat16, torch.float32
HOPPER, BLACKWELL = (
    "sm_90a",
    "sm_100",
)  # Smaller GPUs have too little shared memory, see _kernels() of four_bit_cuda.py.
REGISTERS = 65536  # of a multiprocessor
SHARED_BYTES = 233472  # of a multiprocessor
MOST_SHARED_BYTES = 232448  # of a program, without the driver's
DRIVER_BYTES = 1024  # of each program's shared memory


@dataclass(frozen=True)
class Launched:
    """A kernel's launch: its threads, the shared memory that it asks for, and how many have room together."""

    threads: int
    shared_bytes: int
    resident: int = 1


@dataclass(frozen=True)
class FourBits:
    """A compilation of four_bit.cu and what follows it. `stacks` are bytes that threads keep in memory instead of
    registers, by kernel. Others have none."""

    variant: FourBitVariant
    architecture: str
    stacks: dict[str, int] = field(default_factory=dict)

    def launches(self) -> dict[str, Launched]:
        variant = self.variant
        shapes = variant.shapes(has_wgmma=self.architecture == HOPPER)
        found = {shape.name: Launched(*variant.program_size(shape), variant.resident_of(shape)) for shape in shapes}
        return found | {"dequantize": Launched(DEQUANTIZE_WARPS * 32, 0)}

    def usage(self) -> dict[str, KernelUsage]:
        return kernel_usage(four_bit_cuda.source(), self.variant.options, self.architecture)


@dataclass(frozen=True)
class FewTokens:
    """A compilation of few_tokens_codes.cu."""

    variant: CodesVariant
    architecture: str
    stacks: dict[str, int] = field(default_factory=dict)

    def launches(self) -> dict[str, Launched]:
        return dict.fromkeys(NAMES, Launched(self.variant.warps * 32, self.variant.shared_bytes))

    def usage(self) -> dict[str, KernelUsage]:
        return kernel_usage(few_tokens_codes_cuda.source(), self.variant.options, self.architecture)


COMPILED = {
    "NVFP4": FourBits(FourBitVariant(BF16, F32, 4, False, False), HOPPER, {"dense_64": 48}),
    "experts in AWQ": FourBits(
        FourBitVariant(BF16, BF16, 1, True, True, of_experts=True),
        HOPPER,
        {"wide_32": 8, "wide_64": 40, "wide_128": 16},
    ),
    "MXFP4 without wgmma": FourBits(FourBitVariant(BF16, F32, 2, False, False), BLACKWELL),
    "few tokens of FP8 experts": FewTokens(CodesVariant(BF16, 8, F32, 1, False, "silu", True), HOPPER),
    "few tokens of NVFP4 experts": FewTokens(CodesVariant(BF16, 4, F32, 4, False, "clamped_swiglu", True), HOPPER),
}


@needs_triton
@pytest.mark.parametrize("compiled", COMPILED.values(), ids=COMPILED)
def test_kernels_have_the_registers_and_the_shared_memory_that_their_launches_need(
    compiled: FourBits | FewTokens,
) -> None:
    usage, launches = compiled.usage(), compiled.launches()
    assert launches.keys() <= usage.keys()
    for name, launched in launches.items():
        own = usage[name]
        assert own.local_bytes == 0, name
        assert own.stack_bytes <= compiled.stacks.get(name, 0), name
        registers = -(-own.registers // 8) * 8  # as they are allocated
        assert launched.threads * registers * launched.resident <= REGISTERS, name
        shared_bytes = own.shared_bytes + launched.shared_bytes
        assert shared_bytes - DRIVER_BYTES <= MOST_SHARED_BYTES, name
        assert shared_bytes * launched.resident <= SHARED_BYTES, name


def test_every_cuda_source_belongs_to_a_compilation() -> None:
    sources = {*four_bit_cuda.SOURCES, *code_operands.SOURCES, "few_tokens_codes.cu"}
    assert {path.name for path in Path(nvrtc.__file__).parent.rglob("*.cu*")} == sources
