"""The emulation ends a kernel that would never end, which pytest's timeout cannot."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from tests.kernels.quant.emulation import compiled_emulation

SOURCE = """
struct FewTokens { int value; };
constexpr int THREADS = 32;
KERNEL void inner_one(FewTokens arguments) { while (load_ticket(&arguments.value) == 0) {} }
KERNEL void inner(FewTokens arguments) { if (threadIdx.x || arguments.value) __syncwarp(); }
KERNEL void outer_one(FewTokens) {}
KERNEL void outer(FewTokens) {}
"""


def test_a_kernel_whose_threads_wait_for_ever_fails(tmp_path: Path) -> None:
    source = tmp_path / "waits.cu"
    source.write_text(SOURCE)
    operands = tmp_path / "none.cuh"
    operands.touch()
    sources = {"FEW_TOKENS_SOURCE": source, "OPERANDS_SOURCE": operands}
    library = compiled_emulation(["-DIS_HALF=0", "-DSUB=1"], sources, tmp_path)
    for kernel in (0, 1):  # One waits for memory, and one at a barrier that a thread has left out.
        with pytest.raises(AssertionError, match="wait for each other, or for memory"):
            library.emulate(kernel, 2, ctypes.byref(ctypes.c_int(0)))
        library.emulate(kernel, 2, ctypes.byref(ctypes.c_int(1)))
