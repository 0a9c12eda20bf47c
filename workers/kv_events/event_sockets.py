"""Binds the sockets of KV events. Each replica on a machine takes the first ports, from the configured ones on, that
are free."""

from __future__ import annotations

import errno
import time
from dataclasses import dataclass

import zmq

from lorafleet.protocol.errors import ConfigError
from lorafleet.protocol.kv_events_config import KVEventsConfig

PATIENCE_S = 30.0  # Seconds that a replica waits for the ports of one that ends.
AGAIN_S = 0.2
MAX_MESSAGE_BYTES = 4096  # Received ones: a topic, or a request for a replay.


@dataclass(frozen=True, slots=True)
class EventSockets:
    """The sockets of one replica, and their context, which close() ends."""

    context: zmq.Context[zmq.Socket[bytes]]
    events: zmq.Socket[bytes]  # PUB
    replay: zmq.Socket[bytes] | None  # ROUTER
    port: int  # Of events.
    offset: int  # Number of ports after the configured ones.

    @classmethod
    def bind(cls, config: KVEventsConfig, num_ports: int, patience_s: float = PATIENCE_S) -> EventSockets:
        """Binds the sockets of one replica. Raises ConfigError if all ports are in use for so many seconds."""
        give_up_s = time.monotonic() + patience_s
        while True:
            for offset in range(num_ports):
                sockets = _bind(config, offset)
                if sockets is not None:
                    return sockets
            if time.monotonic() >= give_up_s:
                addresses = " and ".join(endpoint.at(0) for endpoint in config.listening)
                raise ConfigError(
                    f"kv_events_config: {addresses}, and the ports after, are in use; {num_ports} were tried. Choose "
                    "other ports."
                )
            time.sleep(AGAIN_S)

    def close(self) -> None:
        self.context.destroy(linger=0)


def _bind(config: KVEventsConfig, offset: int) -> EventSockets | None:
    """Returns the sockets at these ports, or None if one of the ports is in use. Raises ConfigError otherwise."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    kinds = (zmq.PUB, zmq.ROUTER)
    bound = []
    for endpoint, kind in zip(config.listening, kinds, strict=False):
        socket = context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, int(":" in endpoint.host))
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        # A subscriber that reads slowly may have a whole replay in its queue.
        socket.setsockopt(zmq.SNDHWM, config.hwm if kind == zmq.PUB else config.buffer_steps + 1)
        try:
            socket.bind(endpoint.at(offset))
        except zmq.ZMQError as error:
            context.destroy(linger=0)
            if error.errno == errno.EADDRINUSE:
                return None
            raise ConfigError(f"kv_events_config: cannot listen on {endpoint.at(offset)}: {error}.") from None
        bound.append(socket)
    replay = bound[1] if len(bound) > 1 else None
    return EventSockets(context, bound[0], replay, config.listening[0].port + offset, offset)
