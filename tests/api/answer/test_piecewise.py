"""What a client does not read stays in one place, and counts for its tenant."""

from __future__ import annotations

import asyncio

import pytest
from starlette.responses import Response
from starlette.types import Message, Scope

from lorafleet.api.access.body_budget import BodyBudget, HeldBody, set_body
from lorafleet.api.access.caller import Caller
from lorafleet.api.answer.piecewise import MAX_SENT_BYTES, in_pieces
from lorafleet.api.answer.responses import WholeReply
from lorafleet.protocol.errors import QueueFull


class Reader:
    """A client that takes one message each time `taken` is released."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.taken = asyncio.Semaphore(0)

    async def send(self, message: Message) -> None:
        self.messages.append(message)
        await self.taken.acquire()


@pytest.mark.parametrize("more", [True, False])
@pytest.mark.parametrize("num_bytes", [0, 1, MAX_SENT_BYTES, MAX_SENT_BYTES + 1, 3 * MAX_SENT_BYTES])
async def test_a_large_body_reaches_a_slow_client_piece_by_piece(num_bytes: int, more: bool) -> None:
    reader = Reader()
    body = bytes(i % 251 for i in range(num_bytes))
    sending = asyncio.ensure_future(
        in_pieces(reader.send)({"type": "http.response.body", "body": body, "more_body": more})
    )
    for number in range(1, max(1, -(-num_bytes // MAX_SENT_BYTES)) + 1):
        await asyncio.sleep(0)
        assert len(reader.messages) == number  # The next piece waits for this one.
        reader.taken.release()
        await asyncio.sleep(0)
    await sending
    assert b"".join(message["body"] for message in reader.messages) == body
    assert max(len(message["body"]) for message in reader.messages) <= MAX_SENT_BYTES
    assert [message["more_body"] for message in reader.messages] == [True] * (len(reader.messages) - 1) + [more]


async def test_whole_answers_that_nobody_reads_count_for_their_tenant_and_others_are_answered() -> None:
    budget, readers = BodyBudget(max_bytes=2000), list[Reader]()

    async def never() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def work() -> Response:
        return Response(bytes(900))

    def answered(tenant: str) -> asyncio.Task[None]:
        scope: Scope = {"type": "http", "method": "POST"}
        set_body(scope, HeldBody(budget, Caller(tenant)))
        readers.append(Reader())
        return asyncio.create_task(WholeReply(work)(scope, never, readers[-1].send))

    sending = [answered("greedy"), answered("greedy")]
    for _ in range(10):
        await asyncio.sleep(0)
    with pytest.raises(QueueFull, match="'greedy' in progress on this replica have 1800 bytes"):
        await answered("greedy")
    quiet = answered("quiet")
    for _ in range(10):
        await asyncio.sleep(0)
    assert readers[-1].messages
    for task in (*sending, quiet):
        task.cancel()
    await asyncio.wait([*sending, quiet])
