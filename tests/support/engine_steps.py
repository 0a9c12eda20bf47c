"""Steps of an engine that a test drives by itself."""

from __future__ import annotations

import time
from concurrent.futures import Future
from typing import Any

from lorafleet.workers.engine import Engine


def step_until_done(engine: Engine, future: Future[Any]) -> None:
    """Steps until the future is done. Without a pause, the thread that reads adapters would hardly get the interpreter,
    and take seconds for each."""
    while not future.done():
        engine.step()
        time.sleep(0.001)
