"""The names that mix_adapters.py's methods have; apart from it, so that reading a command line need not wait for
torch."""

from __future__ import annotations

from typing import Literal

Method = Literal[
    "linear",
    "cat",
    "svd",
    "ties",
    "ties_svd",
    "dare_linear",
    "dare_linear_svd",
    "dare_ties",
    "dare_ties_svd",
    "magnitude_prune",
    "magnitude_prune_svd",
]
MajoritySign = Literal["total", "frequency"]
