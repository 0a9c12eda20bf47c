"""Launch shapes of the LoRA kernels: data in tuned/<GPU>.json, measured by `python -m lorafleet.kernels.lora.tune`.

A shape changes the speed, but no bit of the result. A GPU without a file uses DEFAULT, which is logged once.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from lorafleet.kernels.tuned_data import measured_path, tuned_path

log = logging.getLogger(__name__)

FOLDER = Path(__file__).parent / "tuned"
# Classes of launches by their number of tiles: more tiles fill the GPU and need larger programs.
FEW_TILES, SOME_TILES = 16, 32
CLASSES = ("few", "some", "many", "prefill")


@dataclass(frozen=True, slots=True)
class ShrinkShape:
    """The loop of the shrink, for programs of up to 16 columns of P ("narrow") and for those of more ("wide")."""

    narrow_d: int = 128  # features of one loop step
    narrow_stages: int = 3  # loop steps that are loaded ahead
    wide_d: int = 128
    wide_stages: int = 2
    warps: int = 4


@dataclass(frozen=True, slots=True)
class ExpandShape:
    """The blocks and the launch of the expand."""

    elements: int = 2048  # elements of B in one block: rank times columns
    programs: int = 1024  # programs of a launch; spans grow until it has no more
    warps: int = 4
    early: bool = False  # start beside the shrink by programmatic dependent launch (compute capability 9.0 and up)


@dataclass(frozen=True, slots=True)
class Tuning:
    shrink: ShrinkShape = ShrinkShape()
    expand: ExpandShape = ExpandShape()

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Tuning:
        return cls(ShrinkShape(**fields["shrink"]), ExpandShape(**fields["expand"]))


DEFAULT = Tuning()


def class_of(num_tiles: int, prefill: bool) -> str:
    if prefill:
        return "prefill"
    return "few" if num_tiles <= FEW_TILES else "some" if num_tiles <= SOME_TILES else "many"


def tuning_for(device: torch.device, num_tiles: int, prefill: bool) -> Tuning:
    """Returns the tuning for a launch of this many tiles, empty ones included."""
    if device.type != "cuda":
        return DEFAULT
    return _of_gpu(torch.cuda.get_device_name(device)).get(class_of(num_tiles, prefill), DEFAULT)


def save(gpu: str, tunings: dict[str, Tuning]) -> Path:
    path = tuned_path(FOLDER, gpu)
    path.write_text(json.dumps({name: asdict(tunings[name]) for name in CLASSES}, indent=1) + "\n")
    _of_gpu.cache_clear()
    return path


@cache
def _of_gpu(gpu: str) -> dict[str, Tuning]:
    path = measured_path(FOLDER, gpu)
    if not path.exists():
        log.warning("no tuned LoRA kernel shapes for %s; `python -m lorafleet.kernels.lora.tune` measures them", gpu)
        return {}
    return {name: Tuning.of(fields) for name, fields in json.loads(path.read_text()).items()}
