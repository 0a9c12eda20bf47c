"""Chooses the layout of adapters (workers/tp/adapter_sharding.py) if fully_sharded_loras is not set.

On GPUs adapters are fully sharded, since each rank then holds 1/N of them. In small decode steps, though, the exchange
of P costs more than the bytes that it saves. The other layout is used if data of the GPU say that it makes steps of
max_num_seqs sequences faster. The data are in kernels/lora/tuned/<GPU>.sharding.json, which
`python benchmarks/tensor_parallel.py --record` writes. benchmarks/NOTES.md says why the choice is made once, at start.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lorafleet.kernels.lora.lora_tuning import FOLDER
from lorafleet.kernels.tuned_data import measured_path, tuned_path
from lorafleet.protocol.lora_config import LoRAConfig
from lorafleet.workers.tp.group import TPGroup

log = logging.getLogger(__name__)

SUFFIX = ".sharding.json"
# The part of a step that the layout with the larger adapters must save. Less would not be worth their memory.
WORTHWHILE = 0.03


@dataclass(frozen=True, slots=True)
class MeasuredSteps:
    """Decode steps of one number of sequences, with as many adapters as benchmarks/tensor_parallel.py loads."""

    batch: int
    fully_sharded_ms: float
    not_fully_sharded_ms: float

    @property
    def best_is_fully_sharded(self) -> bool:
        return self.not_fully_sharded_ms > (1 - WORTHWHILE) * self.fully_sharded_ms


StepsOfSize = Mapping[int, Sequence[MeasuredSteps]]  # by the number of ranks


def choose(steps: Sequence[MeasuredSteps], max_num_seqs: int) -> bool | None:
    """Returns whether adapters should be fully sharded, or None if nothing was measured.

    The smallest batch that was measured and has at least max_num_seqs sequences decides, or else the largest.
    """
    if not steps:
        return None
    ascending = sorted(steps, key=lambda measured: measured.batch)
    decisive = next((measured for measured in ascending if measured.batch >= max_num_seqs), ascending[-1])
    return decisive.best_is_fully_sharded


def with_sharding(lora: LoRAConfig, gpu: str | None, num_ranks: int, max_num_seqs: int) -> LoRAConfig:
    """Returns the options with fully_sharded_loras filled in, if it is not set and there are data for it.

    Args:
        gpu: The name that CUDA reports, or None for a CPU.
    """
    if lora.fully_sharded_loras is not None or gpu is None or num_ranks == 1:
        return lora
    steps = read_steps(measured_path(FOLDER, gpu, SUFFIX)).get(num_ranks, ())
    return replace(lora, fully_sharded_loras=choose(steps, max_num_seqs))


def with_sharding_of(lora: LoRAConfig, group: TPGroup, device: torch.device, max_num_seqs: int) -> LoRAConfig:
    """Computes with_sharding() for this rank's GPU. All ranks must call it.

    If the ranks' GPUs differ, adapters are fully sharded only if that is every rank's choice.
    """
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    chosen = with_sharding(lora, gpu, group.size, max_num_seqs)
    if group.size == 1:
        return chosen
    fully = bool(group.least(int(chosen.is_fully_sharded(device)), device))
    if gpu is not None and not fully and lora.fully_sharded_loras is None:
        log.info(
            "adapters are not fully sharded, since steps with max_num_seqs=%d on %d x %s are faster so; set "
            "fully_sharded_loras to have smaller adapters instead",
            max_num_seqs, group.size, gpu,
        )  # fmt: skip
    return replace(chosen, fully_sharded_loras=fully)


def sharding_path(gpu: str) -> Path:
    """Returns the file that measurements write for the GPU."""
    return tuned_path(FOLDER, gpu, SUFFIX)


def read_steps(path: Path) -> dict[int, list[MeasuredSteps]]:
    """Reads the steps by number of ranks. Returns nothing if there is no such file."""
    if not path.exists():
        return {}
    fields: dict[str, list[dict[str, Any]]] = json.loads(path.read_text())
    return {int(size): [MeasuredSteps(**step) for step in steps] for size, steps in fields.items()}


def write_steps(path: Path, steps_of_size: StepsOfSize) -> None:
    """Writes the steps into the file, which keeps those of other numbers of ranks."""
    merged = {**read_steps(path), **steps_of_size}
    path.parent.mkdir(parents=True, exist_ok=True)
    fields = {str(size): [asdict(step) for step in steps] for size, steps in sorted(merged.items())}
    path.write_text(json.dumps(fields, indent=1) + "\n")
