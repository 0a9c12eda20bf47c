"""Assembles a replica's HTTP front from the parts of the replica."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

from lorafleet.api.access.origins import Origins
from lorafleet.api.app_state import AppState, make_state
from lorafleet.api.front_config import FrontConfig, read_generation_defaults
from lorafleet.api.languages import AdapterLanguages
from lorafleet.api.request.pooling import read_pooling
from lorafleet.api.stored.response_query import AskReplicas
from lorafleet.api.text.tokenizer import Tokenizer
from lorafleet.cluster.config import AppArgs
from lorafleet.cluster.serve.adapter_lookup import DirectoryCatalog
from lorafleet.cluster.serve.client_metrics import ClientMetrics
from lorafleet.cluster.serve.residency_metrics import ResidencyMetrics
from lorafleet.cluster.serve.start_checks import check_otel
from lorafleet.cluster.serve.state_folder import state_folder
from lorafleet.cluster.tenancy.quota_client import Admit
from lorafleet.cluster.tenancy.tenancy import Tenancy
from lorafleet.protocol.transport.engine_socket import EngineClient
from lorafleet.resolvers.filesystem import FilesystemResolver
from lorafleet.resolvers.registry import LoRAResolverRegistry
from lorafleet.resolvers.remote import RemoteResolver
from lorafleet.resolvers.resolver_metrics import ResolverMetrics
from lorafleet.resolvers.store import AdapterStore

if TYPE_CHECKING:
    from lorafleet.api.telemetry.tracing import Tracing


def make_front(
    args: AppArgs,
    replica_id: str,
    tokenizer: Tokenizer,
    engine: EngineClient,
    catalog: DirectoryCatalog,
    store: AdapterStore,
    languages: AdapterLanguages,
    lookups: ResolverMetrics,
    scrape: Callable[[], Awaitable[bytes]],
    tenancy: Tenancy,
    ask_replicas: AskReplicas,
) -> AppState:
    state = make_state(
        front_config(args, replica_id),
        tokenizer,
        engine,
        catalog,
        tenancy.access,
        languages,
        scrape,
        store.metrics.fetched_since,
        ask_replicas,
    )
    metrics = state.telemetry.metrics
    for collector in tenancy.collectors:
        metrics.add(collector)
    metrics.add(store.metrics)
    metrics.add(ClientMetrics(engine))
    if args.metrics_lora_info:
        metrics.add(ResidencyMetrics(engine, args.base_names[0]))
    metrics.add(lookups)
    return state


def make_tenancy(args: AppArgs, replica_id: str, admit: Admit) -> Tenancy:
    """Builds what depends on keys. With keys, usage and administration are logged even if no folder is configured."""
    usage, audit = args.usage_dir, args.audit_dir
    if usage is None and args.api_keys is not None:
        usage = str(state_folder() / "usage")
    if audit is None and (args.api_keys is not None or args.admin_key is not None):
        audit = str(state_folder() / "audit")
    return Tenancy(
        args.admin_key,
        args.api_keys,
        None if usage is None else Path(usage),
        None if audit is None else Path(audit),
        replica_id,
        admit,
    )


def start_tracing(args: AppArgs, replica_id: str) -> Tracing | None:
    """Starts tracing, or returns None if traces are off. Raises ConfigError if they cannot be sent."""
    if args.otlp_traces_endpoint is None:
        return None
    check_otel(args)
    from lorafleet.api.telemetry.tracing import Tracing  # OpenTelemetry is an optional dependency.

    return Tracing(args.otlp_traces_endpoint, args.otlp_traces_ratio, replica_id)


def front_config(args: AppArgs, replica_id: str) -> FrontConfig:
    return FrontConfig(
        served_model_names=tuple(args.base_names),
        model_path=args.model,
        allow_runtime_lora_updating=args.allow_runtime_lora_updating,
        queue_timeout_s=args.queue_timeout,
        max_body_bytes=args.max_body_bytes,
        response_store_bytes=args.response_store_bytes,
        origins=origins_of(args),
        replica_id=replica_id,
        chat_template=None if args.chat_template is None else Path(args.chat_template).read_text(),
        pooling=read_pooling(args.model) if args.pooling == "auto" else args.pooling,
        tool_call_parser=args.tool_call_parser,
        reasoning_parser=args.reasoning_parser,
        generation_defaults=read_generation_defaults(args.model),
    )


def origins_of(args: AppArgs) -> Origins:
    # Without keys, check_exposure() allows an address beyond loopback only if insecure_without_keys is set.
    return Origins(tuple(args.allowed_origins), only_loopback=not args.insecure_without_keys)


def make_resolver(args: AppArgs, store: AdapterStore, metrics: ResolverMetrics) -> LoRAResolverRegistry | None:
    """Returns the resolvers in the order of lora_resolvers, after those that it does not name; None if there are
    none. Raises ConfigError."""
    registry = LoRAResolverRegistry(metrics)
    names = [args.model, *args.base_names]
    for name in args.resolver_order:
        if name == "filesystem" and args.lora_resolver_dir is not None:
            registry.register(name, FilesystemResolver(args.lora_resolver_dir, names))
        elif name in args.resolver_templates:
            registry.register(name, RemoteResolver(args.resolver_templates[name], store, names))
        else:
            registry.load_plugins([name])
    return registry if registry.supported() else None
