"""The split of the GPU between a decode step's LoRA kernels and the base GEMMs beside them.

cuBLAS's kernels fill whole SMs, and so do those for weights of four bits, so LoRA kernels on a side stream mostly wait
for them. They run beside the GEMMs if those leave some SMs free, and if the GEMMs' stream has the higher priority, so
that each GEMM's programs are placed first and the LoRA kernels take what is left. Programs of e4m3 GEMMs leave room on
every SM, so only the priorities matter. The best split differs by class of step: it is data in
tuned/<GPU>.sm_split.json, measured by `python -m lorafleet.kernels.lora.tune_sm_split`. Steps of a GPU or class without
data are not split. A split is fixed when a CUDA graph is captured. It is never used for steps without adapters.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch

from lorafleet.kernels.lora.lora_tuning import FOLDER, class_of
from lorafleet.kernels.tuned_data import measured_path, tuned_path

SUFFIX = ".sm_split.json"
# Upper bounds of the classes of steps by their number of tokens. Larger steps are not split.
TOKEN_BOUNDS = (4, 16, 64, 128, 256, 512)
NARROW_RANK = 16  # classes by the largest rank that a step's adapters may have: up to this one, and above it
MIN_GEMM_SMS = 16
HIGH_PRIORITY = -1  # a stream's default priority, 0, is the lowest

First = Literal["gemm", "lora"]
# The GEMMs of a model's base, by which splits are measured: cuBLAS's, or those of kernels/quant for its weights.
GEMMs = Literal["plain", "four bits", "e4m3"]


@dataclass(frozen=True, slots=True)
class SMSplit:
    gemm_sms: int | None = None  # number of SMs for which cuBLAS plans its GEMMs; None for all of them
    first: First | None = None  # the kernels whose stream has the higher priority; None if both have the same

    def __post_init__(self) -> None:
        if self.gemm_sms is not None and self.gemm_sms < MIN_GEMM_SMS:
            raise ValueError(f"gemm_sms={self.gemm_sms} leaves too little for the GEMMs. Use {MIN_GEMM_SMS} or more.")
        if self.first not in ("gemm", "lora", None):
            raise ValueError(f"first={self.first!r} is unknown. Use 'gemm', 'lora' or null.")

    @property
    def gemm_priority(self) -> int:
        """The priority of the stream on which the GEMMs, and everything else of the step, are captured."""
        return HIGH_PRIORITY if self.first == "gemm" else 0

    @property
    def lora_priority(self) -> int:
        """The priority of the side stream, on which the LoRA kernels are captured."""
        return HIGH_PRIORITY if self.first == "lora" else 0


UNSPLIT = SMSplit()


@dataclass(frozen=True, slots=True)
class StepClass:
    """A class of decode steps that share one split. Captured graphs differ by more, so classes add none."""

    tokens: int  # one of TOKEN_BOUNDS
    tiles: str  # class_of the number of tiles: few, some or many
    wide: bool  # whether ranks may be larger than NARROW_RANK
    gemms: GEMMs = "plain"

    @classmethod
    def of(cls, num_tokens: int, num_tiles: int, max_rank: int, gemms: GEMMs = "plain") -> StepClass | None:
        """Returns the class of a step with this many tokens and tiles, or None if it has too many tokens."""
        bound = next((bound for bound in TOKEN_BOUNDS if num_tokens <= bound), None)
        if bound is None:
            return None
        return cls(bound, class_of(num_tiles, prefill=False), max_rank > NARROW_RANK, gemms)

    @property
    def name(self) -> str:
        """The key of the class in a data file."""
        name = f"{self.tokens} tokens, {self.tiles} tiles, {'wide' if self.wide else 'narrow'} ranks"
        return name if self.gemms == "plain" else f"{name}, {self.gemms}"


def split_for(device: torch.device, num_tokens: int, num_tiles: int, max_rank: int, gemms: GEMMs = "plain") -> SMSplit:
    """Returns the split of a decode step with adapters of up to max_rank."""
    if device.type != "cuda":
        return UNSPLIT
    return choose(_of_gpu(torch.cuda.get_device_name(device)), StepClass.of(num_tokens, num_tiles, max_rank, gemms))


def choose(splits: Mapping[str, SMSplit], step: StepClass | None) -> SMSplit:
    """Returns the split of the class. If only the class with other ranks was measured, its split is used."""
    if step is None:
        return UNSPLIT
    other = replace(step, wide=not step.wide)
    return splits.get(step.name) or splits.get(other.name) or UNSPLIT


def split_path(gpu: str) -> Path:
    """Returns the file that tuning writes for the GPU."""
    return tuned_path(FOLDER, gpu, SUFFIX)


def read_splits(path: Path) -> dict[str, SMSplit]:
    """Reads the splits by class name. Returns nothing if there is no such file."""
    if not path.exists():
        return {}
    fields: dict[str, dict[str, Any]] = json.loads(path.read_text())
    return {name: SMSplit(**split) for name, split in fields.items()}


def write_splits(path: Path, splits: Mapping[str, SMSplit]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({name: asdict(split) for name, split in splits.items()}, indent=1) + "\n")
    _of_gpu.cache_clear()


@cache
def _of_gpu(gpu: str) -> dict[str, SMSplit]:
    return read_splits(measured_path(FOLDER, gpu, SUFFIX))
