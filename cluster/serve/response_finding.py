"""Finds a stored response at the replica that has generated it, by asking all replicas at once.

Responses stay where they were generated, so that storing one costs no message. Only requests for a response that
arrive at another replica cost one to each.
"""

from __future__ import annotations

import logging
from typing import Any

from lorafleet.api.stored.response_query import ResponseFound, ResponseQuery
from lorafleet.protocol.errors import Overloaded

PATIENCE_S = 5.0

logger = logging.getLogger("lorafleet.cluster")


async def find_response(replicas: Any, query: ResponseQuery) -> ResponseFound | None:
    """Returns the answer of the replica that has the response, or None if all replicas say that they do not.

    `replicas` is a handle whose deployment has find_response(). Raises Overloaded if a replica does not answer.
    """
    try:
        answers = await replicas.broadcast("find_response", query).results_async(
            timeout_s=PATIENCE_S, return_exceptions=True
        )
    except TimeoutError as error:
        answers = [error]
    found = next((answer for answer in answers if isinstance(answer, ResponseFound)), None)
    silent = [answer for answer in answers if isinstance(answer, Exception)]
    if found is None and silent:
        logger.warning("a replica did not say whether it has the response %r: %r", query.response_id, silent[0])
        raise Overloaded("A replica that may have this response does not answer; try again in a moment.")
    return found
