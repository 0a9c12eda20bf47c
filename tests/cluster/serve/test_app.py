"""What the builder of the application decides: devices, room for new replicas, and which deploys are refused."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from lorafleet.cluster.config import parse_args
from lorafleet.protocol.errors import ConfigError
from tests.cluster.checking import ray_schemas  # noqa: F401  # before its module can warn

from ray.serve._private.api import call_user_app_builder_with_args_if_necessary  # isort: skip
from lorafleet.cluster.deploys.running_check import ProposedDeploy  # isort: skip
from lorafleet.cluster.serve import app  # isort: skip
from lorafleet.cluster.serve.replica import EngineReplica  # isort: skip


@pytest.mark.parametrize(
    ("device", "num_gpus", "chosen"),
    [
        ("cuda", [], "cuda"),
        ("cuda", [0, 1], "cuda"),
        ("auto", [0], "cpu"),
        ("auto", [0, 2], "cuda"),
        ("cpu", [2], "cpu"),
    ],
)
def test_the_device_follows_the_nodes_unless_it_is_named(
    monkeypatch: pytest.MonkeyPatch, device: str, num_gpus: list[int], chosen: str
):
    monkeypatch.setattr(app, "node_gpus", lambda: num_gpus)
    assert app._device(parse_args({"model": "m", "device": device, "num_replicas": 2})) == chosen


def test_gpus_that_have_not_joined_yet_are_waited_for_and_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(app, "node_gpus", lambda: [0])
    with caplog.at_level(logging.WARNING, "lorafleet.cluster"):
        app._device(parse_args({"model": "m", "device": "cuda", "num_replicas": 3}))
    assert "needs 3 GPUs; this Ray cluster has 0" in caplog.text
    assert "Until then, replicas wait for GPUs" in caplog.text


def test_too_few_gpus_are_refused_where_the_cpu_would_have_been_an_answer(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(app, "node_gpus", lambda: [1])
    with pytest.raises(ConfigError, match="needs 3 GPUs"):
        app._device(parse_args({"model": "m", "device": "auto", "num_replicas": 3}))


def test_the_builder_that_serve_calls_takes_keys_from_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(app, "node_gpus", lambda: [0])
    monkeypatch.setattr(app.ingress, "http_options", lambda: None)
    monkeypatch.setattr(app, "runtime_env", dict)
    monkeypatch.setattr(app, "seal", lambda _: "sealed:1")
    monkeypatch.setenv("LORAFLEET_ADMIN_KEY", "of-the-environment")
    built = call_user_app_builder_with_args_if_necessary(app.build, {"model": "m", "max_loras": 3, "tp": 1})
    args, config, _ = built._bound_deployment.init_args
    assert "of-the-environment" not in str(built._bound_deployment.user_config), "the dashboard shows it"
    assert (args.admin_key, args.max_loras, config.lora.max_loras, config.device) == ("of-the-environment", 3, 3, "cpu")


@pytest.mark.parametrize(("running", "free_cpus", "percent"), [(0, 8.0, 0), (1, 0.1, 0), (1, 8.0, 100), (4, 0.5, 50)])
def test_new_replicas_start_beside_those_that_run_where_there_is_room(
    monkeypatch: pytest.MonkeyPatch, running: int, free_cpus: float, percent: int
):
    monkeypatch.setattr(app.ingress, "num_running", lambda name: running * (name == "EngineReplica"))
    monkeypatch.setattr(app.ingress, "free_resources", lambda: [{"CPU": free_cpus}])
    monkeypatch.setattr(app, "seal", lambda _: "sealed:1")
    args = parse_args({"model": "m", "num_replicas": max(running, 1)})
    deployment = app.replicas(args, args.engine_config())
    assert deployment._deployment_config.max_surge_percent == percent
    assert app.router(args)._deployment_config.max_surge_percent == 100


@pytest.mark.parametrize(
    ("running", "free_cpus", "environment", "final"),
    [(1, 0.0, {}, True), (1, 8.0, {}, False), (1, 0.0, {"working_dir": "s3://b/code.zip"}, False)],
)
def test_a_deploy_is_final_where_the_running_replica_has_to_stop_first(
    monkeypatch: pytest.MonkeyPatch, running: int, free_cpus: float, environment: dict[str, str], final: bool
):
    monkeypatch.setattr(app.ingress, "num_running", lambda _: running)
    monkeypatch.setattr(app.ingress, "free_resources", lambda: [{"CPU": free_cpus}])
    monkeypatch.setattr(app, "runtime_env", lambda: environment)
    assert app._is_final(parse_args({"model": "m"}), "cpu") == final


@pytest.mark.parametrize("final", [False, True])
async def test_a_replica_does_not_stop_for_one_whose_files_are_missing(tmp_path: Path, final: bool):
    running = cast(EngineReplica, SimpleNamespace(_version="of its own", _parts=SimpleNamespace(state=object())))
    (tmp_path / "config.json").write_text("{}")
    whole = {"model": str(tmp_path), "max_model_len": 400}
    objections = [
        await EngineReplica.check_deploy(running, ProposedDeploy("another", parse_args(values), final))
        for values in (whole, whole | {"model": "/no/model"}, whole | {"lora_modules": ["sql=/no/adapter"]})
    ]
    if not final:  # It goes on until the other one has started.
        assert objections == [None, None, None]
        return
    assert objections[0] is None
    assert "model '/no/model' is not a local Hugging Face folder" in str(objections[1])
    assert "adapter 'sql' cannot be served: there is no /no/adapter" in str(objections[2])
