"""Runs the other ranks of a replica as processes of this machine, for an engine without Ray (offline/llm.py)."""

from __future__ import annotations

import logging
import multiprocessing
import os
import shutil
import tempfile
import threading
import time
from multiprocessing.connection import wait

import torch

from lorafleet.protocol.engine_config import EngineConfig
from lorafleet.protocol.errors import ConfigError, EngineDead
from lorafleet.protocol.transport.addresses import RankAddresses

log = logging.getLogger(__name__)

STOP_S = 10
LAST_WORDS_S = 1.0


class RankProcesses:
    """Ranks 1 to N - 1. They are started at once, and wait for rank 0. Raises ConfigError if there are fewer GPUs."""

    def __init__(self, config: EngineConfig) -> None:
        size = config.tensor_parallel_size
        count = torch.cuda.device_count() if config.device != "cpu" and torch.cuda.is_available() else None
        if count is not None and count < size:
            raise ConfigError(
                f"tensor_parallel_size={size} needs {size} GPUs; torch sees only {count}. Lower it.",
                "tensor_parallel_size",
            )
        self._folder = tempfile.mkdtemp(prefix="lf-ranks-")
        self.addresses = RankAddresses(size, self._folder)
        context = multiprocessing.get_context("spawn")  # never fork: CUDA does not survive it
        self.processes = [
            context.Process(target=_run, args=(config, rank, self.addresses), daemon=True) for rank in range(1, size)
        ]
        for process in self.processes:
            process.start()
        self._gone_s: float | None = None

    def check(self) -> None:
        """Raises EngineDead if a rank has ended, after LAST_WORDS_S in which its last message may still arrive."""
        gone = next((rank for rank, process in enumerate(self.processes, 1) if process.exitcode is not None), None)
        if gone is None:
            return
        self._gone_s = self._gone_s or time.monotonic()
        if time.monotonic() - self._gone_s > LAST_WORDS_S:
            code = self.processes[gone - 1].exitcode
            raise EngineDead(
                f"the process of rank {gone} of the replica has ended with exit code {code} before it was ready. If "
                'your own script starts the engine, it must do so below `if __name__ == "__main__":`, because each '
                "rank imports the script."
            )

    def close(self) -> None:
        """Waits for the processes to end, and kills those that do not. Call it after closing the engine, which orders
        them to stop."""
        for process in self.processes:
            process.join(STOP_S)
            process.kill()
            process.join()
        shutil.rmtree(self._folder, ignore_errors=True)


def _run(config: EngineConfig, rank: int, addresses: RankAddresses) -> None:
    from lorafleet.workers.follower import RankWorker  # imported here, since the parent does not need it

    logging.basicConfig(level=logging.WARNING)
    if config.device != "cpu":  # before CUDA is initialized; a rank sees only its own GPU, as Ray's actors do
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[rank] if visible else str(rank)
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    RankWorker(config, rank, addresses).wait()


def _end_with_parent() -> None:
    """Ends this process as soon as its parent ends, even during a collective that waits for it. A killed parent stops
    nobody."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
