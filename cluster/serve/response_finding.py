"""Finds a stored response at the replica that has generated it, by asking all replicas at once.

Responses stay where they were generated, so that storing one costs no message. Only requests for a response that
arrive at another replica cost one to each.
"""

from __future__ import annotations

import logging
from typing import Any

from lorafleet.api.stored.response_query import ResponseFound, ResponseQuery
from lorafleet.cluster.replica_search import find_answer
from lorafleet.protocol.errors import Overloaded

PATIENCE_S = 5.0

logger = logging.getLogger("lorafleet.cluster")


async def find_response(replicas: Any, query: ResponseQuery) -> ResponseFound | None:
    """Returns the answer of the replica that has the response, or None if all replicas say that they do not.

    `replicas` is a handle whose deployment has find_response(). Raises Overloaded if a replica does not answer.
    """
    found, error = await find_answer(replicas, "find_response", query, ResponseFound, PATIENCE_S)
    if found is None and error is not None:
        logger.warning("a replica did not say whether it has the response %r: %r", query.response_id, error)
        raise Overloaded("A replica that may have this response does not answer; try again in a moment.")
    return found
