"""Compiles CUDA sources by an NVRTC that needs neither a GPU nor a torch with CUDA, and reads what kernels take of a
multiprocessor."""

from __future__ import annotations

import ctypes
import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import files
from pathlib import Path

from lorafleet.kernels.nvrtc import compile_source
from tests.kernels.machine_code import nvidia_program

PACKAGE = "nvidia-cuda-nvrtc"
FUNCTION = re.compile(r"Function (\w+):\n\s*REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


@dataclass(frozen=True, slots=True)
class KernelUsage:
    """What ptxas gave a kernel."""

    registers: int  # of a thread
    stack_bytes: int  # of a thread: registers that had no room, and arrays
    shared_bytes: int  # of a program, with what the driver takes; without what a launch asks for
    local_bytes: int  # of a thread, beside the stack


def kernel_usage(source: str, options: Sequence[str], architecture: str) -> dict[str, KernelUsage]:
    """Returns the usage of each kernel that the source has for an architecture, such as sm_90a."""
    code = compile_source(nvrtc(), source, [*options, f"--gpu-architecture={architecture}"])
    program = nvidia_program("cuobjdump")
    assert program is not None, "Triton's package has no cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        printed = subprocess.run([program, "-res-usage", file.name], check=True, capture_output=True, text=True).stdout
    return {
        name: KernelUsage(int(registers), int(stack), int(shared), int(local))
        for name, registers, stack, shared, local in FUNCTION.findall(printed)
    }


@cache
def nvrtc() -> ctypes.CDLL:
    """Opens the library of the package, which the development dependencies have."""
    paths = {
        file.name.split(".so")[0]: Path(str(file.locate())) for file in files(PACKAGE) or [] if ".so." in file.name
    }
    ctypes.CDLL(str(paths["libnvrtc-builtins"]))  # The other library looks for it only where the linker does.
    return ctypes.CDLL(str(paths["libnvrtc"]))
