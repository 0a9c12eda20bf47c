"""Runs one replica, which consists of the HTTP front of one engine and the engine's worker processes, one for each
rank.

A replica joins the directory, starts the workers, connects to rank 0, loads the configured adapters, and then serves
the API of api/routes. It ends when a worker ends, so that Serve replaces them all.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from ray import serve

from lorafleet.api.front import Front
from lorafleet.api.languages import AdapterLanguages
from lorafleet.api.routes.build_api import build_api
from lorafleet.api.text.tokenizer import Tokenizer
from lorafleet.cluster.admin.pushing import AdapterAdmin
from lorafleet.cluster.catalogue.catalogue_store import Store, open_store
from lorafleet.cluster.catalogue.log_end import LogEnd
from lorafleet.cluster.config import AppArgs, LoRAModule
from lorafleet.cluster.console.replica_view import ask_all, replica_view
from lorafleet.cluster.console.state_api import StateApi
from lorafleet.cluster.console.view import AdapterView, DirectoryView, ReplicaQuery, ReplicaView, Viewer, ViewQuery
from lorafleet.cluster.directory import directory_metrics
from lorafleet.cluster.directory.directory import HAND_OVER_S, Order
from lorafleet.cluster.directory.directory_actor import SWITCH_S, DirectoryPlace, get_or_create
from lorafleet.cluster.directory.membership import CHANGE_S, READ_S, Membership
from lorafleet.cluster.proxy import ingress
from lorafleet.cluster.quality.book import QualityBook
from lorafleet.cluster.quality.monitor import TURN_S, QualityMonitor
from lorafleet.cluster.quality.probes import read_probes
from lorafleet.cluster.quality.quality_metrics import QualityMetrics
from lorafleet.cluster.quality.routes import QualityApi
from lorafleet.cluster.serve.adapter_lookup import DirectoryCatalog, obey
from lorafleet.cluster.serve.api_routes import routes_beside
from lorafleet.cluster.serve.autoscaling import load_of
from lorafleet.cluster.serve.loading import CheckingEngine
from lorafleet.cluster.serve.ranks import ReplicaRanks
from lorafleet.cluster.serve.replica_front import make_front, make_resolver, start_tracing
from lorafleet.cluster.serve.reporting import keep_reporting
from lorafleet.cluster.serve.resources import with_cpu_threads
from lorafleet.cluster.serve.scraping import scrape_all
from lorafleet.cluster.serve.state_folder import state_folder
from lorafleet.cluster.serve.worker_actor import StartOrder
from lorafleet.cluster.tenancy.tenancy import Tenancy
from lorafleet.protocol.addresses import RankAddresses
from lorafleet.protocol.engine_config import EngineConfig
from lorafleet.protocol.errors import AdapterError, EngineDead, LorafleetError
from lorafleet.protocol.lora_request import AdapterInfo, LoRARequest
from lorafleet.protocol.random_numbers import named_seed
from lorafleet.protocol.transport import EngineClient, ipc_address
from lorafleet.resolvers.store import AdapterStore

if TYPE_CHECKING:
    from lorafleet.api.telemetry.tracing import Tracing

READING_VERBS = {"list_adapters", "show", "take_turn"}  # Administration calls that answer at once.
WATCH_S = 0.5  # Seconds between two checks that the workers are alive.
SILENT_S = 2.0  # An engine that has sent nothing for this long gets no new requests. It sends something every second.

logger = logging.getLogger("lorafleet.cluster")


class StartFailed(RuntimeError):
    """Carries one line for Serve's status. The cause has been logged and recorded in the directory."""


