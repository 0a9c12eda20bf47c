"""Shows on the console how far the replicas of `lorafleet serve` have come with their start."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

QUARTER = 25  # Percent.


class StartProgress:
    """Prints progress lines as they come. While a replica's weights are being loaded it shows a bar on a terminal, and
    prints a line for each quarter elsewhere, such as in a log file."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bars = Progress(TextColumn("  {task.description}"), BarColumn(), console=console, transient=True)
        self._bar_of: dict[str, TaskID] = {}
        self._quarters: dict[str, int] = {}  # Quarters that were printed, by replica.

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._bars.stop()

    def line(self, replica_id: str, text: str) -> None:
        """Shows a replica's line. "WHAT NUMBER %" is the progress of a load."""
        head, _, percent = text.removesuffix(" %").rpartition(" ")
        if not text.endswith(" %"):
            self._print(replica_id, text)
        elif self._console.is_terminal:
            if replica_id not in self._bar_of:
                self._bar_of[replica_id] = self._bars.add_task(f"{replica_id}: {head}", total=100)
            self._bars.update(self._bar_of[replica_id], completed=float(percent))
        else:
            quarter = int(float(percent) // QUARTER)
            if quarter > self._quarters.get(replica_id, 0):
                self._print(replica_id, text)
            self._quarters[replica_id] = quarter

    def _print(self, replica_id: str, text: str) -> None:
        self._console.print(f"  {replica_id}: {text}")
