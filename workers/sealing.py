"""Encodes each request and each adapter call by itself, before it joins the batch that carries it to the worker.

So a value that cannot be encoded or decoded fails the request that holds it and no other: the batch around it consists
of numbers, of ids that have been encoded once, and of bytes.
"""

from __future__ import annotations

import msgspec

from lorafleet.workers.errors import InvalidRequest
from lorafleet.workers.messages import AdapterCall, EngineRequest, SealedCall, SealedRequest

_encoder = msgspec.msgpack.Encoder()
_requests = msgspec.msgpack.Decoder(EngineRequest)
_calls: msgspec.msgpack.Decoder[AdapterCall] = msgspec.msgpack.Decoder(AdapterCall)


def seal_request(request: EngineRequest) -> SealedRequest:
    """Raises InvalidRequest where a value cannot be encoded, such as an integer beyond 64 bits or half a character."""
    return SealedRequest(request.request_id, _encoded(request))


def open_request(sealed: SealedRequest) -> EngineRequest:
    """Raises InvalidRequest where a value is of another type or out of its bounds."""
    try:
        return _requests.decode(sealed.body)
    except msgspec.MsgspecError as error:
        raise InvalidRequest(f"the engine cannot read the request: {error}.") from None


def seal_call(call: AdapterCall) -> SealedCall:
    """Raises InvalidRequest where a value cannot be encoded."""
    return SealedCall(call.call_id, _encoded(call))


def open_call(sealed: SealedCall) -> AdapterCall:
    """Raises InvalidRequest where a value is of another type."""
    try:
        return _calls.decode(sealed.body)
    except msgspec.MsgspecError as error:
        raise InvalidRequest(f"the engine cannot read the call: {error}.") from None


def _encoded(value: EngineRequest | AdapterCall) -> msgspec.Raw:
    try:
        return msgspec.Raw(_encoder.encode(value))
    except (OverflowError, ValueError, TypeError, RecursionError) as error:
        raise InvalidRequest(f"the request cannot be sent to the engine: {error}.") from None
