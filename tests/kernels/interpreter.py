"""A program that runs snippets under Triton's interpreter, each in a process of its own.

It has imported already what snippets need, which takes longer than most of them, and forks for each. It reads from its
input lines of JSON, [snippet, file for what it prints], and answers each with the snippet's exit status. It ends with
its input.
"""

from __future__ import annotations

import json
import os
import sys
import traceback

import numpy as np
import pytest  # noqa: F401  # Snippets import test modules, which import it.
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from tests.kernels.quick_interpreter import make_quick

_convert_float = interpreter._convert_float


def convert_float(numbers: np.ndarray, source: tl.dtype, target: tl.dtype, rounding_mode: object) -> np.ndarray:
    """Rounds float32 to e4m3. Triton's own function loses the carry into the exponent: 31.6 becomes 16, not 32."""
    if (source, target) != (tl.float32, tl.float8e4nv):
        return _convert_float(numbers, source, target, rounding_mode)
    rounded = torch.from_numpy(np.ascontiguousarray(numbers)).to(torch.float8_e4m3fn)
    return rounded.view(torch.uint8).numpy()


def add_in_order() -> None:
    """Makes tl.dot add the products of every row in the same order, as a GPU does.

    The order in numpy's matmul depends on the row's place in a tile, on some processors.
    """

    def matmul(a: np.ndarray, b: np.ndarray, dtype: type[np.generic]) -> np.ndarray:
        a, b = a.astype(dtype), b.astype(dtype)
        total = np.zeros((*a.shape[:-1], b.shape[-1]), dtype)
        for k in range(a.shape[-1]):
            total += a[..., k, None] * b[..., k, None, :]
        return total

    np.matmul = matmul  # type: ignore[assignment]  # in the snippet's own process


def run(snippet: str, printed: str) -> int:
    """Returns the exit status, negative for a signal."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    status = 1
    try:
        file = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        torch.manual_seed(0)
        exec(compile(snippet, "<snippet>", "exec"), {"__name__": "__main__", "torch": torch})
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def main() -> None:
    interpreter._convert_float = convert_float
    make_quick()
    torch.testing.assert_close(torch.zeros(1), torch.zeros(1))  # The first call imports five hundred modules.
    assert triton.knobs.runtime.interpret and len(os.listdir("/proc/self/task")) == 1, "a fork copies one thread only"
    for line in sys.stdin:
        print(run(*json.loads(line)), flush=True)


if __name__ == "__main__":
    main()
