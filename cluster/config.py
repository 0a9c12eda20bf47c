"""Defines the options that users set in YAML (`args:`) or as flags, and parses them once, into frozen objects.

The options of the engine and of adapters are declared in protocol/engine_config.py and protocol/lora_config.py. The
command line (cluster/cli/cli.py) is generated from the fields of AppArgs, so the two cannot differ.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from lorafleet.cluster.batches.batch_options import BatchOptions
from lorafleet.cluster.external_router_options import ExternalRouterOptions
from lorafleet.cluster.json_text import is_json, parse_json
from lorafleet.cluster.replica_options import ReplicaOptions
from lorafleet.cluster.store_uri import StoreUri
from lorafleet.cluster.tenancy.key_source import is_key_text
from lorafleet.cluster.wording import in_words, nearest
from lorafleet.protocol.engine_config import (
    EngineConfig,
    EngineOptions,
    SpeculativeConfig,
    TensorParallelSize,
)
from lorafleet.protocol.errors import ConfigError
from lorafleet.protocol.lora_config import LoRAConfig, LoRAOptions
from lorafleet.protocol.options import Change, options_of, values_of
from lorafleet.protocol.sources import CACHE_BYTES, HTTPConfig, HubConfig, S3Config, SourcesConfig
from lorafleet.protocol.tool_call_formats import ReasoningFormat, ToolCallFormat

ALIASES = {  # SGLang's name: our name
    "lora_paths": "lora_modules",
    "max_loras_per_batch": "max_loras",
    "tp": "tensor_parallel_size",
}
# Options that are of no use to a server without adapters.
LORA_ONLY = (
    *("lora_modules", "fill_cpu_loras", "allow_runtime_lora_updating", "push_hosts", "metrics_lora_info"),
    *("lora_resolver_dir", "lora_resolver_s3", "lora_resolver_http", "lora_resolver_hub", "lora_resolvers"),
    *("lora_cache_dir", "lora_cache_bytes", "lora_neighbors", "on_lora_load_failure", *options_of(LoRAOptions)),
)
KEY_VARIABLES = {"admin_key": "LORAFLEET_ADMIN_KEY", "api_keys": "LORAFLEET_API_KEYS"}


class LoRAModule(BaseModel):
    """An adapter that is served from the start."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(validation_alias=AliasChoices("name", "lora_name"))
    path: str = Field(validation_alias=AliasChoices("path", "lora_path"))
    base_model_name: str | None = None


def _parse_module(value: Any) -> Any:
    """Parses `name=path` or JSON text into a dict. Returns a value that is not text unchanged."""
    if not isinstance(value, str):
        return value
    if is_json(value):
        return parse_json(value)
    name, equals, path = value.partition("=")
    if not equals or not name or not path:
        raise ValueError(
            f'{value!r} is neither name=path nor JSON such as \'{{"name": "sql", "path": "/adapters/sql"}}\''
        )
    return {"name": name, "path": path}


def _parse_source(shorthand: str) -> BeforeValidator:
    """Returns a validator that parses JSON text into a dict; other text is the value of the field `shorthand`."""

    def parse(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        if is_json(value):
            return parse_json(value)
        return {shorthand: [value] if shorthand == "allow" else value}

    return BeforeValidator(parse)


def _absolute(value: Any) -> Any:
    """Makes a path absolute, since replicas run in another working directory. Returns API keys given as text
    unchanged."""
    return str(Path(value).absolute()) if isinstance(value, str) and not is_key_text(value) else value


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str | dict) else value


def _check_origin(value: str) -> str:
    parts = urlsplit(value)
    is_origin = bool(parts.scheme and parts.netloc) and value == f"{parts.scheme}://{parts.netloc}"
    if not is_origin and value != "*":
        raise ValueError(f"{value!r} is not an origin; give scheme, host and port as in https://app.example.org, or *")
    return value


def _check_push_host(value: str) -> str:
    """Raises ValueError if no host could match."""
    if _HOST_NAME.fullmatch(value) is None:
        if "/" not in value and ":" not in value:
            raise ValueError(f"{value!r} is no host; give a name, an address, or a network such as 10.0.0.0/8")
        ip_network(value)
    return value


def _check_modules(modules: Sequence[LoRAModule], base_names: Collection[str]) -> None:
    names = [module.name for module in modules]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"lora_modules names {name!r} twice; give each adapter its own name.")
        if name in base_names:
            raise ValueError(f"lora_modules names an adapter {name!r}, which is the base model's name; rename it.")


