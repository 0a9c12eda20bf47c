"""Compiles CUDA C++ with the NVRTC library that torch ships, and launches it. A machine needs no nvcc for it.

The machine code is written to a directory of the user's cache, so that later starts do not compile. A file there is
named after the digest of everything that the code depends on, and begins with the digest of the code itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

log = logging.getLogger(__name__)

MAX_CACHED = 64  # Files in the cache; the ones that were written first are removed.
DIGEST_BYTES = hashlib.sha256().digest_size
_MAX_DYNAMIC_SHARED_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_COOPERATIVE = 2  # CU_LAUNCH_ATTRIBUTE_COOPERATIVE
_EARLY = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_UINT16 = 1  # CU_TENSOR_MAP_DATA_TYPE_UINT16
_SWIZZLE_128 = 3  # CU_TENSOR_MAP_SWIZZLE_128B
_PROMOTE_256 = 3  # CU_TENSOR_MAP_L2_PROMOTION_L2_256B


class _Attribute(ctypes.Structure):
    """Has the fields of CUlaunchAttribute in cuda.h, whose value is a union of 64 bytes. Only its int is used."""

    _fields_ = (("id", ctypes.c_int), ("_pad", ctypes.c_int), ("value", ctypes.c_int), ("_rest", ctypes.c_int * 15))


class _Config(ctypes.Structure):
    """Has the fields of CUlaunchConfig in cuda.h."""

    _fields_ = (
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z")),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


MatrixMap = ctypes.c_uint64 * 16  # CUtensorMap in cuda.h


class CudaCodeError(RuntimeError):
    """NVRTC or the driver is missing, or has rejected the code."""


class CudaCode:
    """Machine code that is loaded on one GPU, whose context is current in the calling thread."""

    def __init__(self, machine_code: bytes) -> None:
        self._driver = _library("libcuda.so.1")
        self._module = ctypes.c_void_p()
        self._check(self._driver.cuModuleLoadData(ctypes.byref(self._module), machine_code))

    def kernel(
        self, name: str, threads: int, shared_bytes: int, waits: bool = False, early: bool = False
    ) -> CudaKernel:
        """Returns a function of the code.

        Args:
            waits: Whether its programs wait for each other. Then none begins without room for all.
            early: Whether a launch may begin before the one ahead of it in the stream has ended. Then its programs have
                to wait for that one by an instruction of their own.
        """
        function = ctypes.c_void_p()
        self._check(self._driver.cuModuleGetFunction(ctypes.byref(function), self._module, name.encode()))
        self._check(self._driver.cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED_BYTES, shared_bytes))
        chosen = [identity for identity, is_set in ((_COOPERATIVE, waits), (_EARLY, early)) if is_set]
        attributes = (_Attribute * len(chosen))(*(_Attribute(identity, 0, 1) for identity in chosen))
        return CudaKernel(self, function, threads, shared_bytes, attributes)

    def launch(self, kernel: CudaKernel, programs: int, arguments: ctypes.Structure) -> None:
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        sizes = programs, 1, 1, kernel.threads, 1, 1, kernel.shared_bytes
        config = _Config(*sizes, stream, kernel.attributes, len(kernel.attributes))
        self._check(self._driver.cuLaunchKernelEx(ctypes.byref(config), kernel.function, pointers, ctypes.c_void_p()))

    def _check(self, status: int) -> None:
        if status == 0:
            return
        text = ctypes.c_char_p()
        self._driver.cuGetErrorString(status, ctypes.byref(text))
        raise CudaCodeError(f"the CUDA driver returned error {status}: {(text.value or b'unknown').decode()}")


@dataclass(frozen=True, slots=True)
class CudaKernel:
    """A function of CudaCode."""

    code: CudaCode
    function: ctypes.c_void_p
    threads: int  # of a program
    shared_bytes: int  # of a program
    attributes: ctypes.Array[_Attribute]  # of each launch

    def __call__(self, programs: int, arguments: ctypes.Structure) -> None:
        """Launches on torch's current stream, also while that is captured. The kernel takes the structure by value."""
        self.code.launch(self, programs, arguments)


