from __future__ import annotations

from typing import Any

import pytest

from lorafleet.protocol.errors import ConfigError
from lorafleet.protocol.kv_events_config import Endpoint, KVEventsConfig


@pytest.mark.parametrize(
    ("text", "bound"),
    [
        ("tcp://*:5557", "tcp://*:5559"),
        ("tcp://0.0.0.0:5557", "tcp://*:5559"),
        ("tcp://[::]:5557", "tcp://*:5559"),
        ("tcp://localhost:5557", "tcp://127.0.0.1:5559"),
        ("tcp://127.3.0.1:5557", "tcp://127.3.0.1:5559"),
        ("tcp://[::1]:5557", "tcp://[::1]:5559"),
    ],
)
def test_an_endpoint_is_all_addresses_or_one_of_the_loopback_interface(text: str, bound: str) -> None:
    endpoint = Endpoint.parse("endpoint", text)
    assert endpoint.at(2) == bound
    assert endpoint.is_exposed == ("*" in bound)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"endpoint": "ipc:///tmp/x"}, "Other transports are not supported"),
        ({"endpoint": "tcp://127.0.0.1"}, "not an address"),
        ({"endpoint": "tcp://127.0.0.1:0"}, "not an address"),
        ({"endpoint": "tcp://127.0.0.1:70000"}, "not an address"),
        ({"endpoint": "tcp://router.example.org:5557"}, "only listens"),
        ({"replay_endpoint": "tcp://192.0.2.7:5558"}, r"replay_endpoint='tcp://192.0.2.7:5558' names another machine"),
        ({"buffer_steps": 0}, "buffer_steps=0 must be in"),
        ({"hwm": 0}, "hwm=0"),
        ({"max_queue_size": 10**7}, "max_queue_size=10000000"),
        ({"topic": "t" * 2000}, "at most 1024"),
    ],
)
def test_what_cannot_be_honored_is_rejected(fields: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        KVEventsConfig(**fields)


def test_it_is_on_only_if_it_is_enabled_and_publishes() -> None:
    assert not KVEventsConfig().is_on
    assert not KVEventsConfig(publisher="zmq").is_on
    assert not KVEventsConfig(enable_kv_cache_events=True, publisher="null").is_on
    assert KVEventsConfig(enable_kv_cache_events=True).is_on


def test_the_ports_of_all_replicas_differ_and_exist() -> None:
    events = KVEventsConfig(endpoint="tcp://*:5557", replay_endpoint="tcp://*:5559")
    events.check_ports(2)
    with pytest.raises(ConfigError, match="must differ by at least 3"):
        events.check_ports(3)
    with pytest.raises(ConfigError, match="65535 is the last"):
        KVEventsConfig(endpoint="tcp://*:65534").check_ports(3)