def _check_resolvers(order: Sequence[str], configured: Collection[str]) -> None:
    for name in ("filesystem", "s3", "http", "hub"):
        if name in order and name not in configured:
            setting = "lora_resolver_dir" if name == "filesystem" else f"lora_resolver_{name} with a uri"
            raise ValueError(f"lora_resolvers names {name!r}, which needs {setting}.")
    for name in order:
        if order.count(name) > 1:
            raise ValueError(f"lora_resolvers names {name!r} twice; name each resolver once.")


_HOST_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
Origin = Annotated[str, AfterValidator(_check_origin)]
PushHost = Annotated[str, AfterValidator(_check_push_host)]
Module = Annotated[LoRAModule, BeforeValidator(_parse_module)]


class AppArgs(
    BatchOptions, ReplicaOptions, ExternalRouterOptions, EngineOptions, LoRAOptions, extra="forbid", frozen=True
):
    """The arguments of lorafleet.cluster.serve.app:build. They have vLLM's names where vLLM has the same option."""

    served_model_name: Annotated[list[str], BeforeValidator(_as_list)] = Field(
        [], description="Names that requests use for the base model. Default: the model's path."
    )
    lora_modules: Annotated[list[Module], BeforeValidator(_as_list), Change.IN_REPLICA] = Field(
        [], description='Adapters served from the start: name=path, or JSON with "name", "path", "base_model_name".'
    )
    chat_template: str | None = Field(None, description="File with a Jinja chat template. Default: the tokenizer's.")

    pooling: Literal["auto", "last", "mean", "cls"] = Field(
        "auto",
        description="Embeddings are the last token's hidden state, the mean of all, or the first token's (cls). "
        "auto: as the model's 1_Pooling/config.json says, else last.",
    )
    tool_call_parser: ToolCallFormat = Field(
        "auto",
        description="Format in which models write tool calls. auto: recognized from each model's chat template. "
        "none: calls are not parsed.",
    )
    reasoning_parser: ReasoningFormat = Field("auto", description="As --tool-call-parser, for reasoning between tags.")

    enable_lora: bool = Field(True, description="Serve adapters beside the base model.")
    fill_cpu_loras: bool = Field(
        False,
        description="Read adapters of the catalogue into empty host memory before they are requested, so that "
        "first requests need not wait. Useful if the cluster's host memory holds a good part of the "
        "catalogue.",
    )
    allow_runtime_lora_updating: Annotated[bool, Change.IN_REPLICA] = Field(
        False, description="Enable /v1/load_lora_adapter and /v1/unload_lora_adapter. Trusted networks only."
    )
    push_hosts: Annotated[list[PushHost], BeforeValidator(_as_list), Change.IN_REPLICA] = Field(
        [],
        description="Hosts of trainers whose process groups replicas may join to receive adapters: names, addresses, "
        "or networks such as 10.0.0.0/8. Default: this machine only.",
    )
    lora_resolver_dir: Annotated[str | None, Change.IN_REPLICA] = Field(
        None, description="Folder of adapters. Each is served by the name of its folder when it is first requested."
    )
    lora_resolver_s3: Annotated[S3Config | None, _parse_source("uri")] = Field(
        None,
        description="Adapters in S3: s3://bucket/prefix/{base_model_name}/{lora_name}, or JSON with uri, endpoint_url, "
        "region, profile, anonymous, timeout_s, max_bytes.",
    )
    lora_resolver_http: Annotated[HTTPConfig | None, _parse_source("uri")] = Field(
        None,
        description="Adapters on a web server: https://host/adapters/{lora_name}, or JSON with uri, allow (URL "
        "prefixes), timeout_s, max_bytes.",
    )
    lora_resolver_hub: Annotated[HubConfig | None, _parse_source("allow")] = Field(
        None,
        description="Adapters on the Hugging Face hub: the repos allowed, such as 'org/*', or JSON with allow, repo, "
        "revision, endpoint, timeout_s, max_bytes.",
    )
    lora_resolvers: Annotated[list[str], BeforeValidator(_as_list), Change.IN_REPLICA] = Field(
        [],
        description="Order in which unknown adapters are looked up; the first hit wins: filesystem, s3, http, "
        "hub and installed plugins. Resolvers that are configured but not named here are tried "
        "first.",
    )
    lora_cache_dir: str | None = Field(
        None, description="Folder on each node's local disk for fetched adapters. Default: ~/.cache/lorafleet."
    )
    lora_cache_bytes: int = Field(
        CACHE_BYTES,
        ge=1,
        description="Maximum size of that folder in bytes. The least recently used adapters are evicted.",
    )

    lora_neighbors: bool = Field(
        True,
        description="Fetch adapters of remote sources from the caches of other nodes before their source is asked. "
        "Adapters in local or shared folders are read there in any case.",
    )

    catalog_uri: StoreUri | None = Field(
        None,
        description="Where the catalogue of adapters is stored: a folder that all nodes see, or "
        "s3://bucket/prefix. Default: a folder below LORAFLEET_STATE_DIR or ~/.local/state/lorafleet "
        "on the head node.",
    )

    admin_key: Annotated[str | None, Change.IN_REPLICA] = Field(
        None,
        repr=False,
        min_length=8,
        description="Key that opens /v1/adapters. The environment variable LORAFLEET_ADMIN_KEY is a safer place for "
        "it. Without it, only API keys of the scope admin open /v1/adapters.",
    )

    api_keys: Annotated[str | None, BeforeValidator(_absolute), Change.IN_REPLICA] = Field(
        None,
        repr=False,
        description="YAML or JSON file of API keys and tenants, which every node has at this path. `lorafleet "
        "keys` writes it, and servers read it again when it changes. Its content may also be in the "
        "environment variable LORAFLEET_API_KEYS. Without it, anyone who can reach the server can send "
        "requests.",
    )
    usage_dir: Annotated[str | None, BeforeValidator(_absolute)] = Field(
        None,
        description="Folder in which replicas record each tenant's usage; `lorafleet usage` adds it up. Default "
        "with api_keys: usage/ below LORAFLEET_STATE_DIR or ~/.local/state/lorafleet, on each node.",
    )
    audit_dir: Annotated[str | None, BeforeValidator(_absolute)] = Field(
        None,
        description="Folder of the audit log, in which replicas record administrative requests. Default with "
        "admin_key or api_keys: audit/ in the same place.",
    )
    allowed_origins: Annotated[list[Origin], BeforeValidator(_as_list), Change.IN_REPLICA] = Field(
        [],
        description="Sites whose pages may use the server from a browser, such as https://app.example.org, or * "
        "for all. Without keys, requests from pages of other sites are rejected, and so are requests whose "
        "Host is neither an address nor localhost.",
    )
    insecure_without_keys: Annotated[bool, Change.IN_REPLICA] = Field(
        False, description="Start without API keys even if open to the network."
    )
    insecure_without_ray_token: Annotated[bool, Change.BY_SERVE] = Field(
        False, description="Start even if the address is open to the network and Ray requires no token."
    )

    otlp_traces_endpoint: str | None = Field(
        None,
        description="URL of an OpenTelemetry collector that receives the traces of requests, as protobuf over HTTP, "
        "such as http://localhost:4318/v1/traces. Default: no traces. Needs the extra: pip install "
        "'lorafleet[otel]'.",
    )
    otlp_traces_ratio: float = Field(
        1.0,
        ge=0,
        le=1,
        description="Share of requests that are traced. A client's `traceparent` header overrides it for its request.",
    )

    quality_probes: Annotated[str | None, BeforeValidator(_absolute)] = Field(
        None,
        description="YAML or JSON file of prompts, which every node has at this path. Models answer them on a "
        "schedule and are compared with their stored baselines (docs/quality.md). Default: no probes.",
    )

    tensor_parallel_size: TensorParallelSize = Field(1, ge=1)  # Rejected while parsing, as num_replicas is.

    @model_validator(mode="before")
    @classmethod
    def _known_names(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        renamed: dict[str, Any] = {str(ALIASES.get(name, name)): value for name, value in data.items()}
        if len(renamed) < len(data):
            both = next(alias for alias, name in ALIASES.items() if alias in data and name in data)
            raise ValueError(f"{both} and {ALIASES[both]} are the same setting; give only one of them.")
        for name in renamed:
            if name not in cls.model_fields:
                raise ValueError(
                    f"unknown argument {name!r}{nearest(name, cls.model_fields, most=len(cls.model_fields))}"
                )
        return renamed

    @field_validator("speculative_config", mode="before")
    @classmethod
    def _parsed(cls, value: Any) -> Any:
        return SpeculativeConfig.of(parse_json(value) if isinstance(value, str) else value)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not all(self.served_model_name):
            raise ValueError(
                "served_model_name has an empty name, which no request can give; give names, or leave it out."
            )
        _check_modules(self.lora_modules, self.base_names)
        if not self.enable_lora:
            _check_no_loras(self)
        if self.fill_cpu_loras and self.routing != "affinity":
            raise ValueError(
                f"routing={self.routing} places no adapters, so fill_cpu_loras has no effect; remove it, or use "
                "routing=affinity."
            )
        _check_resolvers(self.lora_resolvers, self._configured_resolvers)
        return self

    @property
    def base_names(self) -> list[str]:
        return self.served_model_name or [self.model]

    def directory_place(self) -> dict[str, Any]:
        """Returns all fields of DirectoryPlace except the application's name."""
        return {
            "model": self.model,
            "catalog_uri": self.catalog_uri,
            "base_names": tuple(self.base_names),
            "fill_cpu_loras": self.fill_cpu_loras,
            "places_by_demand": self.routing == "affinity",
        }

    @property
    def sources(self) -> SourcesConfig:
        return SourcesConfig(
            s3=self.lora_resolver_s3 or S3Config(),
            http=self.lora_resolver_http,
            hub=self.lora_resolver_hub,
            cache_dir=self.lora_cache_dir,
            cache_bytes=self.lora_cache_bytes,
        )

    @property
    def has_neighbors(self) -> bool:
        """Whether replicas on other nodes are asked for adapters. One replica alone is ready for them too, since a
        deploy may add others."""
        return self.lora_neighbors and self.enable_lora

    @property
    def resolver_templates(self) -> dict[str, str]:
        """The URI templates of the configured resolvers, by the resolver's name."""
        s3, http, hub = self.lora_resolver_s3, self.lora_resolver_http, self.lora_resolver_hub
        templates: dict[str, str | None] = {
            "s3": None if s3 is None else s3.uri,
            "http": None if http is None else http.uri,
            "hub": None if hub is None else f"hf://{hub.repo}",
        }
        return {name: uri for name, uri in templates.items() if uri is not None}

    @property
    def resolver_order(self) -> list[str]:
        return [name for name in self._configured_resolvers if name not in self.lora_resolvers] + self.lora_resolvers

    @property
    def _configured_resolvers(self) -> list[str]:
        folder = ["filesystem"] if self.lora_resolver_dir is not None else []
        return [*folder, *self.resolver_templates]

    def engine_config(self) -> EngineConfig:
        """Returns the engine's configuration. Raises ConfigError if a value is out of bounds."""
        return EngineConfig(
            **values_of(EngineOptions, self),
            max_queued_requests=self.max_queued_requests,
            max_queued_tokens=self.max_queued_tokens,
            lora=LoRAConfig(**values_of(LoRAOptions, self)) if self.enable_lora else None,
            sources=self.sources,
            kv_events=self.kv_events_config,
            most_replicas=self.most_replicas,
        )


def _check_no_loras(args: AppArgs) -> None:
    fields = AppArgs.model_fields
    unused = [name for name in LORA_ONLY if getattr(args, name) != fields[name].get_default()]
    if unused:
        raise ValueError(f"{', '.join(unused)} has no effect without enable_lora; leave it out, or enable adapters.")


def parse_args(values: dict[str, Any]) -> AppArgs:
    """Validates the values as AppArgs. Raises ConfigError with a readable message in place of pydantic's report."""
    try:
        return AppArgs.model_validate(values)
    except ValidationError as error:
        raise ConfigError("; ".join(in_words(details) for details in error.errors())) from None


def keys_from(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the arguments that the environment has, which are better not shown in YAML or in a list of processes."""
    return {name: environment[variable] for name, variable in KEY_VARIABLES.items() if variable in environment}


def with_keys(args: AppArgs, environment: Mapping[str, str]) -> AppArgs:
    """Returns the arguments with the keys from the environment, except those that were given. Raises ConfigError."""
    keys = {name: value for name, value in keys_from(environment).items() if name not in args.model_fields_set}
    return args.model_copy(update=parse_args({"model": args.model} | keys).model_dump(include=set(keys)))
