"""Sends large bodies in pieces, so that a client that reads slowly fills no buffer with the rest of its answer.

uvicorn gives a whole body to the connection, which copies what the client does not take at once, and only then waits.
"""

from __future__ import annotations

from collections.abc import Awaitable

from starlette.types import Message, Send

MAX_SENT_BYTES = 256 << 10  # Bytes that are given to the connection at a time.


def in_pieces(send: Send) -> Send:
    """Returns an ASGI `send` that waits after each piece of a large body until the client has taken most of it."""

    def send_any(message: Message) -> Awaitable[None]:
        if len(message.get("body", b"")) <= MAX_SENT_BYTES:
            return send(message)
        return _send_pieces(send, message)

    return send_any


async def _send_pieces(send: Send, message: Message) -> None:
    body: bytes = message["body"]
    last = (len(body) - 1) // MAX_SENT_BYTES * MAX_SENT_BYTES
    for start in range(0, last, MAX_SENT_BYTES):
        await send({**message, "body": body[start : start + MAX_SENT_BYTES], "more_body": True})
    await send({**message, "body": body[last:]})
