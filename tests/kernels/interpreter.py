"""Runs a snippet under Triton's interpreter in a process of its own: the variable must be set before kernels import."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")


def run_interpreted(code: str) -> None:
    """Fails with the snippet's own output. Use fp32 or fp16 and tiny shapes: bf16 is silently wrong there."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs triton")
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
