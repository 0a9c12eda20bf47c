"""Finds the files in which tuning stores what it has measured on a GPU: tuned/<GPU>.json beside the kernels."""

from __future__ import annotations

from pathlib import Path

# GPUs with the processor of another one and other memory. They use its data until they have been measured themselves.
SAME_PROCESSOR = {"NVIDIA H100 80GB HBM3": "NVIDIA H200"}


def tuned_path(folder: Path, gpu: str, suffix: str = ".json") -> Path:
    """Returns the GPU's own file, which tuning writes. It may be missing."""
    return folder / (gpu.replace(" ", "_").replace("/", "_") + suffix)


def measured_path(folder: Path, gpu: str, suffix: str = ".json") -> Path:
    """Returns the file that kernels read: the GPU's own, or else that of a GPU with the same processor. It may be
    missing."""
    own = tuned_path(folder, gpu, suffix)
    return own if own.exists() or gpu not in SAME_PROCESSOR else tuned_path(folder, SAME_PROCESSOR[gpu], suffix)
