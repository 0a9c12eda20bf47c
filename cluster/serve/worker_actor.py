"""Runs one rank of a replica's engine as a Ray actor. Rank 0 is the GPUWorker, and the others follow it.

The actor starts empty and builds the worker in start(), so that an error in the model or the configuration is
returned as itself and not as the death of an actor.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from lorafleet.cluster.directory.directory_actor import DirectoryPlace, get_or_create
from lorafleet.cluster.directory.directory_calls import ProgressCall
from lorafleet.cluster.directory.directory_messages import Progress
from lorafleet.cluster.serve.neighborhood import neighbor_finder
from lorafleet.protocol.engine_config import EngineConfig
from lorafleet.protocol.errors import EngineDead
from lorafleet.protocol.messages import EngineHello
from lorafleet.protocol.transport.addresses import RankAddresses
from lorafleet.resolvers.private_files import keep_private

FIRST_BUNDLE = 1  # Rank 0's bundle in the replica's placement group; the replica itself has bundle 0.


@dataclass(frozen=True, slots=True)
class StartOrder:
    """The arguments with which each rank of a replica is started."""

    config: EngineConfig
    address: str  # Where the replica connects to rank 0.
    addresses: RankAddresses | None  # Where the ranks connect to each other; None if there is only one.
    directory: DirectoryPlace  # Receives the progress messages.
    replica_id: str  # The sender of those messages.
    has_neighbors: bool  # Whether the rank fetches adapters from other nodes before it asks their source.


class WorkerActor:
    """The actor of one rank. Its calls run one after another; the engine loop runs in its own thread."""

    def __init__(self, rank: int) -> None:
        keep_private()
        self._rank = rank

    def start(self, order: StartOrder) -> EngineHello | None:
        """Loads the model in this process. Rank 0 returns a description of its engine. Meanwhile it sends its log
        lines to the directory, for users who wait. The other ranks return None and send nothing, since they do the
        same things at the same time."""
        # Imported here, so that only this process pays for torch.
        from lorafleet.workers.follower import RankWorker
        from lorafleet.workers.worker import GPUWorker

        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        find = neighbor_finder(order.directory, order.replica_id) if order.has_neighbors else None
        if self._rank > 0:
            assert order.addresses is not None
            self._worker: GPUWorker | RankWorker = RankWorker(order.config, self._rank, order.addresses, find)
            return None
        handler = _ProgressHandler(order.directory, order.replica_id)
        logging.getLogger("lorafleet.workers").addHandler(handler)
        try:
            worker = GPUWorker(order.config, order.address, order.addresses, find)
        finally:
            logging.getLogger("lorafleet.workers").removeHandler(handler)
        self._worker = worker
        return worker.hello()

    def check_health(self) -> None:
        self._worker.check_health()

    def shutdown(self) -> None:
        self._worker.shutdown()


class _ProgressHandler(logging.Handler):
    def __init__(self, directory: DirectoryPlace, replica_id: str) -> None:
        super().__init__(logging.INFO)
        self._directory = get_or_create(directory)
        self._replica_id = replica_id

    def emit(self, record: logging.LogRecord) -> None:
        self._directory.ask_soon(ProgressCall(Progress(self._replica_id, record.getMessage())))


class WorkerHandle:
    """The replica's side of one rank. Its calls raise the worker's own errors, or EngineDead if the process is gone."""

    def __init__(self, rank: int, group: PlacementGroup, num_cpus: float, num_gpus: int) -> None:
        bundle = FIRST_BUNDLE + rank
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
        # Ray's head would store each of the last 100 000 calls, and health is checked continually.
        options = {
            "num_cpus": num_cpus,
            "num_gpus": num_gpus,
            "scheduling_strategy": strategy,
            "enable_task_events": False,
        }
        self._rank = rank
        named = type(f"WorkerActor:rank{rank}", (WorkerActor,), {})  # Ray uses it as the process title.
        self._actor: Any = ray.remote(named).options(**options).remote(rank)

    async def start(self, order: StartOrder) -> EngineHello | None:
        hello: EngineHello | None = await self._call("start", order)
        return hello

    async def check_health(self) -> None:
        await self._call("check_health")

    async def shutdown(self) -> None:
        """Makes the worker close its sockets and free its memory."""
        await self._call("shutdown")

    def kill(self) -> None:
        """Ends the process, whatever it is doing."""
        ray.kill(self._actor)

    async def _call(self, method: str, *arguments: Any) -> Any:
        try:
            return await getattr(self._actor, method).remote(*arguments)
        except RayTaskError as error:
            raise error.cause from None
        except RayError as error:
            raise EngineDead(
                f"The worker process of rank {self._rank} ended: {type(error).__name__}. It is being replaced."
            ) from error
