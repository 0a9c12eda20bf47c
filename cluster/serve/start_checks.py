"""Checks the arguments of a server against the machine that it starts on: its files and its Python packages."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from lorafleet.cluster.config import AppArgs
from lorafleet.cluster.quality.probes import read_probes
from lorafleet.cluster.tenancy.key_ring import KeyRing
from lorafleet.protocol.errors import ConfigError
from lorafleet.resolvers.source import is_uri


def check_paths(args: AppArgs) -> None:
    """Checks the arguments of a server on this machine. Raises ConfigError for mistakes that can be found before
    anything is started."""
    _require(Path(args.model) / "config.json", f"model {args.model!r} is not a local Hugging Face folder")
    drafts = args.speculative_config
    if drafts is not None and drafts.model is not None:
        _require(
            Path(drafts.model) / "config.json", f"speculative_config: model {drafts.model!r} is not a local folder"
        )
    for module in args.lora_modules:
        if not is_uri(module.path):
            _require(Path(module.path) / "adapter_config.json", f"adapter {module.name!r} cannot be served")
    if args.lora_resolver_dir is not None:
        _require(Path(args.lora_resolver_dir), f"lora_resolver_dir {args.lora_resolver_dir!r} does not exist")
    if args.kv_disk_dir is not None:
        _require(Path(args.kv_disk_dir), f"kv_disk_dir {args.kv_disk_dir!r} does not exist")
    if args.api_keys is not None:
        KeyRing(args.api_keys)
    check_otel(args)
    if args.quality_probes is not None:
        read_probes(args.quality_probes)
    if args.chat_template is not None:
        _require(Path(args.chat_template), f"chat_template {args.chat_template!r} does not exist")


def check_otel(args: AppArgs) -> None:
    """Raises ConfigError if traces are on but cannot be sent. Call it on the machine where a replica runs."""
    if args.otlp_traces_endpoint is None:
        return
    try:
        found = importlib.util.find_spec("opentelemetry.exporter.otlp.proto.http")
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise ConfigError(
            f"otlp_traces_endpoint={args.otlp_traces_endpoint!r} needs OpenTelemetry's exporter, which is not "
            "installed here. Run `pip install 'lorafleet[otel]'` on every node, or leave the option out."
        )


def _require(path: Path, complaint: str) -> None:
    if not path.exists():
        raise ConfigError(f"{complaint}: there is no {path}. Check the path.")