def matrix_map(matrix: torch.Tensor, rows: int) -> ctypes.Array[ctypes.c_uint64]:
    """Describes a matrix to the copy engine (TMA) of GPUs of compute capability 9.0 and later.

    A copy takes 64 columns and so many rows, at most 256. Numbers outside the matrix are zeros. In shared memory a row
    of 128 bytes has its pieces of 16 bytes exchanged, as wgmma reads them. The matrix is contiguous, has numbers of
    16 bits, and begins at a multiple of 16 bytes, as its rows do.
    """
    assert matrix.is_contiguous() and matrix.element_size() == 2 and matrix.shape[1] % 8 == 0
    memory = (ctypes.c_uint64 * 24)()  # of which 128 bytes begin at a multiple of 64
    at = -(-ctypes.addressof(memory) // 64) * 64
    described = MatrixMap.from_address(at)
    status = _library("libcuda.so.1").cuTensorMapEncodeTiled(
        ctypes.c_void_p(at),
        _UINT16,
        2,
        ctypes.c_void_p(matrix.data_ptr()),
        (ctypes.c_uint64 * 2)(matrix.shape[1], matrix.shape[0]),
        (ctypes.c_uint64 * 1)(matrix.shape[1] * 2),
        (ctypes.c_uint32 * 2)(64, rows),
        (ctypes.c_uint32 * 2)(1, 1),
        0,  # no interleaved layout
        _SWIZZLE_128,
        _PROMOTE_256,
        0,  # zeros outside
    )
    if status != 0:
        raise CudaCodeError(f"the CUDA driver cannot describe a matrix of shape {tuple(matrix.shape)}: error {status}")
    return MatrixMap(*described)


def machine_code(source: str, options: Sequence[str], device: torch.device) -> bytes:
    """Returns the source's machine code for the device's architecture, from the cache if it is there.

    Raises CudaCodeError with the compiler's messages.
    """
    major, minor = torch.cuda.get_device_capability(device)
    nvrtc = nvrtc_library()
    return cached_code(nvrtc, source, [*options, f"--gpu-architecture={architecture(major, minor)}"], cache_directory())


def architecture(major: int, minor: int) -> str:
    """Returns NVRTC's name of an architecture. That of Hopper has the instructions that only Hopper has."""
    return "sm_90a" if (major, minor) == (9, 0) else f"sm_{major}{minor}"


def cached_code(nvrtc: ctypes.CDLL, source: str, options: Sequence[str], directory: Path | None) -> bytes:
    """Returns compile_source() from the directory, where it is written if it is not there. None means no cache."""
    if directory is None:
        return compile_source(nvrtc, source, options)
    version = ctypes.c_int(), ctypes.c_int()
    nvrtc.nvrtcVersion(*map(ctypes.byref, version))
    key = repr((source, list(options), [number.value for number in version]))
    path = directory / f"{hashlib.sha256(key.encode()).hexdigest()}.cubin"
    with contextlib.suppress(OSError):
        stored = path.read_bytes()
        if hashlib.sha256(stored[DIGEST_BYTES:]).digest() == stored[:DIGEST_BYTES]:
            return stored[DIGEST_BYTES:]
    code = compile_source(nvrtc, source, options)
    try:
        _store(path, hashlib.sha256(code).digest() + code)
    except OSError as error:
        log.info("compiled kernels are not kept for the next start: %s", error)
    return code


def compile_source(nvrtc: ctypes.CDLL, source: str, options: Sequence[str]) -> bytes:
    """Returns the source's machine code. Raises CudaCodeError with the compiler's messages."""
    program = ctypes.c_void_p()
    _check_nvrtc(
        nvrtc, nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"lorafleet.cu", 0, None, None)
    )
    try:
        encoded = [option.encode() for option in options]
        status = nvrtc.nvrtcCompileProgram(program, len(encoded), (ctypes.c_char_p * len(encoded))(*encoded))
        if status != 0:
            messages = _output(nvrtc, "ProgramLog", program).rstrip(b"\0").decode(errors="replace")
            raise CudaCodeError(f"NVRTC cannot compile: {messages[:2000]}")
        return _output(nvrtc, "CUBIN", program)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def nvrtc_library() -> ctypes.CDLL:
    """Returns the NVRTC of torch's own CUDA version. Raises CudaCodeError if there is none."""
    if torch.version.cuda is None:
        raise CudaCodeError("this torch is built without CUDA")
    name = f"libnvrtc.so.{torch.version.cuda.split('.')[0]}"
    packages = Path(torch.__file__).parents[1]
    for folder in (packages / "torch" / "lib", *sorted((packages / "nvidia").glob("*/lib"))):
        if (folder / name).is_file():
            return _library(str(folder / name))
    return _library(name)


def cache_directory() -> Path | None:
    """Returns the user's own directory, or None for a user that has no home."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lorafleet_kernels"
    except RuntimeError:
        return None


@cache  # matrix_map() asks for the driver before each launch
def _library(name: str) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(name)
    except OSError as error:
        raise CudaCodeError(f"{name} cannot be loaded: {error}") from error


def _output(nvrtc: ctypes.CDLL, what: str, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    _check_nvrtc(nvrtc, getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check_nvrtc(nvrtc, getattr(nvrtc, f"nvrtcGet{what}")(program, buffer))
    return buffer.raw


def _check_nvrtc(nvrtc: ctypes.CDLL, status: int) -> None:
    if status != 0:
        nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise CudaCodeError(f"NVRTC returned error {status}: {nvrtc.nvrtcGetErrorString(status).decode()}")


def _store(path: Path, content: bytes) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", delete=False) as file:
        file.write(content)
    os.replace(file.name, path)  # Readers see all of the file or nothing.
    files = sorted(path.parent.glob("*.cubin"), key=lambda file: file.stat().st_mtime)
    for oldest in files[: max(0, len(files) - MAX_CACHED)]:
        oldest.unlink(missing_ok=True)
