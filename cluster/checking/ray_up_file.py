"""Checks a cluster file for `ray up`, and the Serve configuration that its head deploys. serve_file.py checks the
latter."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import logging
import re
from pathlib import Path
from typing import Any

import click
import jsonschema

from lorafleet.cluster.checking.keys import Schema, check_keys, check_values
from lorafleet.cluster.checking.nodes import Cluster, NodeGroup, check_fit
from lorafleet.cluster.checking.provider_schemas import close_provider, node_schema
from lorafleet.cluster.checking.serve_file import Serving, check_serve
from lorafleet.cluster.checking.yaml_source import Place, Problem, YamlSource, read
from lorafleet.cluster.proxy import haproxy
from lorafleet.cluster.serve import cluster_environment
from lorafleet.protocol.errors import ConfigError

ENVIRONMENT_COMMAND = "lorafleet config environment"
TOKEN_FILE = ".ray/auth_token"
STARTS = ("head_start_ray_commands", "worker_start_ray_commands")
NEEDED_FLAGS = {STARTS[0]: ("--head", "--autoscaling-config"), STARTS[1]: ("--address",)}


def check_ray_up(source: YamlSource) -> tuple[list[Problem], Serving | None, Cluster | None]:
    kind = _provider(source.value)
    schema = _schema(kind)
    problems = check_keys(source, (), source.value, schema) + check_values(source, (), source.value, schema)
    if problems:  # Ray's own checks stop at the first mistake, and assume that these pass.
        prepared = None
    else:
        prepared, message = _prepare(source.value)
        problems += [source.problem((), message)] if message else []
    problems += _check_starts(source) + _check_token(source)
    cluster = None if prepared is None else _cluster(source.value, prepared)
    found, serving = _check_served(source, cluster)
    return problems + found, serving, cluster


def _provider(value: Any) -> str:
    provider = value.get("provider")
    return str(provider.get("type", "")) if isinstance(provider, dict) else ""


def _schema(kind: str) -> Schema:
    import ray.autoscaler

    schema: Schema = json.loads((Path(ray.autoscaler.__file__).parent / "ray-schema.json").read_text())
    properties = schema["properties"]
    properties["provider"] = close_provider(properties["provider"], kind)
    properties["available_node_types"]["patternProperties"][".*"]["properties"]["node_config"] = node_schema(kind)
    properties["file_mounts"] = {"type": "object", "additionalProperties": {"type": "string"}}
    for name in ("cluster_synced_files", "rsync_exclude", "rsync_filter"):
        properties[name] = {"type": "array", "items": {"type": "string"}}
    if kind == "local":
        properties["min_workers"] = {"type": "integer", "minimum": 0}  # Ray removes it before it validates.
        del properties["available_node_types"], properties["head_node_type"]
    return schema


def _prepare(value: dict[str, Any]) -> tuple[dict[str, Any] | None, str]:
    """Returns the values as `ray up` completes them, or None and Ray's error message. It asks no cloud."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    said = io.StringIO()
    logging.getLogger("ray.autoscaler._private.util").setLevel(logging.WARNING)  # It logs what it fills in.
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            prepared: dict[str, Any] = prepare_config(copy.deepcopy(value))
            validate_config(prepared)
    except jsonschema.ValidationError as error:
        return None, f"Ray rejects this: {error.message}"
    except click.ClickException:
        return None, f"Ray rejects this: {' '.join(said.getvalue().split())}"
    except Exception as error:  # Its schema accepts values that its code does not expect.
        return None, f"Ray rejects this: {error or type(error).__name__}"
    return prepared, ""


def _check_starts(source: YamlSource) -> list[Problem]:
    problems = []
    for name in STARTS:
        commands = source.value.get(name)
        if not isinstance(commands, list) or not all(isinstance(command, str) for command in commands):
            message = (
                f"{name} is missing, and Ray's default command does not set the environment. Give a command that "
                f"begins with `{ENVIRONMENT_COMMAND}`."
            )
            problems.append(source.problem((name,), message))
            continue
        starts = [number for number, command in enumerate(commands) if "ray start" in command]
        if not starts:
            problems.append(source.problem((name,), "no command has `ray start`, so Ray would not be started."))
        for number in starts:
            problems += _check_start(source, (name, number), commands[number], NEEDED_FLAGS[name])
    return problems


def _check_start(source: YamlSource, place: Place, command: str, flags: tuple[str, ...]) -> list[Problem]:
    problems = [
        source.problem(place, f"`ray start` needs {flag} here.")
        for flag in flags
        if not re.search(rf"{flag}\b", command)
    ]
    if ENVIRONMENT_COMMAND in command:
        return problems
    return problems + [
        source.problem(place, message) for message in missing_environment(_assigned(command), "in this command")
    ]


