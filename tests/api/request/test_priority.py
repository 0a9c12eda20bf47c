from __future__ import annotations

from dataclasses import replace
from typing import Any

import httpx
import pytest

from lorafleet.api.access.caller import ANONYMOUS, Caller
from lorafleet.api.access.gate import Gate
from lorafleet.api.request.priority import checked_priority
from lorafleet.protocol.errors import InvalidRequest
from lorafleet.protocol.limits import BACKGROUND

HI = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/chat/completions", HI), ("/v1/completions", {"prompt": "hi"})], ids=["chat", "text"]
)
async def test_a_requests_priority_reaches_the_engine(
    http: httpx.AsyncClient, engine: Any, path: str, body: dict[str, Any]
) -> None:
    for priority in (-3, 7, None):
        assert (await http.post(path, json={"model": "sql", "priority": priority} | body)).status_code == 200
    assert [request.priority for request in engine.requests] == [-3, 7, 0]


def test_where_there_are_keys_only_an_administrator_steps_forward() -> None:
    gate = Gate(None, lambda: {})
    caller = replace(ANONYMOUS, tenant="team")
    assert checked_priority(gate, caller, 4) == 4
    with pytest.raises(InvalidRequest, match="scope admin"):
        checked_priority(gate, caller, -1)
    admin = Caller(None, "k", frozenset(("infer", "admin")))
    assert checked_priority(gate, admin, -1) == -1


def test_a_line_of_a_batch_starts_last_and_cannot_ask_for_another_place() -> None:
    caller = Caller("acme", "a", frozenset({"infer", "admin"}), is_batch=True)
    assert {checked_priority(Gate(), caller, given) for given in (None, 0, BACKGROUND)} == {BACKGROUND}
    for given in (-1, 4):
        with pytest.raises(InvalidRequest, match="priority"):
            checked_priority(Gate(), caller, given)
