"""Encodes each request and each call separately, before it joins the batch for the worker.

A value that cannot be encoded or decoded therefore fails only the request that holds it. The batch around it consists
of numbers, of ids that have been encoded once, and of bytes.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from lorafleet.protocol.errors import InvalidRequest
from lorafleet.protocol.messages import EngineCall, EngineRequest, Id, Sealed

Message = TypeVar("Message")

REQUEST = msgspec.msgpack.Decoder(EngineRequest)
CALL: msgspec.msgpack.Decoder[EngineCall] = msgspec.msgpack.Decoder(EngineCall)
_encoder = msgspec.msgpack.Encoder()


def seal(message_id: Id, message: EngineRequest | EngineCall) -> Sealed[Id]:
    """Encodes the message separately. Raises InvalidRequest if a value cannot be encoded, such as an integer beyond
    64 bits or a lone surrogate."""
    try:
        return Sealed(message_id, msgspec.Raw(_encoder.encode(message)))
    except (OverflowError, ValueError, TypeError, RecursionError) as error:
        raise InvalidRequest(f"the request cannot be sent to the engine: {error}.") from None


def unseal(sealed: Sealed[Id], decoder: msgspec.msgpack.Decoder[Message]) -> Message:
    """Decodes the message with `decoder`, which is REQUEST or CALL. Raises InvalidRequest if a value has the wrong
    type or is out of bounds."""
    try:
        return decoder.decode(sealed.body)
    except msgspec.MsgspecError as error:
        raise InvalidRequest(f"the engine cannot read the request: {error}.") from None
