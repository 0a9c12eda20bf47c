"""What is refused in a Serve configuration, and with which words."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from lorafleet.cluster.checking.serve_file import check_serve
from lorafleet.cluster.checking.yaml_source import parse
from tests.cluster.checking.changing import with_value

GOOD: dict[str, Any] = {
    "http_options": {"host": "127.0.0.1", "port": 8000},
    "applications": [
        {
            "name": "lorafleet",
            "route_prefix": "/",
            "import_path": "lorafleet.cluster.serve.app:build",
            "args": {"model": "/m", "lora_modules": [{"lora_name": "sql", "path": "/sql"}], "tp": 2},
        }
    ],
}
APP = ("applications", 0)
ARGS = (*APP, "args")


def complaints(value: Any) -> list[str]:
    problems, _ = check_serve(parse("f.yaml", yaml.safe_dump(value, sort_keys=False)))
    return [f"{problem.place}: {problem.message}" for problem in problems]


@pytest.mark.parametrize("builder", ["lorafleet.cluster.serve.app:build", "lorafleet.cluster.app:build"])
def test_a_good_file_says_what_it_serves(builder: str):
    good = with_value(GOOD, (*APP, "import_path"), builder)
    problems, serving = check_serve(parse("f.yaml", yaml.safe_dump(good)))
    assert problems == []
    assert serving is not None
    assert (serving.host, serving.port, serving.every_node) == ("127.0.0.1", 8000, True)
    (application,) = serving.applications
    assert application.args.tensor_parallel_size == 2
    assert application.args.lora_modules[0].name == "sql"


@pytest.mark.parametrize(
    ("place", "value", "nearest"),
    [
        (("proxy_locaton",), "HeadOnly", "proxy_location"),
        (("http_options", "hots"), "127.0.0.1", "host"),
        ((*APP, "import_pth"), "x:y", "import_path"),
        ((*APP, "runtime_env"), {"env_var": {}}, "env_vars"),
        ((*APP, "logging_config"), {"log_levl": "INFO"}, "log_level"),
        ((*APP, "deployments"), [{"name": "EngineReplica", "health_check_period": 1}], "health_check_period_s"),
        ((*ARGS, "max_lora"), 3, "max_loras"),
        ((*ARGS, "lora_resolver_s3"), {"uri": "s3://b/{lora_name}", "regin": "eu"}, "region"),
        ((*ARGS, "lora_modules"), [{"name": "sql", "path": "/a", "base_model": "b"}], "base_model_name"),
    ],
)
def test_a_misspelt_key_is_refused_with_the_nearest(place: tuple[Any, ...], value: Any, nearest: str):
    assert any(f"did you mean {nearest!r}?" in one for one in complaints(with_value(GOOD, place, value)))


@pytest.mark.parametrize(
    ("place", "value", "complaint"),
    [
        (("http_options", "port"), "eight", "http_options.port: Input should be a valid integer"),
        (("applications",), [], "applications: there is no application"),
        (
            (*APP, "import_path"),
            "lorafleet.cluster.serve.app:bild",
            "did you mean 'lorafleet.cluster.serve.app:build'?",
        ),
        ((*APP, "import_path"), "no_such_module.app:build", "there is no module 'no_such_module.app'"),
        ((*APP, "deployments"), [{"name": "EngineReplicas"}], "did you mean 'EngineReplica'?"),
        ((*APP, "deployments"), [{"name": "EngineReplica", "user_config": {"a": 1}}], "sets this from its own options"),
        ((*APP, "deployments"), [{"name": "AdapterRouter", "num_replicas": 2}], "one router on each node"),
        ((*APP, "args"), {}, "applications[0].args.model: Field required"),
        ((*APP, "args"), None, "applications[0].args: args must name a model"),
        ((*ARGS, "num_replicas"), 0, "args.num_replicas: Input should be greater than or equal to 1"),
        ((*ARGS, "gpu_memory_utilization"), 2, "args.gpu_memory_utilization: gpu_memory_utilization=2"),
        ((*ARGS, "lora_resolvers"), ["s3"], "args.lora_resolvers: lora_resolvers names 's3', which needs"),
    ],
)
def test_a_wrong_value_is_refused_where_it_is(place: tuple[Any, ...], value: Any, complaint: str):
    assert any(complaint in one for one in complaints(with_value(GOOD, place, value)))


def test_all_mistakes_are_told_at_once():
    changed = with_value(GOOD, (*ARGS, "max_lora"), 1)
    changed["applications"][0]["args"] |= {"block_size": -1, "max_num_seqs": 0, "num_replicas": 0, "max_replicas": "x"}
    changed["http_options"]["prt"] = 1
    places = {one.partition(": ")[0].rpartition(".")[2] for one in complaints(changed)}
    assert places == {"prt", "max_lora", "block_size", "max_num_seqs", "num_replicas", "max_replicas"}


def test_an_address_open_to_the_network_needs_keys():
    open_to_all = with_value(GOOD, ("http_options",), {"port": 8000})  # Serve's own default is 0.0.0.0
    (complaint,) = complaints(open_to_all)
    assert complaint.startswith("applications[0].args: host=0.0.0.0 is open to the network, and there are no API keys")
    open_to_all["applications"][0]["args"]["api_keys"] = "/keys.yaml"
    assert complaints(open_to_all) == []


def test_a_mistake_inside_speculative_config_is_told_once():
    config = {"method": "ngram", "draft_model": "d"}
    [told] = complaints(with_value(GOOD, (*ARGS, "speculative_config"), config))
    assert told.startswith("applications[0].args.speculative_config.draft_model: unknown key 'draft_model'")
    [told] = complaints(with_value(GOOD, (*ARGS, "speculative_config"), {"method": "medusa"}))
    assert told.startswith("applications[0].args.speculative_config: speculative_config: method='medusa' is not served")


@pytest.mark.parametrize(
    ("deployment", "bounds"),
    [
        ({"num_replicas": 2}, (2, None)),
        ({"autoscaling_config": {"min_replicas": 2, "max_replicas": 5}}, (2, 5)),
        ({"num_replicas": "auto", "autoscaling_config": {"max_replicas": 5}}, (1, 5)),
        ({"num_replicas": "auto"}, (1, 100)),
    ],
)
def test_replicas_may_be_counted_where_serve_counts_them(
    deployment: dict[str, Any], bounds: tuple[int, int | None]
) -> None:
    file = with_value(GOOD, (*APP, "deployments"), [{"name": "EngineReplica"} | deployment])
    problems, serving = check_serve(parse("f.yaml", yaml.safe_dump(file)))
    assert problems == [] and serving is not None
    (application,) = serving.applications
    assert (application.args.num_replicas, application.args.max_replicas) == bounds


@pytest.mark.parametrize(
    ("in_args", "deployment", "named"),
    [
        ({"num_replicas": 3}, {"num_replicas": 2}, "num_replicas=3"),
        ({"max_replicas": 4}, {"num_replicas": 2}, "max_replicas=4"),
        ({"max_replicas": 4}, {"autoscaling_config": {"min_replicas": 1, "max_replicas": 5}}, "max_replicas=4"),
        ({"num_replicas": 2}, {"num_replicas": 2}, None),
        ({"max_replicas": 5}, {"autoscaling_config": {"min_replicas": 1, "max_replicas": 5}}, None),
    ],
)
def test_two_numbers_of_replicas_may_not_differ(
    in_args: dict[str, Any], deployment: dict[str, Any], named: str | None
) -> None:
    file = with_value(GOOD, (*APP, "deployments"), [{"name": "EngineReplica"} | deployment])
    file = with_value(file, ARGS, file["applications"][0]["args"] | in_args)
    found = [one for one in complaints(file) if "says otherwise" in one]
    assert [named in one for one in found if named] == ([] if named is None else [True])
    assert bool(found) == (named is not None)
