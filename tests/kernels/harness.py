"""What the kernels' tests share: marks, the interpreter in a process of its own, poisoned GPU memory."""

from __future__ import annotations

import atexit
import functools
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")


def run_interpreted(code: str) -> None:
    """Runs a snippet under Triton's interpreter, whose variable must be set before the kernels are imported.

    Use fp32 or fp16 and tiny shapes: bf16 is silently wrong there.
    """
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs triton")
    interpreter = _interpreter()
    assert interpreter.stdin is not None and interpreter.stdout is not None
    with tempfile.NamedTemporaryFile() as printed:
        interpreter.stdin.write(json.dumps([textwrap.dedent(code), printed.name]) + "\n")
        interpreter.stdin.flush()
        status = interpreter.stdout.readline()
        assert status == "0\n", status + printed.read().decode(errors="replace")[-8000:]


@functools.cache
def _interpreter() -> subprocess.Popen[str]:
    """Starts interpreter.py, which ends with this process."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, "-P", Path(__file__).with_name("interpreter.py")],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path},
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(process.communicate)
    return process


def poison_free_memory() -> None:
    """Fills what the allocator hands out next with NaN, so that an element that is read but never written shows."""
    blocks = [torch.full(((1 << n) // 4,), torch.nan, device="cuda") for n in range(9, 26) for _ in range(2)]
    torch.cuda.synchronize()
    del blocks
