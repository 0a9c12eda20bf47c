"""Checks a Ray Serve configuration, which `serve run`, `serve deploy` and a RayService accept. nodes.py checks
whether its replicas fit on a cluster."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import AliasChoices, ValidationError

from lorafleet.cluster.checking.keys import Schema, check_keys
from lorafleet.cluster.checking.replica_counts import check_replica_counts
from lorafleet.cluster.checking.yaml_source import Place, Problem, YamlSource
from lorafleet.cluster.config import ALIASES, AppArgs, LoRAModule, keys_from
from lorafleet.cluster.proxy.exposure import check_exposure
from lorafleet.cluster.wording import nearest
from lorafleet.protocol.errors import ConfigError

BUILDER = "lorafleet.cluster.serve.app:build"
OLD_BUILDER = "lorafleet.cluster.app:build"  # Still works in this release, see src/lorafleet/moved.py.
DEPLOYMENTS = ("EngineReplica", "AdapterRouter")
FROM_ARGS = {  # An option of a deployment -> the args to set instead.
    "user_config": "the options that it would replace",
    "max_ongoing_requests": "max_ongoing_requests",
    "max_queued_requests": "max_queued_requests",
    "ray_actor_options": "num_cpus, device",
    "placement_group_bundles": "tensor_parallel_size, num_cpus, device",
    "placement_group_strategy": "tensor_parallel_size",
    "request_router_config": "served_model_name, catalog_uri",
}


@dataclass(frozen=True, slots=True)
class Application:
    """One of lorafleet's applications, whose args are valid."""

    name: str
    place: Place
    args: AppArgs


@dataclass(frozen=True, slots=True)
class Serving:
    source: YamlSource
    host: str
    port: int
    every_node: bool  # Whether every node has a proxy, and not only the head.
    applications: tuple[Application, ...]
    others: tuple[str, ...]  # Applications that are not lorafleet's; their args are not checked.


def check_serve(source: YamlSource) -> tuple[list[Problem], Serving | None]:
    """Returns the problems, and what would run. The latter is None if a mistake leaves nothing to say about it."""
    from ray.serve.config import ProxyLocation
    from ray.serve.schema import ServeDeploySchema

    problems = check_keys(source, (), source.value, _serve_schema())
    schema: ServeDeploySchema | None = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", DeprecationWarning)
            schema = ServeDeploySchema.model_validate(source.value)
    except ValidationError as error:
        problems += _of_pydantic(source, (), error)
    except DeprecationWarning as error:
        problems.append(source.problem((), str(error)))
    applications, others = [], []
    for place, given in _applications(source.value):
        if given.get("import_path") in (BUILDER, OLD_BUILDER):
            found, args = _check_args(source, (*place, "args"), given.get("args"))
            problems += found + _check_deployments(source, place, given)
            if args is not None:
                found, args = check_replica_counts(source, place, given, args)
                problems += found
                applications.append(Application(str(given.get("name", "default")), place, args))
        elif isinstance(given.get("import_path"), str):
            problems += _check_import(source, (*place, "import_path"), given["import_path"])
            others.append(str(given.get("name", "default")))
    if schema is None:
        return problems, None
    if not schema.applications:
        problems.append(source.problem(("applications",), "there is no application."))
    every_node = schema.proxy_location == ProxyLocation.EveryNode
    host, port = schema.http_options.host, schema.http_options.port
    for application in applications:
        problems += _check_exposure(source, application, host)
    return problems, Serving(source, host, port, every_node, tuple(applications), tuple(others))


def _check_exposure(source: YamlSource, application: Application, host: str) -> list[Problem]:
    """Checks only the API keys, since the file does not say whether Ray has a token."""
    try:
        check_exposure(host, application.args, {"RAY_AUTH_MODE": "token"})
    except ConfigError as error:
        return [source.problem((*application.place, "args"), error.message)]
    return []


def _applications(value: Any) -> Iterator[tuple[Place, dict[str, Any]]]:
    """Yields the applications that have a readable form, whatever else is wrong with the file."""
    found = value.get("applications") if isinstance(value, dict) else None
    for number, application in enumerate(found if isinstance(found, list) else []):
        if isinstance(application, dict):
            yield ("applications", number), application