def missing_environment(given: dict[str, str | None], where: str) -> list[str]:
    """Returns a message for each variable that a node needs and that is missing or wrong. In `given`, None stands for
    a value that only the node knows."""
    messages = []
    for name, value in (cluster_environment.NEEDED | {haproxy.RAYS_VARIABLE: None}).items():
        if name not in given:
            wanted = value or f"the path of {haproxy.NAME}"
            messages.append(f"{name} is not set {where}; a node needs it, with the value {wanted}.")
        elif value is not None and given[name] not in (value, None):
            messages.append(f"{name}={given[name]} is set, but a node needs {value}.")
    return messages


def _assigned(command: str) -> dict[str, str | None]:
    return {name: value.strip("'\"") for name, value in re.findall(r"\b([A-Z][A-Z0-9_]*)=([^\s;&]*)", command)}


def _check_token(source: YamlSource) -> list[Problem]:
    mounts = source.value.get("file_mounts")
    commands = [command for name in STARTS for command in _strings(source.value.get(name)) if "ray start" in command]
    if any(str(remote).endswith(TOKEN_FILE) for remote in (mounts if isinstance(mounts, dict) else {})):
        guarded = [
            command
            for command in commands
            if ENVIRONMENT_COMMAND in command or _assigned(command).get("RAY_AUTH_MODE") == "token"
        ]
        if len(guarded) == len(commands):
            return []
        return [
            source.problem(("file_mounts",), "there is a token, but RAY_AUTH_MODE=token is not set where Ray starts.")
        ]
    if commands and all("RAY_AUTH_TOKEN" in command for command in commands):
        return []
    message = (
        f"there is no token for Ray, so anyone who can reach Ray's ports could run code. Mount ~/{TOKEN_FILE}, which "
        "`ray get-auth-token --generate` creates, on every node."
    )
    return [source.problem(("file_mounts",), message)]


def _cluster(value: dict[str, Any], prepared: dict[str, Any]) -> Cluster:
    types, head = prepared["available_node_types"], prepared["head_node_type"]
    if _provider(value) == "local":
        workers = types[head]
        groups = [
            NodeGroup("head", True, 1, 1, None, _flag_gpus(value, STARTS[0])),
            NodeGroup(
                "workers", False, workers["min_workers"], workers["max_workers"], None, _flag_gpus(value, STARTS[1])
            ),
        ]
    else:
        groups = [NodeGroup(head, True, 1, 1, *_resources(types[head]))]
        groups += [
            NodeGroup(name, False, int(node_type["min_workers"]), int(node_type["max_workers"]), *_resources(node_type))
            for name, node_type in types.items()
            if int(node_type["max_workers"]) > 0
        ]
    return Cluster(tuple(groups), most_workers=int(prepared["max_workers"]))


def _resources(node_type: dict[str, Any]) -> tuple[float | None, int | None]:
    """Returns the CPUs and GPUs that the file gives. If it gives none, they are None, and Ray asks the cloud."""
    resources = node_type.get("resources") or {}
    return resources.get("CPU"), int(resources.get("GPU", 0)) if resources else None


def _flag_gpus(value: dict[str, Any], name: str) -> int | None:
    found = re.search(r"--num-gpus[= ](\d+)", " ".join(_strings(value.get(name))))
    return None if found is None else int(found[1])


def _check_served(source: YamlSource, cluster: Cluster | None) -> tuple[list[Problem], Serving | None]:
    place, remote = _served(source.value)
    if place is None:
        return [], None
    local = _local(source.value.get("file_mounts"), remote)
    if local is None:
        message = f"{remote} is not covered by file_mounts, so the head would not have it."
        return [source.problem(place, message)], None
    try:
        served = read(local)
    except ConfigError as error:
        message = f"{error.message} Local paths in file_mounts are relative to the folder where `ray up` is run."
        return [source.problem(place, message)], None
    problems, serving = check_serve(served)
    if serving is not None and cluster is not None:
        problems += check_fit(serving, cluster)
    return problems, serving


def _served(value: dict[str, Any]) -> tuple[Place | None, str]:
    for number, command in enumerate(_strings(value.get(STARTS[0]))):
        found = re.search(r"\bserve (?:deploy|run)\b[^;&|]*?(\S+\.ya?ml)", command)
        if found is not None:
            return (STARTS[0], number), found[1]
    return None, ""


def _local(mounts: Any, remote: str) -> Path | None:
    """Returns the local file for a path on a node, or None if no file_mount covers the path."""
    for there, here in sorted(
        (mounts if isinstance(mounts, dict) else {}).items(), key=lambda mount: -len(str(mount[0]))
    ):
        if isinstance(here, str) and (remote == there or remote.startswith(f"{str(there).rstrip('/')}/")):
            return Path(here).expanduser() / remote[len(str(there)) :].lstrip("/")
    return None


def _strings(value: Any) -> list[str]:
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []
