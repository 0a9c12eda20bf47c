"""The options for routers outside of the cluster, as a server gets them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lorafleet.cluster.config import parse_args
from lorafleet.protocol.errors import ConfigError

ON: dict[str, Any] = {"enable_kv_cache_events": True, "publisher": "zmq"}


@pytest.mark.parametrize("as_text", [False, True])
def test_kv_events_are_vllms_json_or_fields(as_text: bool) -> None:
    given = ON | {"endpoint": "tcp://127.0.0.1:7000", "replay_endpoint": "tcp://127.0.0.1:7010", "topic": "kv@a@b"}
    value = json.dumps(given) if as_text else given
    config = parse_args({"model": "m", "num_replicas": 3, "kv_events_config": value}).engine_config()
    assert config.kv_events is not None
    assert config.kv_events.is_on
    assert [endpoint.port for endpoint in config.kv_events.listening] == [7000, 7010]
    assert config.most_replicas == 3


def test_without_the_option_there_are_none() -> None:
    assert parse_args({"model": "m"}).engine_config().kv_events is None


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"kv_events_config": "{nothing"}, "not valid JSON"),
        ({"kv_events_config": "zmq"}, "not valid JSON"),
        ({"kv_events_config": ON | {"endpont": "tcp://*:5557"}}, "kv_events_config.endpont"),
        ({"kv_events_config": ON | {"publisher": "kafka"}}, "kv_events_config.publisher"),
        ({"metrics_lora_info": True, "enable_lora": False}, "metrics_lora_info has no effect without enable_lora"),
    ],
)
def test_a_mistake_in_it_is_named(values: dict[str, object], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        parse_args({"model": "m"} | values)


@pytest.mark.parametrize("field", ["endpoint", "replay_endpoint"])
def test_the_tokens_of_requests_are_published_beyond_the_machine_only_if_it_is_asked_for_by_name(field: str) -> None:
    values = {"model": "m", "api_keys": "keys.yaml", "kv_events_config": ON | {field: "tcp://*:6000"}}
    with pytest.raises(ConfigError, match=r"port 6000.*insecure_kv_events"):
        parse_args(values)
    assert parse_args(values | {"insecure_kv_events": True}).insecure_kv_events
    off = values | {"kv_events_config": {field: "tcp://*:6000"}}
    assert parse_args(off).kv_events_config is not None
