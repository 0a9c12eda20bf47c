"""One test process after the other starts a Ray. A raylet waits 15 s for the ports of an agent, on any machine, and two
that start at once on two cores may take longer."""

from __future__ import annotations

import contextlib
import fcntl
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def rays_turn() -> Iterator[None]:
    with (Path(tempfile.gettempdir()) / "lorafleet-tests-start-of-ray.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # given back when the file is closed, also by a process that is killed
        yield
