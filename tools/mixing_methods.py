"""Lists the names of the methods in mix_adapters.py. It is a separate file so that a command line can be parsed
without torch."""

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
