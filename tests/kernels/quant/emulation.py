"""Compiles CUDA kernels as C++ for this CPU, with the GPU's instructions emulated by emulated_gpu.h."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

from lorafleet.kernels.quant import four_bit_cuda

EMULATION = Path(__file__).with_name("emulated_gpu.h")
COMMAND = ["-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-pthread", "-x", "c++"]
MOST_WARPS = 4  # of an emulated program: each thread more takes time


def compiled_emulation(options: Iterable[str], sources: dict[str, Path], folder: Path) -> ctypes.CDLL:
    """Returns the library whose `emulate` runs a kernel, and fails where its threads wait for ever.

    Skips the test where no g++ can compile it.

    Args:
        options: Definitions, as -DNAME=VALUE.
        sources: The sources, by the name with which emulated_gpu.h includes each.
        folder: Where the library is written, beside those of other tests.
    """
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ compiles the emulation")
    library = folder / f"{len(list(folder.iterdir()))}.so"
    tiles = Path(four_bit_cuda.__file__).with_name("code_tiles.cuh")
    paths = [f'-D{name}="{source}"' for name, source in {"CODE_TILES": tiles, **sources}.items()]
    command = [compiler, *COMMAND, *options, *paths, str(EMULATION), "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode and "'_Float16'" in done.stderr:
        pytest.skip("this g++ is too old for the emulation")
    assert done.returncode == 0, done.stderr
    loaded = ctypes.CDLL(str(library))
    loaded.emulate.restype, loaded.emulate.errcheck = ctypes.c_bool, _ended
    return loaded


def _ended(ended: bool, *_: object) -> None:
    """Is called with what `emulate` returns. pytest's timeout could not end a kernel that waits for ever."""
    assert ended, "the kernel's threads wait for each other, or for memory that none of them changes"
