"""A stored response is found at whichever replica has it."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

import pytest

from lorafleet.api.stored.response_query import ResponseFound, ResponseQuery
from lorafleet.cluster.serve.response_finding import find_response
from lorafleet.protocol.errors import Overloaded

QUERY = ResponseQuery("tenant 'acme'", "resp_1", "events", 3)
FOUND = ResponseFound(b"{}", False, True, [b"event"], True)


@dataclass
class Replicas:
    """A handle of a deployment, whose replicas give these answers."""

    answers: list[Any]

    def broadcast(self, method: str, query: ResponseQuery) -> Replicas:
        assert (method, pickle.loads(pickle.dumps(query))) == ("find_response", QUERY)
        return self

    async def results_async(self, timeout_s: float, *, return_exceptions: bool) -> list[Any]:
        assert timeout_s > 0 and return_exceptions
        if not self.answers:
            raise TimeoutError
        return [pickle.loads(pickle.dumps(answer)) for answer in self.answers]


async def test_the_replica_that_has_the_response_answers() -> None:
    assert await find_response(Replicas([None, FOUND, None]), QUERY) == FOUND
    assert await find_response(Replicas([RuntimeError("gone"), FOUND]), QUERY) == FOUND


async def test_a_response_that_no_replica_has_is_not_found() -> None:
    assert await find_response(Replicas([None, None]), QUERY) is None


@pytest.mark.parametrize("answers", [[None, RuntimeError("gone")], []])
async def test_a_silent_replica_may_have_the_response(answers: list[Any]) -> None:
    with pytest.raises(Overloaded, match="does not answer"):
        await find_response(Replicas(answers), QUERY)
