"""Plans GEMMs for some of the GPU's SMs, so that kernels of another stream find room on the others.

For cuBLAS the number is a hint: it chooses its tiles and grids for it. It belongs to the handle with which torch calls
cuBLAS for products without a bias. torch leaves products with a bias to cuBLASLt, which does not read it. The kernels
for weights of four bits (kernels/quant/four_bit_cuda.py) launch that many programs.
"""

from __future__ import annotations

import ctypes
import logging
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

log = logging.getLogger(__name__)

ALL_SMS = 0  # cuBLAS's own default


class _Limit(threading.local):
    num_sms: int | None = None  # None outside of gemms_limited_to()


_limit = _Limit()


def sms_for_gemms(num_sms: int) -> int:
    """Returns how many of a GPU's SMs a GEMM that this thread launches now should use."""
    return num_sms if _limit.num_sms is None else min(num_sms, _limit.num_sms)


@contextmanager
def gemms_limited_to(num_sms: int | None) -> Iterator[None]:
    """Limits the GEMMs that this thread launches or captures in the block. None changes nothing.

    A block inside another one has its own limit, and the outer limit applies again behind it.
    """
    if num_sms is None:
        yield
        return
    library, before = _cublas(), _limit.num_sms
    if library is not None:
        _set_target(library, num_sms)
    _limit.num_sms = num_sms
    try:
        yield
    finally:
        _limit.num_sms = before
        if library is not None:
            _set_target(library, ALL_SMS if before is None else before)


@cache
def _cublas() -> ctypes.CDLL | None:
    """Returns the cuBLAS library that torch has loaded, or None if it has no such function or is part of torch."""
    path = re.search(r"/\S*/libcublas\.so\S*", Path("/proc/self/maps").read_text())
    try:
        if path is None:
            raise OSError("torch has loaded no libcublas.so")
        library = ctypes.CDLL(path.group())
        library.cublasSetSmCountTarget.argtypes = [ctypes.c_void_p, ctypes.c_int]
    except (OSError, AttributeError) as error:
        log.warning("base GEMMs leave no SMs to LoRA kernels, which makes steps with adapters slower: %s", error)
        return None
    return library


def _set_target(library: ctypes.CDLL, num_sms: int) -> None:
    status = library.cublasSetSmCountTarget(torch.cuda.current_blas_handle(), num_sms)
    if status != 0:
        raise RuntimeError(
            f"cuBLAS refused to plan for {num_sms} SMs (status {status}). Measure this GPU again by "
            "`python -m lorafleet.kernels.lora.tune_sm_split`."
        )
