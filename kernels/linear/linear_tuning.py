"""The shapes in which kernels/linear/split_linear.py computes a linear of the base, instead of cuBLAS.

They are data in tuned/<GPU>.json, measured by `python -m lorafleet.kernels.linear.tune_linear`, by the linear's size
and the number of rows. cuBLAS computes a linear without data, so a GPU without a file uses cuBLAS for everything.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import torch

from lorafleet.kernels.tuned_data import measured_path, tuned_path

FOLDER = Path(__file__).parent / "tuned"
# Upper bounds of the classes of steps by their number of rows. cuBLAS computes larger steps.
ROW_BOUNDS = (1, 8, 16, 32, 64, 96, 128, 160, 192, 224, 256)
MOST_SPLIT_ROWS = 64  # the most rows of split_linear; for more, cuBLAS computes all linears that are not gated
MIN_BLOCK_T = 16  # rows of the smallest tile
PREFETCH_CHUNK = 256  # inputs that one instruction requests; 512 bytes
DTYPES = (torch.float16, torch.bfloat16)
MAX_SPLITS = 16
EARLY_CAPABILITY = (9, 0)  # compute capability from which kernels start early, and load tiles by descriptors

_BLOCKS = (16, 32, 64, 128, 256)
_WARPS = (1, 2, 4, 8, 16)
_BLOCKS_T = (0, 64, 128, 256)


@dataclass(frozen=True, slots=True)
class LinearShape:
    """The tiles of a linear, and how its launches follow each other."""

    block_o: int = 64  # outputs of one program; of each half if the linear is gated
    block_d: int = 64  # inputs of one loop step
    splits: int = 1  # programs that share the inputs of a tile; each writes a float32 sum
    stages: int = 6  # loop steps that are loaded ahead
    warps: int = 4
    prefetch: int = 0  # inputs of each row of W that are requested before the kernel ahead has ended
    early: bool = True  # start before the kernel ahead has ended, as do the readers (programmatic dependent launch)
    gated: bool = False  # gate_up only: multiply SiLU(gate) by up in the same kernel
    block_t: int = 0  # rows of one program, if there are more than MOST_SPLIT_ROWS; 0 if one program has all rows

    def __post_init__(self) -> None:
        for field, value, allowed in (
            ("block_o", self.block_o, _BLOCKS),
            ("block_d", self.block_d, _BLOCKS),
            ("warps", self.warps, _WARPS),
            ("splits", self.splits, range(1, MAX_SPLITS + 1)),
            ("stages", self.stages, range(1, 13)),
            ("block_t", self.block_t, _BLOCKS_T),
            ("prefetch", self.prefetch, (0, *(PREFETCH_CHUNK << n for n in range(5)))),
        ):
            if value not in allowed:
                choices = ", ".join(map(str, allowed))
                raise ValueError(f"{field}={value} is not possible. Use one of {choices}.")
        if self.gated and self.splits > 1:
            raise ValueError(f"gated=true needs all inputs in one program. Use splits=1 instead of {self.splits}.")
        if self.block_t > 0 and (not self.gated or self.prefetch > 0):
            raise ValueError(f"block_t={self.block_t} needs gated=true and prefetch=0. Use block_t=0 otherwise.")

    @property
    def is_wide(self) -> bool:
        """Whether the shape is for more than MOST_SPLIT_ROWS, where only gated_linear has a kernel."""
        return self.block_t > 0

    def fits(self, outputs: int, inputs: int) -> bool:
        """Returns whether whole tiles cover a linear of this size, and every split has a loop step."""
        halves = 2 if self.gated else 1
        return (
            outputs % (halves * self.block_o) == 0
            and inputs % self.block_d == 0
            and self.last_steps(inputs) > 0
            and inputs % PREFETCH_CHUNK == 0
        )

    def steps(self, inputs: int) -> int:
        """Returns the number of loop steps of a split. The last one may have fewer."""
        return -(-inputs // self.block_d // self.splits)

    def last_steps(self, inputs: int) -> int:
        """Returns the number of loop steps of the last split."""
        return inputs // self.block_d - (self.splits - 1) * self.steps(inputs)


def may_start_early(device: torch.device) -> bool:
    """Returns whether kernels may start before the kernel ahead has ended (programmatic dependent launch)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= EARLY_CAPABILITY


LinearShapes = dict[str, dict[int, LinearShape]]  # by name_of a linear, then by one of ROW_BOUNDS


def name_of(outputs: int, inputs: int) -> str:
    """Returns the key of a linear's size in a data file."""
    return f"{outputs}x{inputs}"


def linear_shape(
    device: torch.device, dtype: torch.dtype, outputs: int, inputs: int, num_rows: int
) -> LinearShape | None:
    """Returns the shape of a linear for steps of this many rows, or None if cuBLAS computes it.

    Raises ValueError if the GPU's data has shapes that are not possible.
    """
    if device.type != "cuda" or dtype not in DTYPES:
        return None
    gpu = torch.cuda.get_device_name(device)
    shape = choose_shape(_of_gpu(gpu), outputs, inputs, num_rows)
    needs_hopper = shape is not None and (shape.early or shape.is_wide)
    if needs_hopper and not may_start_early(device):
        raise ValueError(
            f"{measured_shapes_path(gpu)}: {gpu} can neither start kernels early nor load tiles by descriptors. "
            f"Use early=false, and no data for more than {MOST_SPLIT_ROWS} rows, or measure it again."
        )
    return shape


def choose_shape(
    shapes: Mapping[str, dict[int, LinearShape]], outputs: int, inputs: int, num_rows: int
) -> LinearShape | None:
    bound = next((bound for bound in ROW_BOUNDS if num_rows <= bound), None)
    return None if bound is None else shapes.get(name_of(outputs, inputs), {}).get(bound)


def shapes_path(gpu: str) -> Path:
    """Returns the file that tuning writes for the GPU."""
    return tuned_path(FOLDER, gpu)


def measured_shapes_path(gpu: str) -> Path:
    """Returns the file that the engine reads for the GPU."""
    return measured_path(FOLDER, gpu)


def read_shapes(path: Path) -> LinearShapes:
    """Reads the shapes from a data file, and returns none if there is no such file.

    Raises ValueError if the file has shapes that are not possible.
    """
    if not path.exists():
        return {}
    found: LinearShapes = {}
    for name, by_rows in json.loads(path.read_text()).items():
        outputs, inputs = (int(size) for size in name.split("x"))
        for rows, fields in by_rows.items():
            if int(rows) not in ROW_BOUNDS:
                raise ValueError(f"{path}: {name} has {rows} rows. Use {', '.join(map(str, ROW_BOUNDS))}.")
            shape = LinearShape(**fields)
            if not shape.fits(outputs, inputs):
                raise ValueError(f"{path}: the tiles for {rows} rows do not divide {name}. Measure it again.")
            if shape.is_wide != (int(rows) > MOST_SPLIT_ROWS):
                raise ValueError(
                    f"{path}: {name} has block_t={shape.block_t} for {rows} rows. Use 0 for up to {MOST_SPLIT_ROWS} "
                    "rows, and another value beyond."
                )
            found.setdefault(name, {})[int(rows)] = shape
    return found


def write_shapes(path: Path, shapes: Mapping[str, Mapping[int, LinearShape]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fields = {name: {str(rows): asdict(by_rows[rows]) for rows in sorted(by_rows)} for name, by_rows in shapes.items()}
    path.write_text(json.dumps(fields, indent=1) + "\n")
    _of_gpu.cache_clear()


@cache
def _of_gpu(gpu: str) -> LinearShapes:
    return read_shapes(measured_shapes_path(gpu))
