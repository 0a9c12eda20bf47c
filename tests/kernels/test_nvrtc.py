from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lorafleet.kernels import nvrtc
from lorafleet.kernels.nvrtc import (
    MAX_CACHED,
    CudaCode,
    CudaCodeError,
    architecture,
    cached_code,
    compile_source,
    matrix_map,
)


class CountingCompiler:
    """Has NVRTC's functions. Its machine code is the number of compilations; it rejects the source "wrong"."""

    def __init__(self) -> None:
        self.compilations = 0
        self._source = b""

    def nvrtcVersion(self, major: Any, minor: Any) -> int:
        major._obj.value, minor._obj.value = 13, 0
        return 0

    def nvrtcCreateProgram(self, _program: Any, source: bytes, *_rest: Any) -> int:
        self._source = source
        return 0

    def nvrtcCompileProgram(self, *_arguments: Any) -> int:
        self.compilations += 1
        return 6 if self._source == b"wrong" else 0

    def nvrtcDestroyProgram(self, _program: Any) -> int:
        return 0

    def nvrtcGetCUBINSize(self, _program: Any, size: Any) -> int:
        size._obj.value = 1
        return 0

    def nvrtcGetCUBIN(self, _program: Any, buffer: ctypes.Array[ctypes.c_char]) -> int:
        buffer[0] = bytes([self.compilations % 256])
        return 0

    def nvrtcGetProgramLogSize(self, _program: Any, size: Any) -> int:
        size._obj.value = 8
        return 0

    def nvrtcGetProgramLog(self, _program: Any, buffer: ctypes.Array[ctypes.c_char]) -> int:
        buffer.value = b"line 1?"
        return 0


def test_code_is_compiled_once_for_a_source_and_its_options(tmp_path: Path) -> None:
    compiler = CountingCompiler()
    first = cached_code(compiler, "source", ["-DA=1"], tmp_path / "new")
    assert cached_code(compiler, "source", ["-DA=1"], tmp_path / "new") == first
    assert compiler.compilations == 1
    assert cached_code(compiler, "source", ["-DA=2"], tmp_path / "new") != first
    assert cached_code(compiler, "other", ["-DA=1"], tmp_path / "new") != first


def test_a_damaged_file_is_compiled_again(tmp_path: Path) -> None:
    compiler = CountingCompiler()
    cached_code(compiler, "source", [], tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert cached_code(compiler, "source", [], tmp_path) == bytes([2])
    assert cached_code(compiler, "source", [], tmp_path) == bytes([2])


def test_the_cache_is_bounded(tmp_path: Path) -> None:
    compiler = CountingCompiler()
    for number in range(MAX_CACHED + 5):
        cached_code(compiler, str(number), [], tmp_path)
    assert len(list(tmp_path.iterdir())) == MAX_CACHED


def test_a_directory_that_cannot_be_written_costs_only_the_cache(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    compiler = CountingCompiler()
    assert cached_code(compiler, "source", [], tmp_path / "file" / "cache") == bytes([1])


def test_a_rejected_source_is_reported_with_the_compilers_messages() -> None:
    with pytest.raises(CudaCodeError, match=r"line 1\?"):
        compile_source(CountingCompiler(), "wrong", [])


def test_only_hoppers_code_may_use_what_only_hopper_has() -> None:
    assert [architecture(*capability) for capability in ((8, 0), (9, 0), (10, 0))] == ["sm_80", "sm_90a", "sm_100"]


class Arguments(ctypes.Structure):
    _fields_ = (("number", ctypes.c_int),)


class RecordingDriver:
    """Has the driver's functions, all of which succeed, and records the sizes and attributes of launches."""

    def __init__(self) -> None:
        self.launches: list[tuple[tuple[int, ...], dict[int, int]]] = []

    def __getattr__(self, _name: str) -> Any:
        return lambda *_arguments: 0

    def cuLaunchKernelEx(self, config: Any, *_rest: Any) -> int:
        fields = config._obj
        attributes = [fields.attributes[index] for index in range(fields.num_attributes)]
        sizes = (fields.grid_x, fields.block_x, fields.shared_bytes)
        self.launches.append((sizes, {attribute.id: attribute.value for attribute in attributes}))
        return 0


def test_a_launch_says_whether_its_programs_wait_for_each_other_or_for_the_former_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = RecordingDriver()
    monkeypatch.setattr(nvrtc, "_library", lambda _name: driver)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    together, early = 2, 6  # CUlaunchAttributeID
    for waits, is_early, attributes in (
        (False, False, {}),
        (True, False, {together: 1}),
        (False, True, {early: 1}),
        (True, True, {together: 1, early: 1}),
    ):
        CudaCode(b"code").kernel("name", 32, 1024, waits, is_early)(4, Arguments(1))
        assert driver.launches[-1] == ((4, 32, 1024), attributes)


class DescribingDriver:
    """Describes matrices, as the driver does, by their sizes: columns, rows, bytes of a row, and those of a copy."""

    def cuTensorMapEncodeTiled(self, described: Any, *rest: Any) -> int:
        _dtype, dimensions, at, sizes, row_bytes, copied, *_ = rest
        assert described.value % 64 == at.value % 16 == 0 and dimensions == 2
        words = (ctypes.c_uint64 * 16).from_address(described.value)
        words[:6] = [at.value, *sizes, *row_bytes, *copied]
        return 0


def test_matrices_are_described_without_opening_the_drivers_library_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening it takes longer than a launch, and a step without a graph describes an x for each linear."""
    opened: list[str] = []

    def opened_library(name: str) -> DescribingDriver:
        opened.append(name)
        return DescribingDriver()

    nvrtc._library.cache_clear()
    try:
        with monkeypatch.context() as patched:
            patched.setattr(ctypes, "CDLL", opened_library)
            for tokens in (17, 300):
                x_TD = torch.zeros(tokens, 192, dtype=torch.bfloat16)
                assert list(matrix_map(x_TD, 64)[:6]) == [x_TD.data_ptr(), 192, tokens, 384, 64, 64]
    finally:
        nvrtc._library.cache_clear()
    assert opened == ["libcuda.so.1"]
