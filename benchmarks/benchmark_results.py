"""Defines the JSON file in which a benchmark records its figures, with their units, the command and the hardware.

measured_page.py writes the tables and charts of the documentation from such files.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

import msgspec

Value = bool | int | float | str

PACKAGES = ("torch", "triton", "flashinfer-python")


class Case(msgspec.Struct, frozen=True):
    """One row of figures."""

    settings: Mapping[str, Value]  # The options that differ between the cases of one file.
    figures: Mapping[str, float | None]  # None if there was nothing to measure.


class Hardware(msgspec.Struct, frozen=True):
    gpus: list[str]  # The names of the machine's GPUs; empty without one.
    cpu_cores: int | None  # None if it was not recorded.
    versions: dict[str, str]  # Versions of python and of PACKAGES.


class Results(msgspec.Struct, frozen=True):
    benchmark: str
    command: str
    date: str  # Year, month and day.
    hardware: Hardware
    units: Mapping[str, str]  # Maps the name of a figure to its unit.
    cases: Sequence[Case]
    remark: str = ""

    def figure(self, name: str, **settings: Value) -> float | None:
        """Returns the figure of the first case with these settings, or None if there is no such case."""
        for case in self.cases:
            if settings.items() <= case.settings.items():
                return case.figures.get(name)
        return None


def write_results(path: Path | None, units: Mapping[str, str], cases: Sequence[Case]) -> None:
    """Writes the figures of the script that runs, unless the path is None."""
    unknown = {name for case in cases for name in case.figures} - units.keys()
    assert not unknown, f"figures without a unit: {unknown}"
    if path is None:
        return
    script = Path(sys.argv[0])
    results = Results(script.stem, _command(script), time.strftime("%Y-%m-%d"), this_hardware(), units, cases)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")


def read_results(path: Path) -> Results:
    return msgspec.json.decode(path.read_bytes(), type=Results)


def _command(script: Path) -> str:
    """Returns the command of this process without the option that names the file."""
    words = sys.argv[1:]
    if "--json" in words:
        index = words.index("--json")
        del words[index : index + 2]
    return shlex.join(["python", f"benchmarks/{script.name}", *words])


def this_hardware() -> Hardware:
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return Hardware(_gpus(), os.cpu_count(), versions)


def _gpus() -> list[str]:
    """Returns the names of the GPUs without taking memory on them, since a server may need it all."""
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        done = subprocess.run(query, capture_output=True, text=True)
        if done.returncode == 0:
            return done.stdout.split("\n")[:-1]
    import torch

    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
