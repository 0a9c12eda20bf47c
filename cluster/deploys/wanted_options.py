"""Takes a deploy's options into a running replica, again if something fails.

build() has asked the replica before (running_check.py), so a failure means that something has changed since, such as
an adapter's files. Ray Serve would stop a replica that raises here, so it serves on with the former options instead.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from lorafleet.cluster.config import AppArgs
from lorafleet.cluster.deploys.changed_options import UserConfig, with_user_config
from lorafleet.cluster.deploys.sealed_secrets import unseal
from lorafleet.cluster.task_set import TaskSet

AGAIN_S = 5.0  # Seconds from a failure to the next attempt.

logger = logging.getLogger("lorafleet.cluster")


class TakesOptions(Protocol):
    """The parts of a running replica."""

    @property
    def args(self) -> AppArgs: ...
    async def change_options(self, args: AppArgs) -> None: ...


class WantedOptions:
    """The options that the last deploy wants of one replica."""

    def __init__(self, parts: TakesOptions) -> None:
        self._parts = parts
        self._wanted: AppArgs | None = None
        self._taking = asyncio.Lock()
        self._tasks = TaskSet()
        self._has_started = False

    async def take(self, user_config: UserConfig) -> None:
        """Takes the options before it returns, or later. Raises ConfigError only at the replica's start."""
        try:
            wanted = self._wanted = with_user_config(self._parts.args, user_config, unseal)
        except Exception:
            if not self._has_started:
                raise
            logger.exception("the options of this deploy are not valid; the replica keeps the former ones")
            return
        self._has_started = True
        if not await self._try(wanted):
            self._tasks.start(self._repeat(wanted))

    def close(self) -> None:
        self._tasks.cancel()

    async def _repeat(self, wanted: AppArgs) -> None:
        is_done = False
        while not is_done:
            await asyncio.sleep(AGAIN_S)
            is_done = await self._try(wanted)

    async def _try(self, wanted: AppArgs) -> bool:
        """Returns whether the replica has these options, or whether a later deploy wants others."""
        async with self._taking:
            if wanted is not self._wanted:
                return True
            try:
                await self._parts.change_options(wanted)
            except Exception:
                logger.exception("the options of a deploy could not be taken; this is tried again in %.0f s", AGAIN_S)
                return False
            return True
