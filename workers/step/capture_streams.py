"""The streams on which CUDA graphs are captured.

The allocator reserves memory for each stream, and cuBLAS a workspace of 32 MiB, which outlives the graphs. So all
captures of a process share these, also those of engines that come after each other. Graphs run on the stream of the
steps.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from lorafleet.kernels.lora.sm_split import HIGH_PRIORITY


@dataclass(frozen=True, slots=True)
class CaptureStreams:
    """A device's streams, by their priority."""

    main: dict[int, torch.cuda.Stream]
    side: dict[int, torch.cuda.Stream]  # For what runs beside the stream that is captured.

    @classmethod
    @functools.cache
    def of(cls, device: torch.device) -> CaptureStreams:
        main, side = ({priority: torch.cuda.Stream(device, priority) for priority in (0, HIGH_PRIORITY)} for _ in "ms")
        return cls(main, side)
