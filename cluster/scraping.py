"""The metrics of all replicas in one answer, whichever replica is asked: each has labelled its own with its id.

A replica that does not answer in time is missing for that scrape, and lorafleet_scrape_complete is 0 then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

PATIENCE_S = 5.0  # Prometheus itself waits for ten

_COMPLETE = """\
# HELP lorafleet_scrape_complete Whether every replica answered this scrape: 1, else 0.
# TYPE lorafleet_scrape_complete gauge
lorafleet_scrape_complete {}
"""


async def scrape_all(replicas: Any, render_own: Callable[[], Awaitable[bytes]]) -> bytes:
    """replicas: a handle whose deployment has render_metrics(). render_own: this replica's, which is all there is where
    one of the others is silent."""
    try:
        answers = await replicas.broadcast("render_metrics").results_async(timeout_s=PATIENCE_S, return_exceptions=True)
    except TimeoutError:
        answers = [await render_own(), TimeoutError()]
    texts = [answer for answer in answers if isinstance(answer, bytes)]
    merged = await asyncio.to_thread(merge, texts)
    return merged + _COMPLETE.format(int(len(texts) == len(answers))).encode()


def merge(texts: Iterable[bytes]) -> bytes:
    """Prometheus' text format wants each metric's lines together, its HELP and TYPE once."""
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