class EngineReplica:
    """The actor of one replica. cluster/serve/app.py makes a Serve deployment of it."""

    def __init__(self, args: AppArgs, config: EngineConfig, deployment: str) -> None:
        """Prepares the replica without starting it. `deployment` is the same for all replicas of one `serve run`,
        however often each is replaced."""
        ingress.listen_on_node_address()
        ingress.answer_health_checks(self._is_well)
        sys.setswitchinterval(SWITCH_S)  # Threads write /metrics and long answers while the event loop runs.
        self._args = args
        self._deployment = deployment
        self._config = with_cpu_threads(config, args.most_replicas)
        self._engine: EngineClient | None = None
        self._checking: CheckingEngine | None = None
        self._adapter_store = AdapterStore(args.sources)
        self._front: Front | None = None
        self._admin: AdapterAdmin | None = None
        self._tracing: Tracing | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._run_dir = tempfile.mkdtemp(prefix="lorafleet-", dir=os.environ.get("LORAFLEET_RUN_DIR"))
        context = serve.get_replica_context()
        self._replica_id = context.replica_id.unique_id
        # Otherwise requests without a seed would use the same random numbers on every replica.
        self._config = replace(self._config, seed=named_seed(config.seed, self._replica_id))
        self._place = DirectoryPlace(context.app_name, **args.directory_place())
        self._directory = get_or_create(self._place)
        log_end = LogEnd(lambda: open_store(self._place.uri))
        self._membership = Membership(self._directory, self._replica_id, self._obey, log_end=log_end)
        self._tenancy: Tenancy | None = None
        self._ranks = ReplicaRanks(config.tensor_parallel_size, args.num_cpus, 1 if config.device == "cuda" else 0)

    async def __serve_build_asgi_app__(self) -> FastAPI:
        """Starts the replica, and returns its HTTP application. Serve calls this once, after the constructor."""
        await self._membership.start()
        try:
            return await self._start()
        except Exception as error:
            cause = error.message if isinstance(error, LorafleetError) else repr(error)
            await self._membership.note(cause, failed=True)
            await self._stop()
            raise StartFailed(cause) from None

    async def check_health(self) -> None:
        """Raises EngineDead if the engine or a rank has failed. Serve then replaces the replica."""
        _check_alive(self._engine)
        await self._ranks.check_health()

    def _is_well(self) -> bool:
        """Returns whether requests should come here: the engine is alive and has sent something in the last SILENT_S
        seconds. This is also true while the replica starts."""
        engine = self._engine
        return engine is None or (engine.dead is None and engine.stats_age_s < SILENT_S)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Returns the replica's load. Serve calls this if the number of replicas follows the load."""
        if self._engine is None:
            return {}
        return load_of(self._engine.stats, self._config.max_num_seqs, self._engine.hello.kv_cache_tokens)

    async def render_metrics(self) -> bytes:
        """Returns the metrics of this replica alone. Other replicas call it."""
        return await self._front.metrics.render() if self._front is not None else b""

    async def _scrape(self) -> bytes:
        return await scrape_all(self._replicas(), self.render_metrics, self._render_directory)

    def _replicas(self) -> Any:
        """Returns a handle of all replicas, including this one."""
        context = serve.get_replica_context()
        return serve.get_deployment_handle(context.deployment, context.app_name)

    async def _render_directory(self) -> bytes:
        return directory_metrics.render(await self._membership.call(lambda _: self._directory.counts()))

    async def look(self, query: ReplicaQuery, viewer: Viewer) -> ReplicaView | None:
        """Returns the console's view of this replica, or None while it starts. Other replicas call it."""
        if self._front is None:
            return None
        return replica_view(self._front, query, viewer, self._cpu_loras, self._config.max_num_seqs)

    async def _look_at_all(self, query: ReplicaQuery, viewer: Viewer) -> list[ReplicaView]:
        return await ask_all(self._replicas(), query, viewer)

    async def _view(self, query: ViewQuery, viewer: Viewer) -> DirectoryView:
        return await self._membership.call(lambda _: self._directory.view(query, viewer))

    async def _view_adapter(self, name: str, viewer: Viewer) -> AdapterView | None:
        return await self._membership.call(lambda _: self._directory.view_adapter(name, viewer))

    async def __del__(self) -> None:
        """Hands over to the other replicas, and stops. Serve calls this when the replica's requests have been
        answered."""
        await self._hand_over()
        await self._stop()

    async def _hand_over(self) -> None:
        """Makes other replicas load the requested adapters that only this one holds. Waits at most HAND_OVER_S
        seconds."""
        if self._engine is None or self._engine.dead is not None:
            return
        try:
            await asyncio.wait_for(self._directory.drain(self._replica_id), HAND_OVER_S)
        except Exception as error:  # The replica stops all the same.
            logger.warning("replica %s leaves without handing over: %r", self._replica_id, error)

    async def _start(self) -> FastAPI:
        started = time.monotonic()
        tenancy = self._tenancy = self._make_tenancy()
        await self._membership.note(f"loading {self._config.model} on {self._config.device}")
        tokenizer = asyncio.create_task(asyncio.to_thread(Tokenizer.from_folder, self._args.model))
        address = ipc_address(self._run_dir)
        hello = await self._ranks.start(self._start_order(address))
        engine = self._engine = await EngineClient.connect(address, hello)
        store = await asyncio.to_thread(open_store, self._place.uri)
        base_names, open_source = self._args.base_names, self._adapter_store.open
        admin = self._admin = AdapterAdmin(self._administer, store, base_names, self._deployment, open_source)
        resolver = make_resolver(self._args, self._adapter_store)
        languages = AdapterLanguages(await tokenizer, engine, self._adapter_store.open)
        checking = self._checking = CheckingEngine(engine, languages)
        catalog = DirectoryCatalog(self._membership, admin, checking, base_names, resolver)
        await self._membership.note(
            f"engine ready after {time.monotonic() - started:.1f} s: context {hello.max_model_len} tokens, "
            f"KV cache {hello.kv_cache_tokens} tokens"
        )
        self._keep(self._watch_ranks(engine))
        await self._load_adapters(catalog)
        await self._membership.become_ready()
        self._keep(keep_reporting(engine, self._membership, self._cpu_loras, self._config.max_num_seqs))
        self._front = make_front(
            self._args,
            self._replica_id,
            await tokenizer,
            engine,
            catalog,
            self._adapter_store,
            languages,
            resolver,
            self._scrape,
            tenancy,
        )
        for work in tenancy.work:
            self._keep(work)
        self._tracing = start_tracing(self._args, self._replica_id)
        console = StateApi(self._view, self._view_adapter, self._look_at_all)
        routes = routes_beside(admin, console, self._start_quality(self._front, store))
        return build_api(lambda: self._front, routes, self._tracing, self._args.allowed_origins)

    def _start_quality(self, front: Front, store: Store) -> QualityApi | None:
        if self._args.quality_probes is None:
            return None
        probes = read_probes(self._args.quality_probes)
        monitor = QualityMonitor(front, probes, QualityBook(store), self._take_quality_turn)
        front.metrics.add(QualityMetrics(monitor))
        self._keep(monitor.keep_running())
        return QualityApi(monitor)

    async def _take_quality_turn(self) -> bool:
        turn = {"task": "quality", "replica_id": self._replica_id, "for_s": TURN_S}
        return bool(await self._administer("take_turn", turn))

    @property
    def _cpu_loras(self) -> int:
        """Number of adapters that fit in host memory."""
        return self._config.lora.cpu_loras if self._config.lora is not None else 0

    def _make_tenancy(self) -> Tenancy:
        args, state = self._args, state_folder()
        usage, audit = args.usage_dir, args.audit_dir
        if usage is None and args.api_keys is not None:
            usage = str(state / "usage")
        if audit is None and (args.api_keys is not None or args.admin_key is not None):
            audit = str(state / "audit")
        return Tenancy(
            args.admin_key,
            args.api_keys,
            None if usage is None else Path(usage),
            None if audit is None else Path(audit),
            self._replica_id,
            self._membership.admit,
        )

    def _start_order(self, address: str) -> StartOrder:
        size = self._config.tensor_parallel_size
        addresses = RankAddresses(size, self._run_dir) if size > 1 else None
        return StartOrder(self._config, address, addresses, self._place, self._replica_id)

    async def _load_adapters(self, catalog: DirectoryCatalog) -> None:
        """Loads the configured adapters, and publishes them in the given order. All are requested at once, since the
        worker reads several at a time."""
        for entry in await asyncio.gather(*(self._read_adapter(catalog, one) for one in self._args.lora_modules)):
            await catalog.seed(*entry)

    async def _read_adapter(self, catalog: DirectoryCatalog, module: LoRAModule) -> tuple[LoRARequest, AdapterInfo]:
        started = time.monotonic()
        try:
            entry = await catalog.read_at_start(module.name, module.path, module.base_model_name)
        except AdapterError as error:
            raise type(error)(f"adapter {module.name!r} cannot be served: {error.message}", error.param) from None
        await self._membership.note(f"adapter {module.name} ready after {time.monotonic() - started:.2f} s")
        return entry

    async def _obey(self, order: Order) -> AdapterInfo | None:
        if self._checking is None:  # A replica that is starting only gets orders to drop adapters, and it has none.
            return None
        info = await obey(self._checking, order)
        if order.kind == "drop":
            await asyncio.to_thread(self._adapter_store.forget, order.lora.digest)
        return info

    async def _administer(self, verb: str, arguments: dict[str, Any]) -> Any:
        limit_s = READ_S if verb in READING_VERBS else CHANGE_S
        return await self._membership.call(lambda _: self._directory.administer(verb, arguments), limit_s)

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs the coroutine beside the requests. The task is stored, since the event loop has only weak references
        to tasks."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _watch_ranks(self, engine: EngineClient) -> None:
        """Ends the requests in flight and all ranks when a rank has ended or the connection to rank 0 has failed.

        Serve's own health check comes later.
        """
        while True:
            await asyncio.sleep(WATCH_S)
            try:
                _check_alive(engine)
                await self._ranks.check_health()
            except EngineDead as error:
                logger.error("the replica ends: %s", error.message)
                engine.fail(error.message)
                await self._ranks.stop()
                return

    async def _stop(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await self._ranks.stop()
        if self._front is not None:
            self._front.close()
        if self._admin is not None:
            self._admin.close()
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)
        if self._tenancy is not None:
            self._tenancy.close()
        await asyncio.to_thread(self._adapter_store.stop)
        if self._engine is not None:
            await self._engine.close()
        with contextlib.suppress(Exception):  # Expected while the whole cluster shuts down.
            await self._membership.stop()
        self._directory.close()
        shutil.rmtree(self._run_dir, ignore_errors=True)


def _check_alive(engine: EngineClient | None) -> None:
    """Raises EngineDead if the engine, or the connection to it, has failed."""
    if engine is not None and engine.dead is not None:
        raise EngineDead(engine.dead)
