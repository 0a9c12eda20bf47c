"""Puts a replica's HTTP front together from what the replica has."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request

from lorafleet.cluster.catalog import DirectoryCatalog
from lorafleet.cluster.config import AppArgs
from lorafleet.resolvers.base import LoRAResolver
from lorafleet.resolvers.filesystem import FilesystemResolver
from lorafleet.resolvers.registry import LoRAResolverRegistry
from lorafleet.workers.transport import EngineClient


def make_api(args: AppArgs, engine: EngineClient, catalog: DirectoryCatalog) -> FastAPI:
    api = FastAPI()

    @api.get("/health")
    async def health() -> str:
        return "ok"

    @api.get("/v1/models")
    async def models() -> Any:
        return {"data": [{"id": name} for name in args.base_names] + [{"id": e.lora_name} for e in catalog.entries()]}

    @api.post("/v1/completions")
    async def completions(request: Request) -> Any:
        name = (await request.json())["model"]
        return {"digest": "" if name in args.base_names else (await catalog.resolve(name)).digest}

    return api


def make_resolver(args: AppArgs) -> LoRAResolver | None:
    """The folder first, then plugins; None where there is neither."""
    registry = LoRAResolverRegistry()
    if args.lora_resolver_dir is not None:
        registry.register("filesystem", FilesystemResolver(args.lora_resolver_dir, [args.model, *args.base_names]))
    registry.load_plugins(args.lora_resolvers)
    return registry if registry.supported() else None
