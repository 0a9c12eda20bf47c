"""The configuration of KV events, in the JSON form of vLLM's --kv-events-config.

Ports are chosen in workers/kv_events/event_sockets.py.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from lorafleet.protocol.errors import ConfigError
from lorafleet.protocol.limits import Range

MAX_PORT = 65535
MAX_TOPIC_CHARS = 1024
_TCP = re.compile(r"tcp://(?P<host>\*|\[[0-9A-Fa-f:.]+\]|[^\[\]:/*]+):(?P<port>\d{1,5})")
_ALL_ADDRESSES = ("*", "0.0.0.0", "::")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A TCP address on which a socket of ZeroMQ listens."""

    host: str  # "*" for all addresses, otherwise an IP address of the loopback interface.
    port: int

    @classmethod
    def parse(cls, name: str, text: str) -> Endpoint:
        """Parses an address of the form tcp://HOST:PORT. Raises ConfigError that names the field."""
        found = _TCP.fullmatch(text)
        port = 0 if found is None else int(found["port"])
        if found is None or port not in Range(1, MAX_PORT):
            raise ConfigError(
                f"kv_events_config: {name}={text!r} is not an address such as tcp://127.0.0.1:5557 or tcp://*:5557. "
                "Other transports are not supported."
            )
        host = found["host"].strip("[]")
        if host in _ALL_ADDRESSES:
            return cls("*", port)
        try:
            is_loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
        except ValueError:
            is_loopback = False
        if not is_loopback:
            raise ConfigError(
                f"kv_events_config: {name}={text!r} names another machine, to which vLLM would connect. lorafleet only "
                f"listens, and subscribers connect to it. Give tcp://127.0.0.1:{port}, or tcp://*:{port} for all "
                "addresses."
            )
        return cls("127.0.0.1" if host == "localhost" else host, port)

    @property
    def is_exposed(self) -> bool:
        """Whether other machines can reach it."""
        return self.host == "*"

    def at(self, offset: int) -> str:
        """Returns the address for zmq_bind(), with the port raised by the offset."""
        return f"tcp://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port + offset}"


@dataclass(frozen=True, slots=True)
class KVEventsConfig:
    """vLLM's options of the same names. The defaults of three are smaller, since they bound memory."""

    __pydantic_config__: ClassVar[Mapping[str, str]] = {"extra": "forbid"}

    enable_kv_cache_events: bool = False
    publisher: Literal["zmq", "null"] | None = None  # "null" publishes nothing. None: as enable_kv_cache_events says.
    endpoint: str = "tcp://127.0.0.1:5557"  # Where subscribers connect. vLLM's default is tcp://*:5557.
    replay_endpoint: str | None = None  # Where subscribers ask for batches that they have missed. None: nowhere.
    buffer_steps: int = 10_000  # Most recent batches that can be asked for.
    hwm: int = 10_000  # Batches that wait for one slow subscriber; it misses those beyond. vLLM: 100 000.
    max_queue_size: int = 1_000  # Batches that wait for the publishing thread; those beyond are dropped. vLLM: 100 000.
    topic: str = ""  # First frame of each message.

    def __post_init__(self) -> None:
        for name, bounds in _BOUNDS.items():
            value = getattr(self, name)
            if value not in bounds:
                raise ConfigError(f"kv_events_config: {name}={value} must be in {bounds}.")
        if len(self.topic) > MAX_TOPIC_CHARS:
            raise ConfigError(
                f"kv_events_config: the topic has {len(self.topic)} characters; at most {MAX_TOPIC_CHARS} are allowed."
            )
        self.listening  # noqa: B018  # Raises ConfigError for addresses that cannot be used.

    @property
    def is_on(self) -> bool:
        return self.enable_kv_cache_events and self.publisher != "null"

    @property
    def listening(self) -> tuple[Endpoint, ...]:
        """The endpoint, and the one for replays if there is one."""
        events = Endpoint.parse("endpoint", self.endpoint)
        if self.replay_endpoint is None:
            return (events,)
        return events, Endpoint.parse("replay_endpoint", self.replay_endpoint)

    def check_ports(self, num_replicas: int) -> None:
        """Raises ConfigError unless each of so many replicas on one machine can have ports of its own."""
        ports = [endpoint.port for endpoint in self.listening]
        if max(ports) + num_replicas - 1 > MAX_PORT:
            raise ConfigError(
                f"kv_events_config: {num_replicas} replicas on one machine would use ports from {max(ports)} on, and "
                f"{MAX_PORT} is the last. Choose lower ports."
            )
        if len(ports) > 1 and abs(ports[0] - ports[1]) < num_replicas:
            raise ConfigError(
                f"kv_events_config: endpoint and replay_endpoint have the ports {ports[0]} and {ports[1]}. With "
                f"{num_replicas} replicas, they must differ by at least {num_replicas}, since each replica on a "
                "machine uses the next ports."
            )


_BOUNDS = {
    "buffer_steps": Range(1, 1_000_000),
    "hwm": Range(1, 1_000_000),
    "max_queue_size": Range(1, 1_000_000),
}
