"""Lets a server of `lorafleet serve` finish the answers that it has begun before it ends.

First HAProxy accepts no more connections, and the replicas reject requests that come over open ones. Batches stop, and
go on when the server is started again. Then this waits until neither a replica nor HAProxy has a request.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

POLL_S = 0.3
ANSWER_S = 10.0  # Seconds that a replica may take to say how many requests it has.


async def finish_requests(
    close: Callable[[], int],
    ask_replicas: Callable[[], Awaitable[int]],
    has_ended: Callable[[], bool],
    timeout_s: float,
    report: Callable[[int], None],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> int:
    """Returns the number of requests that are left after timeout_s seconds, or when Ray has ended.

    Args:
        close: Closes the ingress, and returns the number of requests in it.
        ask_replicas: Makes replicas reject requests, and returns the number of those in progress.
        report: Gets the number of requests once, if there are some.
    """
    deadline, is_reported = clock() + timeout_s, False
    num_idle = 0  # Looks in a row that have found nothing. A request may be between HAProxy and a replica at one.
    while True:
        num_requests = max(close(), await ask_replicas())
        num_idle = 0 if num_requests else num_idle + 1
        if num_idle >= 2 or clock() > deadline or has_ended():
            return num_requests
        if num_requests and not is_reported:
            report(num_requests)
            is_reported = True
        await sleep(POLL_S)


async def ask_replicas_to_finish(handle: Any) -> int:
    """Makes the replicas reject requests, and returns the number of those in progress. A replica that does not answer
    in time counts as one that has some. `handle` is that of a deployment which has finish()."""
    from ray.serve.exceptions import RayServeException  # Serve reads the environment when it is imported.

    try:
        answers = await handle.broadcast("finish").results_async(timeout_s=ANSWER_S, return_exceptions=True)
    except TimeoutError:
        return 1
    except RayServeException:  # No replica is left.
        return 0
    return sum(answer for answer in answers if isinstance(answer, int))
