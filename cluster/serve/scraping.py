"""Merges the metrics of all replicas and of the directory into one answer, whichever replica is scraped. Each
replica has labeled its own metrics with its id.

A replica or directory that does not answer in time is missing from that scrape; lorafleet_scrape_complete is then 0.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from lorafleet.api.access.work_threads import on_duty

PATIENCE_S = 5.0  # Seconds; Prometheus itself waits for ten.

_COMPLETE = """\
# HELP lorafleet_scrape_complete 1 if every replica and the directory answered this scrape, otherwise 0.
# TYPE lorafleet_scrape_complete gauge
lorafleet_scrape_complete {}
"""


Render = Callable[[], Awaitable[bytes]]


async def scrape_all(replicas: Any, render_own: Render, render_directory: Render) -> bytes:
    """Returns the merged metrics. `replicas` is a handle whose deployment has render_metrics(). If one of the
    replicas does not answer in time, only the metrics of this replica (`render_own`) are included."""
    of_replicas, of_directory = await asyncio.gather(
        _of_replicas(replicas, render_own), _of_directory(render_directory)
    )
    answers = [*of_replicas, of_directory]
    texts = [answer for answer in answers if isinstance(answer, bytes)]
    merged = await on_duty(merge, texts)
    return merged + _COMPLETE.format(int(len(texts) == len(answers))).encode()


async def _of_replicas(replicas: Any, render_own: Render) -> list[Any]:
    try:
        answers: list[Any] = await replicas.broadcast("render_metrics").results_async(
            timeout_s=PATIENCE_S, return_exceptions=True
        )
    except TimeoutError:
        return [await render_own(), TimeoutError()]
    return answers


async def _of_directory(render: Render) -> bytes | Exception:
    try:
        return await asyncio.wait_for(render(), PATIENCE_S)
    except Exception as error:  # The directory is being restarted.
        return error


def merge(texts: Iterable[bytes]) -> bytes:
    """Merges texts in Prometheus's format, which requires the lines of each metric to be together, with its HELP and
    TYPE once."""
    metrics: dict[str, list[str]] = {}
    for text in texts:
        lines = metrics.setdefault("", [])
        for line in text.decode().splitlines():
            if line.startswith("# HELP "):
                name = line.split(" ", 3)[2]
                lines = metrics.setdefault(name, [])
            if not line.startswith("#") or line not in lines[:2]:
                lines.append(line)
    return "".join(f"{line}\n" for lines in metrics.values() for line in lines).encode()
