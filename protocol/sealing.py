"""Encodes each request and each adapter call by itself, before it joins the batch that carries it to the worker.

So a value that cannot be encoded or decoded fails the request that holds it and no other: the batch around it consists
of numbers, of ids that have been encoded once, and of bytes.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from lorafleet.protocol.errors import InvalidRequest
from lorafleet.protocol.messages import AdapterCall, EngineRequest, Id, Sealed

Message = TypeVar("Message")

REQUEST = msgspec.msgpack.Decoder(EngineRequest)
CALL: msgspec.msgpack.Decoder[AdapterCall] = msgspec.msgpack.Decoder(AdapterCall)
_encoder = msgspec.msgpack.Encoder()


def seal(message_id: Id, message: EngineRequest | AdapterCall) -> Sealed[Id]:
    """Raises InvalidRequest where a value cannot be encoded, such as an integer beyond 64 bits or half a character."""
    try:
        return Sealed(message_id, msgspec.Raw(_encoder.encode(message)))
    except (OverflowError, ValueError, TypeError, RecursionError) as error:
        raise InvalidRequest(f"the request cannot be sent to the engine: {error}.") from None


def unseal(sealed: Sealed[Id], decoder: msgspec.msgpack.Decoder[Message]) -> Message:
    """decoder: REQUEST or CALL. Raises InvalidRequest where a value is of another type or out of its bounds."""
    try:
        return decoder.decode(sealed.body)
    except msgspec.MsgspecError as error:
        raise InvalidRequest(f"the engine cannot read the request: {error}.") from None
