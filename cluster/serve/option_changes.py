"""Applies to a running replica the options that a deploy has changed and that need no other replica."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

from lorafleet.api.access.work_threads import UPKEEP, in_turn, on_duty
from lorafleet.api.app_state import AppState
from lorafleet.cluster.admin.pushing import AdapterAdmin
from lorafleet.cluster.batches.batch_runner import BatchRunner
from lorafleet.cluster.config import AppArgs, LoRAModule
from lorafleet.cluster.deploys.changed_options import options_with
from lorafleet.cluster.directory.membership import Membership
from lorafleet.cluster.serve.adapter_lookup import AdapterEngine, DirectoryCatalog
from lorafleet.cluster.serve.loading import load_modules, read_module
from lorafleet.cluster.serve.replica_front import make_resolver, origins_of
from lorafleet.cluster.tenancy.key_ring import KeyRing
from lorafleet.cluster.tenancy.tenancy import Tenancy
from lorafleet.protocol.engine_control import BoundQueue
from lorafleet.protocol.options import Change
from lorafleet.resolvers.resolver_metrics import ResolverMetrics
from lorafleet.resolvers.store import AdapterStore

Take = Callable[[AppArgs, AppArgs], Awaitable[None]]  # Gets the former and the new arguments.


class OptionChanges:
    """Takes the options marked Change.IN_REPLICA, each by the method that the table names for it.

    Args:
        batches: None if the replica runs no batches.
    """

    def __init__(
        self,
        state: AppState,
        engine: AdapterEngine,
        tenancy: Tenancy,
        catalog: DirectoryCatalog,
        admin: AdapterAdmin,
        membership: Membership,
        files: AdapterStore,
        lookups: ResolverMetrics,
        batches: BatchRunner | None,
    ) -> None:
        self._state = state
        self._engine = engine
        self._tenancy = tenancy
        self._catalog = catalog
        self._admin = admin
        self._membership = membership
        self._files = files
        self._lookups = lookups
        self._batches = batches
        self.takers: dict[Take, tuple[str, ...]] = {
            # The keys come first, so that a request which a new bound admits has a key that is valid now.
            self._take_keys: ("admin_key", "api_keys"),
            self._take_front: (
                *("allow_runtime_lora_updating", "queue_timeout", "max_body_bytes", "response_store_bytes"),
                *("allowed_origins", "insecure_without_keys"),
            ),
            self._take_queue: ("max_queued_requests", "max_queued_tokens"),
            self._take_hosts: ("push_hosts",),
            self._take_batches: ("batch_concurrency", "batch_store_bytes"),
            self._take_resolvers: ("lora_resolver_dir", "lora_resolvers"),
            self._take_modules: ("lora_modules",),
        }

    async def apply(self, before: AppArgs, args: AppArgs) -> None:
        """Applies the options that differ. Raises LorafleetError if something cannot be applied. Some of the others may
        be applied then, and a further call with the same arguments is safe."""
        changed = {name for name in options_with(Change.IN_REPLICA) if getattr(args, name) != getattr(before, name)}
        for take, names in self.takers.items():
            if changed.intersection(names):
                await take(before, args)

    async def check(self, before: AppArgs, args: AppArgs) -> None:
        """Raises LorafleetError if apply() would, but changes nothing. Adapters are loaded and checked."""
        if args.api_keys is not None and args.api_keys != before.api_keys:
            await on_duty(KeyRing, args.api_keys)
        await in_turn(UPKEEP, make_resolver, args, self._files, ResolverMetrics())
        await asyncio.gather(*(read_module(self._catalog, module) for module in _added(before, args)))

    async def _take_keys(self, _: AppArgs, args: AppArgs) -> None:
        await on_duty(self._tenancy.change_keys, args.admin_key, args.api_keys)

    async def _take_front(self, _: AppArgs, args: AppArgs) -> None:
        self._state.change_config(
            replace(
                self._state.config,
                allow_runtime_lora_updating=args.allow_runtime_lora_updating,
                queue_timeout_s=args.queue_timeout,
                max_body_bytes=args.max_body_bytes,
                response_store_bytes=args.response_store_bytes,
                origins=origins_of(args),
            )
        )

    async def _take_queue(self, _: AppArgs, args: AppArgs) -> None:
        await self._engine.control(BoundQueue(args.max_queued_requests, args.max_queued_tokens))

    async def _take_hosts(self, _: AppArgs, args: AppArgs) -> None:
        self._admin.receivers.groups.allowed_hosts = args.push_hosts

    async def _take_batches(self, _: AppArgs, args: AppArgs) -> None:
        """Changes the lines in flight. The bytes of the store are read from the arguments for each upload."""
        if self._batches is not None:
            self._batches.places.set_most(args.batch_concurrency)

    async def _take_resolvers(self, _: AppArgs, args: AppArgs) -> None:
        self._catalog.set_resolver(await in_turn(UPKEEP, make_resolver, args, self._files, self._lookups))

    async def _take_modules(self, before: AppArgs, args: AppArgs) -> None:
        """Loads what is new in the list before it is published, and then removes what is no longer in it."""
        await load_modules(self._catalog, _added(before, args), self._membership)
        await self._admin.unlist([module.name for module in args.lora_modules])


def _added(before: AppArgs, args: AppArgs) -> list[LoRAModule]:
    return [module for module in args.lora_modules if module not in before.lora_modules]
