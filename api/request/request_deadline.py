"""Limits how long a request may wait to start, by its own header or else by the server's setting.

A request starts when the engine begins to compute it. All time before counts: finding its adapter, and waiting in the
engine's queue (workers/schedule/admission.py).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from starlette.requests import Request

from lorafleet.api.routes.operations import QUEUE_TIMEOUT
from lorafleet.api.telemetry.traced import Trace
from lorafleet.protocol.errors import InvalidRequest, QueueTimeout
from lorafleet.protocol.limits import QUEUE_TIMEOUT_S, cut


@dataclass(frozen=True, slots=True)
class RequestDeadline:
    timeout_s: float | None  # None: no limit.
    began_s: float  # Time of arrival, in seconds of time.monotonic().

    @classmethod
    def of(cls, request: Request, default_s: float | None) -> RequestDeadline:
        """Returns the deadline of a request that has just arrived. Raises InvalidRequest."""
        given = request.headers.get(QUEUE_TIMEOUT)
        timeout_s = default_s if given is None else _read(given)
        return cls(timeout_s, time.monotonic())

    def left_s(self) -> float | None:
        if self.timeout_s is None:
            return None
        return max(0.0, self.began_s + self.timeout_s - time.monotonic())

    @asynccontextmanager
    async def while_finding_models(self, trace: Trace) -> AsyncIterator[None]:
        """Runs the block, which finds the models. Raises QueueTimeout if the time expires inside it."""
        try:
            async with asyncio.timeout(self.left_s()) as scope:
                with trace.part("find adapter"):
                    yield
        except TimeoutError:
            if not scope.expired():
                raise
            raise QueueTimeout(
                f"The request could not start within {self.timeout_s:g} s: its adapter is still being looked up and "
                f"read. Try again later, or allow a longer wait ({QUEUE_TIMEOUT})."
            ) from None


def _read(given: str) -> float:
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if seconds not in QUEUE_TIMEOUT_S:
        raise InvalidRequest(
            f"The header {QUEUE_TIMEOUT} is {cut(repr(given))}; it must be a number of seconds in {QUEUE_TIMEOUT_S}.",
            QUEUE_TIMEOUT,
        )
    return seconds
