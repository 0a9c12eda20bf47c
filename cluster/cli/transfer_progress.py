"""Shows how far an upload or a download has come, on a terminal and for people only."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from lorafleet.client.admin import OnTransfer


@dataclass(frozen=True, slots=True)
class TransferWords:
    going: str
    done: str  # Shown after the last byte, until the block ends.


UPLOAD = TransferWords("Uploading", "Uploaded; the replicas load it")
DOWNLOAD = TransferWords("Downloading", "Downloaded; its digest is checked")


@contextmanager
def transfer_progress(output: str, words: TransferWords) -> Iterator[OnTransfer | None]:
    """Yields a function that draws the bar on stderr, or None if stderr is no terminal or the output is JSON. The bar
    appears with the first call and vanishes at the end of the block."""
    if output == "json" or not sys.stderr.isatty():
        yield None
        return
    with ExitStack() as stack:
        bar: OnTransfer | None = None

        def draw(num_done: int, num_bytes: int) -> None:
            nonlocal bar
            bar = bar or _open_bar(stack, words, num_bytes)
            bar(num_done, num_bytes)

        yield draw


def _open_bar(stack: ExitStack, words: TransferWords, num_bytes: int) -> OnTransfer:
    # rich is imported here, so that commands without a transfer do not wait for it.
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    progress = stack.enter_context(Progress(*columns, console=Console(stderr=True), transient=True))
    task = progress.add_task(words.going, total=num_bytes)

    def draw(num_done: int, _: int) -> None:
        progress.update(task, completed=num_done, description=words.going if num_done < num_bytes else words.done)

    return draw
