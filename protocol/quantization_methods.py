"""The names of the methods that quantize a base. They are separate from workers/bases/quantization.py, so that parsing
a command line does not import torch."""

from __future__ import annotations

from typing import Literal

Method = Literal["nf4", "int4", "fp8"]
