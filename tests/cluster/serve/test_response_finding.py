"""A stored response is found at whichever replica has it."""

from __future__ import annotations

from typing import Any

import pytest

from answering_replicas import AnsweringReplicas
from lorafleet.api.stored.response_query import ResponseFound, ResponseQuery
from lorafleet.cluster.serve.response_finding import find_response
from lorafleet.protocol.errors import Overloaded

QUERY = ResponseQuery("tenant 'acme'", "resp_1", "events", 3)
FOUND = ResponseFound(b"{}", False, True, [b"event"], True)


def replicas(answers: list[Any]) -> AnsweringReplicas:
    return AnsweringReplicas("find_response", QUERY, answers)


async def test_the_replica_that_has_the_response_answers() -> None:
    assert await find_response(replicas([None, FOUND, None]), QUERY) == FOUND
    assert await find_response(replicas([RuntimeError("gone"), FOUND]), QUERY) == FOUND


async def test_a_response_that_no_replica_has_is_not_found() -> None:
    assert await find_response(replicas([None, None]), QUERY) is None


@pytest.mark.parametrize("answers", [[None, RuntimeError("gone")], []])
async def test_a_silent_replica_may_have_the_response(answers: list[Any]) -> None:
    with pytest.raises(Overloaded, match="does not answer"):
        await find_response(replicas(answers), QUERY)
