"""What is refused in a cluster for `ray up`."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from lorafleet.cluster.checking.ray_up_file import check_ray_up
from lorafleet.cluster.checking.yaml_source import parse
from tests.cluster.checking.changing import with_value

SERVED: dict[str, Any] = {
    "http_options": {"host": "0.0.0.0"},
    "applications": [
        {
            "name": "lorafleet",
            "import_path": "lorafleet.cluster.serve.app:build",
            "args": {"model": "/m", "device": "cuda", "num_replicas": 4, "catalog_uri": "s3://b/c", "api_keys": "/k"},
        }
    ],
}
START = 'eval "$(lorafleet config environment)" && ray start '
HEAD = ("head_start_ray_commands", 0)
GPU = ("available_node_types", "gpu")


@pytest.fixture
def good(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "serve.yaml").write_text(yaml.safe_dump(SERVED))
    return {
        "cluster_name": "c",
        "provider": {"type": "aws", "region": "eu-central-1"},
        "max_workers": 2,
        "head_node_type": "head",
        "available_node_types": {
            "head": {"resources": {"CPU": 4, "GPU": 0}, "node_config": {"InstanceType": "m7i.xlarge"}},
            "gpu": {
                "min_workers": 1,
                "max_workers": 2,
                "resources": {"CPU": 4, "GPU": 2},
                "node_config": {"InstanceType": "g6.xlarge", "BlockDeviceMappings": [{"Ebs": {"VolumeSize": 9}}]},
            },
        },
        "file_mounts": {"/f": str(tmp_path), "~/.ray/auth_token": "~/.ray/auth_token"},
        "head_start_ray_commands": [
            START + "--head --autoscaling-config=~/x.yaml",
            "sh -c 'until serve deploy /f/serve.yaml; do sleep 3; done'",
        ],
        "worker_start_ray_commands": [START + "--address=$RAY_HEAD_IP:6379"],
    }


def complaints(value: Any) -> list[str]:
    problems, _, _ = check_ray_up(parse("f.yaml", yaml.safe_dump(value, sort_keys=False)))
    return [f"{problem.place}: {problem.message}" for problem in problems]


def test_a_good_cluster_says_its_nodes_and_what_it_serves(good: dict[str, Any]):
    problems, serving, cluster = check_ray_up(parse("f.yaml", yaml.safe_dump(good)))
    assert problems == []
    assert serving is not None
    assert cluster is not None
    assert [(one.name, one.head, one.least, one.most, one.num_gpus) for one in cluster.groups] == [
        ("head", True, 1, 1, 0),
        ("gpu", False, 1, 2, 2),
    ]
    assert serving.applications[0].args.num_replicas == 4


@pytest.mark.parametrize(
    ("place", "value", "nearest"),
    [
        (("max_worker",), 2, "max_workers"),
        (("provider", "avilability_zone"), "a", "availability_zone"),
        ((*GPU, "min_worker"), 1, "min_workers"),
        ((*GPU, "node_config", "InstancType"), "x", "InstanceType"),
        ((*GPU, "node_config", "BlockDeviceMappings"), [{"Ebs": {"VolumeSiz": 1}}], "VolumeSize"),
        (("docker",), {"imag": "x"}, "image"),
        (("auth",), {"ssh_usr": "x"}, "ssh_user"),
    ],
)
def test_a_misspelt_key_is_refused_with_the_nearest(good: dict[str, Any], place: Any, value: Any, nearest: str):
    assert any(f"did you mean {nearest!r}?" in one for one in complaints(with_value(good, place, value)))


@pytest.mark.parametrize(
    ("place", "value", "complaint"),
    [
        (("max_workers",), "two", "max_workers: 'two' is not of type 'integer'"),
        (("head_node_type",), "haed", "Ray rejects this: `head_node_type` must be one of"),
        (HEAD, "ray start --head --autoscaling-config=x", "RAY_SERVE_ENABLE_HA_PROXY is not set in this command"),
        (
            HEAD,
            "RAY_SERVE_ENABLE_HA_PROXY=0 ray start --head",
            "ENABLE_HA_PROXY=0 is set, but a node needs 1",
        ),
        (HEAD, START + "--head", "head_start_ray_commands[0]: `ray start` needs --autoscaling-config"),
        (("worker_start_ray_commands", 0), START, "`ray start` needs --address"),
        (("worker_start_ray_commands",), ["ray stop"], "Ray would not be started"),
        (("file_mounts",), {}, "there is no token for Ray"),
        (("head_start_ray_commands", 1), "serve deploy /g/serve.yaml", "/g/serve.yaml is not covered by file_mounts"),
        (("head_start_ray_commands", 1), "serve deploy /f/other.yaml", "other.yaml cannot be read"),
        (("max_workers",), 1, "num_replicas=4 replicas of 1 GPU on one node do not fit"),
        ((*GPU, "resources"), {"CPU": 4}, "have room for 0"),
    ],
)
def test_what_would_not_work_is_refused_where_it_is(good: dict[str, Any], place: Any, value: Any, complaint: str):
    found = complaints(with_value(good, place, value))
    assert any(complaint in one for one in found), found


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        ({"catalog_uri": None}, "catalog_uri is not set"),
        ({"catalog_uri": "here"}, "catalog_uri='here' is not an absolute path"),
        ({"device": "auto"}, "Set device: cuda"),
        ({"tensor_parallel_size": 4}, "have room for 0"),
        ({"max_replicas": 5}, "max_replicas=5 replicas of 1 GPU on one node do not fit"),
    ],
)
def test_what_it_deploys_must_fit_its_nodes(good: dict[str, Any], tmp_path: Path, args: Any, complaint: str):
    served = copy.deepcopy(SERVED)
    served["applications"][0]["args"] |= args
    (tmp_path / "serve.yaml").write_text(yaml.safe_dump(served))
    problems, _, _ = check_ray_up(parse("f.yaml", yaml.safe_dump(good)))
    (problem,) = problems
    assert complaint in problem.message
    assert problem.file == str(tmp_path / "serve.yaml")


def test_an_ingress_on_loopback_is_refused_on_several_nodes(good: dict[str, Any], tmp_path: Path):
    (tmp_path / "serve.yaml").write_text(yaml.safe_dump(SERVED | {"http_options": {"host": "127.0.0.1"}}))
    (complaint,) = complaints(good)
    assert complaint.startswith("http_options.host: host is 127.0.0.1")


def test_machines_by_address_have_the_gpus_that_their_start_tells(good: dict[str, Any]):
    for name in ("head_node_type", "available_node_types"):
        del good[name]
    good |= {"provider": {"type": "local", "head_ip": "10.0.0.1", "worker_ips": ["10.0.0.2"]}, "max_workers": 1}
    good["worker_start_ray_commands"][0] += " --num-gpus=3"
    good["head_start_ray_commands"][0] += " --num-gpus=0"
    assert any("have room for 3" in one for one in complaints(good))
    good["worker_start_ray_commands"][0] += "0"
    assert complaints(good) == []
    good["provider"]["worker_ip"] = "10.0.0.3"
    assert any("did you mean 'worker_ips'?" in one for one in complaints(good))
