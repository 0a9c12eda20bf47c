"""Holds what all routes of one replica share: one service for each purpose. It knows nothing about request bodies."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from lorafleet.api.access.access import Access
from lorafleet.api.access.body_budget import BodyBudget
from lorafleet.api.access.caller_admission import WorkBounds
from lorafleet.api.access.fair_threads import LONG_WORK, FairThreads
from lorafleet.api.access.requests_in_progress import RequestsInProgress
from lorafleet.api.backend import AdapterCatalog, EngineBackend
from lorafleet.api.front_config import FrontConfig
from lorafleet.api.languages import AdapterLanguages
from lorafleet.api.model_lookup import FetchedSince, ModelLookup
from lorafleet.api.routes.model_pages import ModelPages
from lorafleet.api.stored.response_query import AskReplicas
from lorafleet.api.stored.response_store import ResponseStore
from lorafleet.api.stored.stored_responses import StoredResponses
from lorafleet.api.telemetry.telemetry import Telemetry
from lorafleet.api.text.tokenizer import Tokenizer
from lorafleet.api.text_service import TextService
from lorafleet.protocol.limits import MAX_BODIES_BYTES


def _long_work() -> FairThreads:
    return FairThreads("long requests and answers", LONG_WORK)


@dataclass(slots=True)
class AppState:
    """The services of one replica. Handlers pass on the service that a helper needs, not the whole."""

    config: FrontConfig
    engine: EngineBackend
    access: Access  # Decides who may send which requests, and accounts for them.
    models: ModelLookup  # Finds the models that requests name.
    texts: TextService  # Tokenizers, chat templates and the context's length.
    telemetry: Telemetry  # Counts what happens.
    body_budget: BodyBudget  # Bounds the bytes of all bodies in memory.
    stored: StoredResponses  # Answers of /v1/responses, here and at other replicas.
    in_progress: RequestsInProgress = field(default_factory=RequestsInProgress)  # Rejects requests at the end.
    work_bounds: WorkBounds = field(default_factory=WorkBounds)  # Bounds each caller's expensive requests.
    long_work: FairThreads = field(default_factory=_long_work)  # Runs what would delay the event loop.
    model_pages: ModelPages = field(default_factory=ModelPages)  # Pages of /v1/models.

    def change_config(self, config: FrontConfig) -> None:
        """Serves later requests with this configuration. It may differ from the former one in bounds, in the origins,
        and in whether adapters may be loaded at run time: other fields were read when the services were built."""
        self.config = config
        self.body_budget.max_bytes = body_budget_bytes(config)
        self.stored.store.max_bytes = config.response_store_bytes

    def close(self) -> None:
        """Stops the threads and processes that tokenize, render templates and do long work."""
        self.texts.close()
        self.long_work.close()


def body_budget_bytes(config: FrontConfig) -> int:
    return max(MAX_BODIES_BYTES, 2 * config.max_body_bytes)


def make_state(
    config: FrontConfig,
    tokenizer: Tokenizer,
    engine: EngineBackend,
    catalog: AdapterCatalog,
    access: Access | None = None,
    languages: AdapterLanguages | None = None,
    scrape: Callable[[], Awaitable[bytes]] | None = None,
    fetched_since: FetchedSince = lambda _digest, _since_s: False,
    ask_replicas: AskReplicas | None = None,
) -> AppState:
    """Builds the services of one replica.

    Args:
        languages: Reads adapters' tokenizers and templates; None reads them from their own paths.
        scrape: Returns the metrics of all replicas; None if there is only this one. Concurrent calls share one run.
        ask_replicas: Asks all replicas for a stored response; None if there is only this one.
    """
    access = access or Access()
    languages = languages or AdapterLanguages(tokenizer, engine)
    telemetry = Telemetry.of_replica(config, engine, scrape)
    return AppState(
        config,
        engine,
        access,
        ModelLookup(
            config.served_model_names, engine, catalog, access.tenants, languages, telemetry.failures, fetched_since
        ),
        TextService(config, tokenizer, engine, languages),
        telemetry,
        BodyBudget(body_budget_bytes(config)),
        StoredResponses(ResponseStore(config.response_store_bytes), ask_replicas),
    )
