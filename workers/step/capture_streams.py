"""The streams on which CUDA graphs are captured. The engines that a thread starts one after the other share them.

cuBLAS's workspace for a stream (32 MiB on an H100) lasts as long as the process, and so it would stay behind each
engine that has streams of its own. Threads have their own streams, since a stream captures for one thread at a time.
"""

from __future__ import annotations

import threading
from typing import Literal

import torch

Use = Literal["step", "lora", "prompts"]  # LoRA kernels run beside the step; steps with prompts are captured apart


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.streams: dict[tuple[torch.device, Use, int], torch.cuda.Stream] = {}


_own = _OfThread()


def capture_stream(device: torch.device, use: Use, priority: int = 0) -> torch.cuda.Stream:
    """Returns this thread's stream of that priority."""
    key = device, use, priority
    if key not in _own.streams:
        _own.streams[key] = torch.cuda.Stream(device, priority)
    return _own.streams[key]
