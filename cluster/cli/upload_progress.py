"""Shows how far an upload has come, on a terminal and for people only."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from lorafleet.client.admin import OnUpload


@contextmanager
def upload_progress(output: str) -> Iterator[OnUpload | None]:
    """Yields a function that draws the bar on stderr, or None if stderr is no terminal or the output is JSON. The bar
    appears with the first call and vanishes at the end of the block."""
    if output == "json" or not sys.stderr.isatty():
        yield None
        return
    with ExitStack() as stack:
        bar: OnUpload | None = None

        def draw(num_sent: int, num_bytes: int) -> None:
            nonlocal bar
            bar = bar or _open_bar(stack, num_bytes)
            bar(num_sent, num_bytes)

        yield draw


def _open_bar(stack: ExitStack, num_bytes: int) -> OnUpload:
    # rich is imported here, so that commands without an upload do not wait for it.
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    progress = stack.enter_context(Progress(*columns, console=Console(stderr=True), transient=True))
    task = progress.add_task("Uploading", total=num_bytes)

    def draw(num_sent: int, _: int) -> None:
        description = "Uploading" if num_sent < num_bytes else "Uploaded; the replicas load it"
        progress.update(task, completed=num_sent, description=description)

    return draw
