"""Gives triton.jit a type, because triton ships none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import triton


class Kernel(Protocol):
    """A function that Triton compiles. Indexed by a grid it is launched; other kernels call it."""

    def __getitem__(self, grid: tuple[int, ...] | Callable[..., tuple[int, ...]]) -> Callable[..., Any]: ...

    def __call__(self, *arguments: Any, **constants: Any) -> Any: ...


def jit(*, do_not_specialize: Sequence[str] = ()) -> Callable[[Callable[..., Any]], Kernel]:
    """Returns triton.jit for kernels that take the named arguments as they come: Triton compiles a kernel once more
    for each argument that is 1 or a multiple of 16, unless the argument is named here."""
    compiled: Callable[[Callable[..., Any]], Kernel] = triton.jit(do_not_specialize=do_not_specialize)
    return compiled
