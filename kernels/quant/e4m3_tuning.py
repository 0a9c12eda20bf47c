"""Launch shapes of the e4m3 GEMM, and the batches for which it is used: data in tuned/<GPU>.json.

`python -m lorafleet.kernels.quant.tune_e4m3` measures them. A GPU without a file uses defaults, which is logged once.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

from lorafleet.kernels.tuned_data import measured_path, tuned_path

log = logging.getLogger(__name__)

FOLDER = Path(__file__).parent / "tuned"
WIDE_OUTPUTS = 8192  # linears with at least as many outputs fill a GPU with fewer splits
TOKEN_CLASSES = (16, 32, 64, 128, 256)  # a batch is in the first class that is not smaller, or in the last


@dataclass(frozen=True, slots=True)
class E4M3Shape:
    """The launch shape of one class of products."""

    block_o: int  # outputs of a program
    block_t: int  # tokens of a program
    stages: int  # loop steps that are loaded ahead
    warps: int
    # The GEMM splits x itself, which saves a launch and repeats the work in each program. Not for an x that is rounded.
    splits_inside: bool = False
    programs: int = 264  # programs of a launch, which decide into how many splits the inputs are divided
    # Inputs of each row of W that are requested before the kernel ahead has ended; 0 or a power of two from 128 on.
    prefetch: int = 256


@dataclass(frozen=True, slots=True)
class E4M3Limits:
    """The largest batches, in tokens, for which each way is the fastest."""

    # If a scheme rounds activations, they are not rounded up to exact_tokens. From there to rounded_tokens, they
    # are rounded for the e4m3 GEMM. torch's GEMM is used beyond that.
    exact_tokens: int = 32
    rounded_tokens: int = 128
    # If it does not, pair_tokens is the limit of the e4m3 GEMM. Beyond that, a plain GEMM reads values of W.
    pair_tokens: int = 128

    def of_scheme(self, rounds_x: bool) -> tuple[int, int]:
        """Returns the most tokens for which x is not rounded, and the most for which the e4m3 GEMM is used."""
        return (self.exact_tokens, self.rounded_tokens) if rounds_x else (self.pair_tokens, self.pair_tokens)


@dataclass(frozen=True, slots=True)
class E4M3Tuning:
    limits: E4M3Limits = E4M3Limits()
    shapes: dict[str, E4M3Shape] = field(default_factory=dict)  # by class_name()

    @classmethod
    def of(cls, fields: dict[str, Any]) -> E4M3Tuning:
        shapes = {name: E4M3Shape(**shape) for name, shape in fields["shapes"].items()}
        return cls(E4M3Limits(**fields["limits"]), shapes)

    def shape(self, num_tokens: int, outputs: int, rounds_x: bool) -> E4M3Shape:
        """Returns the measured shape, or a default one."""
        name = class_name(num_tokens, outputs, rounds_x)
        return self.shapes.get(name) or default_shape(num_tokens, rounds_x)


def token_class(num_tokens: int) -> int:
    return next((size for size in TOKEN_CLASSES if num_tokens <= size), TOKEN_CLASSES[-1])


def class_name(num_tokens: int, outputs: int, rounds_x: bool) -> str:
    """Names the class of a product, such as "16 tokens, wide, exact"."""
    width, terms = "wide" if outputs >= WIDE_OUTPUTS else "narrow", "rounded" if rounds_x else "exact"
    return f"{token_class(num_tokens)} tokens, {width}, {terms}"


def default_shape(num_tokens: int, rounds_x: bool) -> E4M3Shape:
    if num_tokens <= 16:
        return E4M3Shape(64, 16, stages=5, warps=4, splits_inside=not rounds_x)
    if num_tokens <= 32:
        return E4M3Shape(64, 32, stages=5, warps=4)
    if num_tokens <= 64 or not rounds_x:
        return E4M3Shape(128, 64, stages=4 if rounds_x else 3, warps=8)  # two programs a multiprocessor
    return E4M3Shape(128, 128, stages=4, warps=8)


def e4m3_tuning(device: torch.device) -> E4M3Tuning:
    return _of_gpu(torch.cuda.get_device_name(device)) if device.type == "cuda" else E4M3Tuning()


def save(gpu: str, tuning: E4M3Tuning) -> Path:
    path = tuned_path(FOLDER, gpu)
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(asdict(tuning), indent=1) + "\n")
    _of_gpu.cache_clear()
    return path


@cache
def _of_gpu(gpu: str) -> E4M3Tuning:
    path = measured_path(FOLDER, gpu)
    if not path.exists():
        log.warning("no tuned e4m3 shapes for %s; `python -m lorafleet.kernels.quant.tune_e4m3` measures them", gpu)
        return E4M3Tuning()
    return E4M3Tuning.of(json.loads(path.read_text()))
