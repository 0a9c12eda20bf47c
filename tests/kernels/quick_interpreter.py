"""Makes Triton's interpreter faster without another result: it repeats much at each call, operation and element."""

from __future__ import annotations

import dataclasses
import functools
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_patch_lang = interpreter._patch_lang
_get_np_dtype = interpreter._get_np_dtype


def make_quick() -> None:
    """Replaces the slow parts of the interpreter in this process and its forks."""
    builder = interpreter.interpreter_builder
    # It computes each sum of integers twice, and looks at none of these but in Triton's debug mode.
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    interpreter._patch_lang = lambda _: _language()
    interpreter._get_np_dtype = _numpy_dtype
    interpreter.ReduceOps.generic_reduce = _reduce_in_pairs
    interpreter.ScanOps.generic_scan = _scan_in_steps
    tl.tensor.__init__ = _init_tensor


@functools.cache
def _language() -> SimpleNamespace:
    """Replaces the functions of Triton's language with the interpreter's, for the rest of the process.

    Triton searches its whole language for them at every call of a function.
    """
    _patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    return SimpleNamespace(restore=lambda: None)


_numpy_dtypes: dict[str, np.dtype[Any]] = {}  # by the name of Triton's type, as a pointer's type has no hash


def _numpy_dtype(dtype: tl.dtype) -> np.dtype[Any]:
    name = dtype.scalar.name
    if name not in _numpy_dtypes:
        _numpy_dtypes[name] = _get_np_dtype(dtype)
    return _numpy_dtypes[name]


def _init_tensor(self: tl.tensor, handle: interpreter.TensorHandle, type: tl.dtype) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.numel, self.shape = _sizes(type.shape if type.is_block() else ())


@functools.cache
def _sizes(shape: tuple[int, ...]) -> tuple[tl.constexpr, tl.tuple]:
    return tl.constexpr(math.prod(shape)), tl.tuple([tl.constexpr(size) for size in shape])


def _reduce_in_pairs(self: interpreter.ReduceOps, inputs: tuple[tl.tensor, ...]) -> list[tl.tensor]:
    """Combines all pairs of neighbors at once until one element is left. Triton combines elements one by one."""
    axis, shape = self.axis or 0, inputs[0].handle.data.shape
    parts = [np.moveaxis(x.handle.data.reshape(-1) if self.axis is None else x.handle.data, axis, 0) for x in inputs]
    while len(parts[0]) > 1:  # a power of two
        parts = _combine(self, inputs, [p[0::2] for p in parts], [p[1::2] for p in parts])
    kept = (1,) * len(shape) if self.axis is None else (*shape[:axis], 1, *shape[axis + 1 :])
    outputs = [p[0].reshape(kept) if self.keep_dims else p[0] for p in parts]
    return [self.to_tensor(out, x.dtype) for out, x in zip(outputs, inputs, strict=True)]


def _scan_in_steps(self: interpreter.ScanOps, inputs: tuple[tl.tensor, ...]) -> list[tl.tensor]:
    """Combines each element with the one 1, 2, 4, … places before it. Triton combines elements one by one."""
    parts = [np.moveaxis(x.handle.data, self.axis, 0) for x in inputs]
    distance = 1
    while distance < len(parts[0]):
        combined = _combine(self, inputs, [np.roll(p, distance, 0) for p in parts], parts)
        parts = [np.concatenate((p[:distance], c[distance:])) for p, c in zip(parts, combined, strict=True)]
        distance *= 2
    return [self.to_tensor(np.moveaxis(p, 0, self.axis), x.dtype) for p, x in zip(parts, inputs, strict=True)]


def _combine(
    operation: Any, inputs: tuple[tl.tensor, ...], first: list[np.ndarray], second: list[np.ndarray]
) -> list[np.ndarray]:
    """Applies the combining function to arrays of elements, which have the inputs' types."""
    operands = [
        operation.to_tensor(part, x.dtype) for parts in (first, second) for part, x in zip(parts, inputs, strict=True)
    ]
    combined = operation.combine_fn.fn(*operands)
    combined = combined if isinstance(combined, tuple) else (combined,)
    return [x.handle.data.astype(part.dtype) for x, part in zip(combined, first, strict=True)]
