"""Puts a replica's HTTP front together from what the replica has."""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI

from lorafleet.cluster.catalog import DirectoryCatalog
from lorafleet.cluster.config import AppArgs
from lorafleet.resolvers.base import LoRAResolver
from lorafleet.resolvers.filesystem import FilesystemResolver
from lorafleet.resolvers.registry import LoRAResolverRegistry
from lorafleet.workers.openai.api import build_api
from lorafleet.workers.openai.front import Front, FrontConfig, read_generation_defaults
from lorafleet.workers.tokenizer import Tokenizer
from lorafleet.workers.transport import EngineClient


def make_api(args: AppArgs, tokenizer: Tokenizer, engine: EngineClient, catalog: DirectoryCatalog) -> FastAPI:
    front = Front(front_config(args), tokenizer, engine, catalog)
    return build_api(lambda: front)


def front_config(args: AppArgs) -> FrontConfig:
    return FrontConfig(
        served_model_names=tuple(args.base_names),
        model_path=args.model,
        allow_runtime_lora_updating=args.allow_runtime_lora_updating,
        queue_timeout_s=args.queue_timeout,
        max_body_bytes=args.max_body_bytes,
        chat_template=None if args.chat_template is None else Path(args.chat_template).read_text(),
        generation_defaults=read_generation_defaults(args.model),
    )


def make_resolver(args: AppArgs) -> LoRAResolver | None:
    """The folder first, then plugins; None where there is neither."""
    registry = LoRAResolverRegistry()
    if args.lora_resolver_dir is not None:
        registry.register("filesystem", FilesystemResolver(args.lora_resolver_dir, [args.model, *args.base_names]))
    registry.load_plugins(args.lora_resolvers)
    return registry if registry.supported() else None
