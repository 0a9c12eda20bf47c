"""The messages between two nodes of which one fetches an adapter from the other's cache, and the neighbor's address.

The client sends a frame with a NeighborRequest. The server answers with a frame that has a NeighborOffer, and then with
the bytes of the offered files, one after the other. neighbor_fetch.py is the client, neighbor_server.py the server.
"""

from __future__ import annotations

import msgspec

MAX_REQUEST_BYTES = 1024
MAX_OFFER_BYTES = 4096


class NeighborAddress(msgspec.Struct, frozen=True):
    """The address where a node answers its neighbors. Only Ray's actors learn the secret."""

    host: str
    port: int
    secret: str


class NeighborRequest(msgspec.Struct, frozen=True):
    """Requests the files of an adapter."""

    secret: str
    digest: str


class NeighborOffer(msgspec.Struct, frozen=True):
    """Announces the files that follow, or says why none follow."""

    sizes: dict[str, int] = {}  # Bytes by the file's name, in the order of the files.
    refusal: str = ""  # "absent" or "busy" if there are no files.


encoder = msgspec.msgpack.Encoder()
request_decoder = msgspec.msgpack.Decoder(NeighborRequest)
offer_decoder = msgspec.msgpack.Decoder(NeighborOffer)
