"""What the kernels' tests share: marks, the interpreter in a process of its own, poisoned GPU memory."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")


def run_interpreted(code: str) -> None:
    """Runs a snippet under Triton's interpreter, whose variable must be set before the kernels are imported.

    Use fp32 or fp16 and tiny shapes: bf16 is silently wrong there.
    """
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs triton")
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", "import torch\ntorch.manual_seed(0)\n" + textwrap.dedent(code)],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=590,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]


def poison_free_memory() -> None:
    """Fills what the allocator hands out next with NaN, so that an element that is read but never written shows."""
    blocks = [torch.full(((1 << n) // 4,), torch.nan, device="cuda") for n in range(9, 26) for _ in range(2)]
    torch.cuda.synchronize()
    del blocks
