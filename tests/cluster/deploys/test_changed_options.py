"""Which options a deploy changes without other replicas, and what tells Ray Serve so."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from lorafleet.cluster.config import AppArgs, parse_args
from lorafleet.cluster.deploys.changed_options import (
    change_of,
    options_with,
    user_config_of,
    version_of,
    with_user_config,
)
from lorafleet.cluster.serve.option_changes import OptionChanges
from lorafleet.protocol.errors import ConfigError
from lorafleet.protocol.options import Change

NOTHING: Any = None
BASE: dict[str, Any] = {
    "model": "/m",
    "lora_modules": ["sql=/sql"],
    "api_keys": "keys: []",
    "admin_key": "a-former-key",
    "lora_resolver_s3": "s3://b/{lora_name}",
    "speculative_config": {"method": "ngram"},
}
IN_PLACE: dict[str, Any] = {  # Another value of each option that changes in place.
    "lora_modules": ["sql=/sql2", "law=/law"],
    "api_keys": "/keys.yaml",
    "admin_key": "a-later-key",
    "allow_runtime_lora_updating": True,
    "push_hosts": ["10.0.0.1"],
    "lora_resolver_dir": "/adapters",
    "lora_resolvers": ["s3"],
    "allowed_origins": ["https://app.example.org"],
    "insecure_without_keys": True,
    "insecure_without_ray_token": True,
    "insecure_kv_events": True,
    "max_queued_requests": 7,
    "max_queued_tokens": 70,
    "queue_timeout": 3.0,
    "max_body_bytes": 1 << 20,
    "response_store_bytes": 1 << 20,
    "batch_store_bytes": 1 << 20,
    "batch_concurrency": 3,
    "num_replicas": 2,
    "max_replicas": 4,
    "target_load": 0.5,
    "upscale_delay_s": 1.0,
    "downscale_delay_s": 1.0,
    "max_ongoing_requests": 10,
    "drain_timeout": 10.0,
}


def version(values: dict[str, Any], runtime_env: dict[str, Any] | None = None) -> str:
    return version_of(parse_args(values), "cpu", runtime_env or {})


def test_each_option_that_changes_in_place_is_known_here() -> None:
    assert IN_PLACE.keys() == {name for name in AppArgs.model_fields if change_of(name) is not None}


def test_a_running_replica_takes_each_option_that_is_marked_for_it() -> None:
    changes = OptionChanges(*[NOTHING] * 9)
    taken = [name for names in changes.takers.values() for name in names]
    assert sorted(taken) == sorted(options_with(Change.IN_REPLICA))


@pytest.mark.parametrize("name", IN_PLACE)
def test_a_change_in_place_leaves_the_version_and_reaches_the_replica(name: str) -> None:
    changed = parse_args(BASE | {name: IN_PLACE[name]})
    assert version(BASE) == version_of(changed, "cpu", {})
    secrets: dict[str, str] = {}

    def seal(secret: str) -> str:
        secrets["sealed:" + str(len(secrets))] = secret
        return "sealed:" + str(len(secrets) - 1)

    user_config = user_config_of(changed, seal)
    assert "a-former-key" not in str(user_config) and "keys: []" not in str(user_config)
    received = with_user_config(parse_args(BASE), user_config, secrets.__getitem__)
    in_replica = change_of(name) is Change.IN_REPLICA
    assert getattr(received, name) == getattr(changed if in_replica else parse_args(BASE), name)


@pytest.mark.parametrize(
    "change",
    [
        {"max_loras": 3},
        {"max_model_len": 100},
        {"served_model_name": "other"},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
        {"lora_resolver_s3": "s3://other/{lora_name}"},
        {"admin_key": None},
        {"api_keys": None},
    ],
)
def test_what_replicas_are_built_from_changes_the_version(change: dict[str, Any]) -> None:
    assert version(BASE | change) != version(BASE)


def test_an_environment_of_other_packages_changes_the_version_and_one_of_other_keys_does_not() -> None:
    assert version(BASE, {"pip": ["x"]}) != version(BASE)
    assert version(BASE, {"env_vars": {"A": "1"}}) != version(BASE)
    assert version(BASE, {"env_vars": {"LORAFLEET_ADMIN_KEY": "another-key"}}) == version(BASE)


def test_the_number_of_replicas_is_part_of_the_version_only_if_it_decides_about_ports() -> None:
    events = BASE | {"kv_events_config": {"enable_kv_cache_events": True}}
    assert version(events | {"num_replicas": 2}) != version(events)


def test_options_of_another_hand_are_refused() -> None:
    with pytest.raises(ConfigError, match="Remove user_config from `deployments`"):
        with_user_config(parse_args(BASE), {"threshold": 1}, str)


def test_the_documentation_says_of_each_option_who_takes_it() -> None:
    text = (Path(__file__).parents[3] / "docs" / "running-on-a-cluster.md").read_text()
    section = text.partition("## Changing a running application")[2].partition("\n## ")[0]
    rows = [row.split("|")[1:3] for row in section.splitlines() if row.startswith("| `")]
    said = {name: taker.strip() for names, taker in rows for name in re.findall(r"`(\w+)`", names)}
    takers = {
        Change.IN_REPLICA: ("running replicas",),
        Change.BY_SERVE: ("Ray Serve", "the deploy, which reads them once"),
    }
    marked = {name: change for name in AppArgs.model_fields if (change := change_of(name)) is not None}
    assert said.keys() == marked.keys()
    assert all(said[name] in takers[change] for name, change in marked.items())
