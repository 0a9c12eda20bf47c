"""Builds the parts of one replica: its worker processes, the engine's client, the HTTP front, and the tasks beside it.

replica.py has the replica's life in Ray Serve.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace

from fastapi import FastAPI
from ray import serve

from lorafleet.api.access.work_threads import UPKEEP, in_turn
from lorafleet.api.app_state import AppState
from lorafleet.api.freed_memory import keep_returning_memory
from lorafleet.api.languages import AdapterLanguages
from lorafleet.api.routes.build_api import build_api
from lorafleet.api.stored.response_query import ResponseFound, ResponseQuery
from lorafleet.api.text.tokenizer import Tokenizer
from lorafleet.cluster.admin.pushing import AdapterAdmin
from lorafleet.cluster.batches.batch_metrics import BatchMetrics
from lorafleet.cluster.batches.batch_records import callers_of
from lorafleet.cluster.batches.batch_routes import batch_routes
from lorafleet.cluster.batches.batch_runner import BatchRunner
from lorafleet.cluster.batches.batch_store import BatchStore
from lorafleet.cluster.catalogue.catalogue_store import Store, open_store
from lorafleet.cluster.config import AppArgs
from lorafleet.cluster.console.replica_view import replica_view
from lorafleet.cluster.console.state_api import StateApi
from lorafleet.cluster.console.view import ReplicaQuery, ReplicaView, Viewer
from lorafleet.cluster.deploys.deployment_version import Deployed
from lorafleet.cluster.directory.directory_actor import DirectoryPlace
from lorafleet.cluster.directory.directory_messages import Order
from lorafleet.cluster.quality.book import QualityBook
from lorafleet.cluster.quality.monitor import QualityMonitor
from lorafleet.cluster.quality.probes import read_probes
from lorafleet.cluster.quality.quality_metrics import QualityMetrics
from lorafleet.cluster.quality.routes import QualityApi
from lorafleet.cluster.receiving.group_orders import GroupDone, GroupOrder
from lorafleet.cluster.receiving.tensor_receivers import TensorReceivers
from lorafleet.cluster.serve.adapter_lookup import DirectoryCatalog, obey
from lorafleet.cluster.serve.all_replicas import AllReplicas, all_replicas
from lorafleet.cluster.serve.api_routes import routes_beside
from lorafleet.cluster.serve.directory_link import DirectoryLink
from lorafleet.cluster.serve.loading import CheckingEngine, load_modules
from lorafleet.cluster.serve.neighborhood import NodeFiles
from lorafleet.cluster.serve.option_changes import OptionChanges
from lorafleet.cluster.serve.ranks import ReplicaRanks
from lorafleet.cluster.serve.replica_batches import ReplicaPosts
from lorafleet.cluster.serve.replica_front import make_front, make_resolver, make_tenancy, start_tracing
from lorafleet.cluster.serve.reporting import keep_reporting
from lorafleet.cluster.serve.resources import with_cpu_threads
from lorafleet.cluster.serve.worker_actor import StartOrder
from lorafleet.cluster.task_set import TaskSet
from lorafleet.protocol.engine_config import EngineConfig
from lorafleet.protocol.errors import EngineDead, LorafleetError
from lorafleet.protocol.lora_request import AdapterInfo
from lorafleet.protocol.random_numbers import named_seed
from lorafleet.protocol.transport.addresses import RankAddresses
from lorafleet.protocol.transport.engine_socket import EngineClient, ipc_address
from lorafleet.resolvers.resolver_metrics import ResolverMetrics

WATCH_S = 0.5  # Seconds between two checks that the workers are alive.

logger = logging.getLogger("lorafleet.cluster")


class ReplicaParts:
    """The parts of one replica. Those that are None do not exist until start() has built them, or are off."""

    def __init__(self, args: AppArgs, config: EngineConfig, deployed: Deployed) -> None:
        """Prepares what needs no engine."""
        context = serve.get_replica_context()
        replica_id = self.replica_id = context.replica_id.unique_id
        # Otherwise requests without a seed would use the same random numbers on every replica.
        seed = named_seed(config.seed, replica_id)
        self.config = replace(with_cpu_threads(config, args.most_replicas), seed=seed)
        self.engine: EngineClient | None = None
        self.state: AppState | None = None
        self._args = args
        self._application = f"{deployed.instance}/{context.app_name}"
        self._changes: OptionChanges | None = None
        self._checking: CheckingEngine | None = None
        self._admin: AdapterAdmin | None = None
        self._records = ExitStack()  # Closes usage, audit and traces.
        self._tasks = TaskSet()
        place = DirectoryPlace(context.app_name, **args.directory_place())
        self._files = NodeFiles(args.sources, place, replica_id, has_neighbors=args.has_neighbors)
        self._run_dir = tempfile.mkdtemp(prefix="lorafleet-", dir=os.environ.get("LORAFLEET_RUN_DIR"))
        self.link = DirectoryLink(place, replica_id, self._obey, self._files.neighbor)
        self._ranks = ReplicaRanks(config.tensor_parallel_size, args.num_cpus, 1 if config.device == "cuda" else 0)

    async def start(self) -> FastAPI:
        """Builds everything else, and returns the HTTP application. The link's membership must have started.

        The order matters: orders of the directory can be obeyed as soon as there is an engine that checks adapters;
        the workers are watched before adapters load, which takes long; the replica becomes ready, so that requests
        come, only when the configured adapters are loaded; and reports need a replica that is ready.
        """
        began_s = time.monotonic()
        membership = self.link.membership
        others = AllReplicas(self.render_metrics, self.link.render_metrics)
        tenancy = make_tenancy(self._args, self.replica_id, membership.admit)
        self._records.callback(tenancy.close)
        await membership.publish_progress(f"loading {self.config.model} on {self.config.device}")
        tokenizer = asyncio.create_task(in_turn(UPKEEP, Tokenizer.from_folder, self._args.model))
        engine = self.engine = await self._start_engine()
        store = await in_turn(UPKEEP, open_store, self.link.place.uri)
        base_names, sources = self._args.base_names, self._files.store
        receivers = TensorReceivers(self._args.push_hosts, engine.hello.device, others.ask_members)
        admin = self._admin = AdapterAdmin(
            self.link.administer, store, base_names, self._application, sources, receivers
        )
        lookups = ResolverMetrics()
        resolver = make_resolver(self._args, self._files.store, lookups)
        languages = AdapterLanguages(await tokenizer, engine, self._files.store.open)
        checking = self._checking = CheckingEngine(engine, languages)
        catalog = DirectoryCatalog(membership, admin, checking, base_names, resolver)
        await membership.publish_progress(
            f"engine ready after {time.monotonic() - began_s:.1f} s: context {engine.hello.max_model_len} tokens, "
            f"KV cache {engine.hello.kv_cache_tokens} tokens"
        )
        self._tasks.start(self._watch_ranks(engine))
        self._tasks.start(keep_returning_memory())
        await load_modules(catalog, self._args.lora_modules, membership)
        await membership.become_ready()
        self._tasks.start(keep_reporting(engine, membership, self._cpu_loras, self.config.max_num_seqs))
        state = self.state = make_front(
            self._args,
            self.replica_id,
            await tokenizer,
            engine,
            catalog,
            self._files.store,
            languages,
            lookups,
            others.scrape,
            tenancy,
            others.find_response,
        )
        if self._files.server is not None:
            state.telemetry.metrics.add(self._files.server)
        for work in tenancy.work:
            self._tasks.start(work)
        tracing = start_tracing(self._args, self.replica_id)
        if tracing is not None:
            self._records.callback(tracing.close)
        console = StateApi(self.link.view, self.link.view_adapter, others.look)
        runner = await self._start_batches(state)
        self._changes = OptionChanges(
            state, engine, tenancy, catalog, admin, membership, self._files.store, lookups, runner
        )
        await admin.unlist([module.name for module in self._args.lora_modules])
        batches = batch_routes(None if runner is None else runner.store)
        routes = routes_beside(admin, console, self._start_quality(state, store), batches)
        return build_api(lambda: state, routes, tracing)

    @property
    def args(self) -> AppArgs:
        """The arguments that the replica serves with now."""
        return self._args

    async def change_options(self, args: AppArgs) -> None:
        """Takes the options of a later deploy that need no other replica. Raises LorafleetError if something cannot be
        taken; then a further call is safe."""
        assert self._changes is not None
        await self._changes.apply(self._args, args)
        self._args = args

    async def check_options(self, args: AppArgs) -> None:
        """Raises LorafleetError if change_options() would. Loads adapters that are new, but publishes nothing."""
        assert self._changes is not None
        await self._changes.check(self._args, args)

    async def check_health(self) -> None:
        """Raises EngineDead if the engine, the connection to it, or a rank has failed."""
        if self.engine is not None and self.engine.dead is not None:
            raise EngineDead(self.engine.dead)
        await self._ranks.check_health()

    def finish(self) -> int:
        """Rejects new requests and runs no more batches. Returns the number of requests in progress."""
        if self.state is None:
            return 0
        self.state.in_progress.is_ending = True
        return self.state.in_progress.num

    async def render_metrics(self) -> bytes:
        return await self.state.telemetry.metrics.render() if self.state is not None else b""

    def look(self, query: ReplicaQuery, viewer: Viewer) -> ReplicaView | None:
        """Returns the console's view of this replica, or None while it starts."""
        if self.state is None:
            return None
        return replica_view(self.state, query, viewer, self._cpu_loras, self.config.max_num_seqs)

    async def find_response(self, query: ResponseQuery) -> ResponseFound | None:
        """Carries out a query of another replica for a response that this one may store."""
        return await self.state.stored.find_here(query) if self.state is not None else None

    async def obey_group_order(self, order: GroupOrder) -> GroupDone | None:
        """Carries out an order of another replica if this one is the group's member."""
        if self._admin is None:
            return None
        try:
            return await self._admin.obey_group_order(order)
        except LorafleetError as error:
            return GroupDone(error=error)

    async def close(self) -> None:
        """Closes whatever has been built: first the workers, and the link to the directory after everything that
        may call it."""
        self._tasks.cancel()
        await self._ranks.stop()
        if self.state is not None:
            self.state.close()
        if self._admin is not None:
            await self._admin.receivers.close()
            self._admin.close()
        await in_turn(UPKEEP, self._records.close)
        await in_turn(UPKEEP, self._files.close)
        if self.engine is not None:
            await self.engine.close()
        await self.link.close()
        shutil.rmtree(self._run_dir, ignore_errors=True)

    @property
    def _cpu_loras(self) -> int:
        """Number of adapters that fit in host memory."""
        return self.config.lora.cpu_loras if self.config.lora is not None else 0

    async def _start_engine(self) -> EngineClient:
        size, address = self.config.tensor_parallel_size, ipc_address(self._run_dir)
        addresses = RankAddresses(size, self._run_dir) if size > 1 else None
        order = StartOrder(self.config, address, addresses, self.link.place, self.replica_id, self._args.has_neighbors)
        return await EngineClient.connect(address, await self._ranks.start(order))

    def _start_quality(self, state: AppState, store: Store) -> QualityApi | None:
        if self._args.quality_probes is None:
            return None
        probes = read_probes(self._args.quality_probes)
        monitor = QualityMonitor(state, probes, QualityBook(store), self.link.take_quality_turn)
        state.telemetry.metrics.add(QualityMetrics(monitor))
        self._tasks.start(monitor.keep_running())
        return QualityApi(monitor)

    async def _start_batches(self, state: AppState) -> BatchRunner | None:
        args = self._args
        if args.batch_store is None:
            return None
        opened = await in_turn(UPKEEP, open_store, args.batch_store, "batch_store")
        store = BatchStore(opened, lambda: self._args.batch_store_bytes)

        async def take_turn() -> bool:
            return not state.in_progress.is_ending and await self.link.take_batch_turn()

        find_caller, posts = callers_of(state.access.gate), ReplicaPosts(all_replicas())
        runner = BatchRunner(store, take_turn, find_caller, posts, args.batch_concurrency)
        state.telemetry.metrics.add(BatchMetrics(runner))
        self._tasks.start(runner.keep_running())
        return runner

    async def _obey(self, order: Order) -> AdapterInfo | None:
        if self._checking is None:  # A replica that is starting only gets orders to drop adapters, and it has none.
            return None
        info = await obey(self._checking, order)
        if order.kind == "drop":
            await in_turn(UPKEEP, self._files.store.forget, order.lora.digest)
        return info

    async def _watch_ranks(self, engine: EngineClient) -> None:
        """Ends the requests in flight and all ranks when a rank has ended or the connection to rank 0 has failed.

        Serve's own health check comes later.
        """
        while True:
            await asyncio.sleep(WATCH_S)
            try:
                await self.check_health()
            except EngineDead as error:
                logger.error("the replica ends: %s", error.message)
                engine.fail(error.message)
                await self._ranks.stop()
                return