@functools.cache
def _serve_schema() -> Schema:
    from ray.runtime_env import RuntimeEnv
    from ray.serve.schema import ServeDeploySchema

    schema = ServeDeploySchema.model_json_schema()
    runtime_env = {
        "type": "object",
        "properties": {name: {} for name in RuntimeEnv.known_fields if not name.startswith("_")},
    }
    for name in ("ServeApplicationSchema", "RayActorOptionsSchema"):
        schema["$defs"][name]["properties"]["runtime_env"] = runtime_env
    return schema


@functools.cache
def _args_schema() -> Schema:
    schema = AppArgs.model_json_schema()
    properties = schema["properties"]
    properties |= {alias: properties[name] for alias, name in ALIASES.items()}
    module = schema["$defs"]["LoRAModule"]["properties"]
    for name, field in LoRAModule.model_fields.items():
        if isinstance(field.validation_alias, AliasChoices):
            module |= {str(alias): module[name] for alias in field.validation_alias.choices}
    return schema


def _check_args(source: YamlSource, place: Place, values: Any) -> tuple[list[Problem], AppArgs | None]:
    """Returns the problems of an application's args, and the args if there are none.

    AppArgs and the engine stop at the first contradiction. So wrong arguments are left out, and the rest is tried
    again.
    """
    if not isinstance(values, dict):
        return [source.problem(place, "args must name a model, at least.")], None
    problems = check_keys(source, place, values, _args_schema())
    rest = {name: value for name, value in values.items() if name in AppArgs.model_fields or name in ALIASES}
    while True:
        try:
            args = AppArgs.model_validate(keys_from(os.environ) | rest)
            args.engine_config()
            return problems, args if rest == values else None
        except ValidationError as error:
            wrong = _of_pydantic(source, place, error, rest)
            names = {detail["loc"][0] if detail["loc"] else _named(detail["msg"], rest) for detail in error.errors()}
        except ConfigError as error:
            name = _named(error.message, rest)
            problem = source.problem((*place, name) if name else place, error.message)
            is_told = any(one.place.startswith(f"{problem.place}.") for one in problems)  # with a key inside
            wrong, names = [] if name and is_told else [problem], {name}
        problems += wrong
        if not names & rest.keys():
            return problems, None
        rest = {name: value for name, value in rest.items() if name not in names}


def _named(message: str, values: dict[str, Any]) -> str:
    """Returns the first argument that a message names, or "" if it names none."""
    return next((word for word in re.findall(r"[a-z_][a-z0-9_]*", message) if word in values), "")


def _of_pydantic(
    source: YamlSource, place: Place, error: ValidationError, values: dict[str, Any] | None = None
) -> list[Problem]:
    problems = []
    for detail in error.errors():
        if detail["type"] != "extra_forbidden":  # check_keys has a better message.
            message = str(detail["msg"]).removeprefix("Value error, ")
            name = "" if detail["loc"] else _named(message, values or {})
            problems.append(source.problem((*place, *detail["loc"], *([name] if name else [])), message))
    return problems


def _check_import(source: YamlSource, place: Place, import_path: str) -> list[Problem]:
    module = import_path.partition(":")[0] if ":" in import_path else import_path.rpartition(".")[0]
    if module.split(".")[0] == "lorafleet":
        return [
            source.problem(place, f"{import_path!r} does not build an application{nearest(import_path, [BUILDER])}")
        ]
    try:
        found = importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        found = False
    if found:
        return []
    hint = nearest(import_path, [BUILDER])
    return [source.problem(place, f"there is no module {module!r} in this Python environment{hint}")]


def _check_deployments(source: YamlSource, place: Place, application: dict[str, Any]) -> list[Problem]:
    problems = []
    for number, deployment in enumerate(application.get("deployments") or []):
        deployment_place: Place = (*place, "deployments", number)
        if deployment.get("name") not in DEPLOYMENTS:
            message = (
                f"there is no deployment {deployment.get('name')!r}{nearest(str(deployment.get('name')), DEPLOYMENTS)}"
            )
            problems.append(source.problem((*deployment_place, "name"), message))
        problems += [
            source.problem((*deployment_place, name), f"lorafleet sets this from its own options; set args: {instead}.")
            for name, instead in FROM_ARGS.items()
            if name in deployment
        ]
    return problems
