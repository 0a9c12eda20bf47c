"""One GPUWorker as a Ray actor, started and stopped by its replica.

The actor starts empty and builds the worker in `start`, so that an error of the model or of the configuration comes
back as itself and not as the death of an actor.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from lorafleet.cluster.directory import Progress
from lorafleet.cluster.directory_actor import get_or_create
from lorafleet.workers.config import EngineConfig
from lorafleet.workers.errors import EngineDead
from lorafleet.workers.messages import EngineHello

WORKER_BUNDLE = 1  # of the replica's placement group; the replica itself has bundle 0
STOP_S = 5.0

logger = logging.getLogger("lorafleet.cluster")


class WorkerActor:
    """Calls one after another; the engine loop runs in a thread of its own."""

    def start(self, config: EngineConfig, address: str, directory: str, replica_id: str) -> EngineHello:
        """Loads the model. What the worker logs meanwhile is told to the directory too, for whoever waits."""
        from lorafleet.workers.worker import GPUWorker  # here, so that only this process pays for torch

        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        teller = _TellDirectory(directory, replica_id)
        logging.getLogger("lorafleet.workers").addHandler(teller)
        try:
            self._worker = GPUWorker(config, address)
        finally:
            logging.getLogger("lorafleet.workers").removeHandler(teller)
        return self._worker.hello()

    def check_health(self) -> None:
        self._worker.check_health()

    def shutdown(self) -> None:
        self._worker.shutdown()


class _TellDirectory(logging.Handler):
    def __init__(self, directory: str, replica_id: str) -> None:
        super().__init__(logging.INFO)
        self._directory = get_or_create(directory)
        self._replica_id = replica_id

    def emit(self, record: logging.LogRecord) -> None:
        self._directory.note_soon(Progress(self._replica_id, record.getMessage()))


class WorkerHandle:
    """The replica's side. Raises the worker's own errors; EngineDead where the process is gone."""

    def __init__(self, num_cpus: float, num_gpus: int) -> None:
        group = get_current_placement_group()
        assert group is not None, "a replica has a placement group: see cluster/app.py"
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=WORKER_BUNDLE)
        options = {"num_cpus": num_cpus, "num_gpus": num_gpus, "scheduling_strategy": strategy}
        self._started = False
        self._actor: Any = ray.remote(WorkerActor).options(**options).remote()

    async def start(self, config: EngineConfig, address: str, directory: str, replica_id: str) -> EngineHello:
        hello: EngineHello = await self._call("start", config, address, directory, replica_id)
        self._started = True
        return hello

    async def check_health(self) -> None:
        await self._call("check_health")

    async def stop(self) -> None:
        """Lets it close its socket and free its memory, then ends the process either way."""
        if self._started:
            try:
                await asyncio.wait_for(self._call("shutdown"), STOP_S)
            except Exception as error:
                logger.warning("the worker did not stop by itself: %r", error)
        ray.kill(self._actor)

    async def _call(self, method: str, *arguments: Any) -> Any:
        try:
            return await getattr(self._actor, method).remote(*arguments)
        except RayTaskError as error:
            raise error.cause from None
        except RayError as error:
            raise EngineDead(f"The worker process ended: {type(error).__name__}. It is being replaced.") from error
