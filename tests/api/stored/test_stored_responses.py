"""Queries for responses of other replicas."""

from __future__ import annotations

import asyncio

import pytest

from lorafleet.api.stored.response_query import ResponseFound, ResponseQuery
from lorafleet.api.stored.response_store import ResponseStore
from lorafleet.api.stored.stored_responses import ASKED, StoredResponses
from lorafleet.protocol.errors import QueueFull, ResponseNotFound


async def test_one_owners_queries_to_all_replicas_are_bounded_and_others_have_their_turn() -> None:
    asked, release, asked_for_beta = list[str](), asyncio.Event(), asyncio.Event()

    async def ask(query: ResponseQuery) -> ResponseFound | None:
        asked.append(query.owner)
        if query.owner == "beta":
            asked_for_beta.set()
        await release.wait()
        return None

    stored = StoredResponses(ResponseStore(1 << 20), ask)
    number = ASKED.running_of_one + ASKED.waiting
    queries = [asyncio.create_task(stored.find(ResponseQuery("acme", str(i)))) for i in range(number)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFull, match="stored responses"):
        await stored.find(ResponseQuery("acme", "one more"))
    queries.append(asyncio.create_task(stored.find(ResponseQuery("beta", "0"))))
    await asked_for_beta.wait()
    assert asked == ["acme"] * ASKED.running_of_one + ["beta"]
    release.set()
    found = await asyncio.gather(*queries, return_exceptions=True)
    assert {type(error) for error in found} == {ResponseNotFound}
