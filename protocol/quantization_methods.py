"""The ways of quantising a base, by name; apart from quantized_tensors.py, so that reading a command line need not wait
for torch."""

from __future__ import annotations

from typing import Literal

Method = Literal["nf4", "fp8"]
