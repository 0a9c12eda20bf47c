"""Provides a real HTTP server with the API, a small catalogue, and an engine with scripted answers."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import httpx
import msgspec
import openai
import pytest
import uvicorn

import real_server
import tool_templates
from lorafleet.api.app_state import AppState, make_state
from lorafleet.api.front_config import FrontConfig
from lorafleet.api.routes.build_api import build_api
from lorafleet.api.text.tokenizer import Tokenizer
from lorafleet.protocol.errors import AdapterExists, LorafleetError, ModelNotFound
from lorafleet.protocol.lora_request import AdapterInfo, LoRARequest
from lorafleet.protocol.messages import (
    AdapterMove,
    EngineHello,
    EngineRequest,
    EngineStats,
    SequenceTimes,
    TokenLogprobs,
    TokenOutput,
)
from lorafleet.protocol.transport.unread_outputs import IsStalled, never_stalled
from real_server import RealServer

CONTEXT = 256


class ScriptedEngine:
    """Generates the text of `answer`, and then eos. A test can force delays and failures, unlike with a real engine."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.hello = EngineHello(tokenizer.vocab_size, CONTEXT, 10 * CONTEXT, [tokenizer.eos_token_id or 0])
        self.stats = EngineStats(num_running=3, lora_loads_total=7)
        self.dead: str | None = None
        self.requests: list[EngineRequest] = []
        self.running: set[str] = set()
        self.answer: Callable[[EngineRequest], str] = lambda r: f"{r.lora.lora_name if r.lora else 'base'} wörld 🎉"
        self.hold_after: int | None = None  # After this number of tokens it generates nothing more until `released`.
        self.released = False
        self.fail_after: int | None = None  # After this number of tokens it raises `failure`.
        self.failure: Exception = LorafleetError("the engine tripped")
        self.fallback_reason: str | None = None
        self.pause_s = 0.0

    def listen_to_moves(self, listener: Callable[[AdapterMove], None]) -> None:
        self.moved = listener

    async def generate(
        self,
        request: EngineRequest,
        is_stalled: IsStalled = never_stalled,  # noqa: ARG002
    ) -> AsyncGenerator[TokenOutput, None]:
        self.requests.append(request)
        self.running.add(request.request_id)
        try:
            for i, output in enumerate(self._outputs(request)):
                if i == self.fail_after:
                    raise self.failure
                if i == self.hold_after:
                    while not self.released:  # noqa: ASYNC110  # A test may release it from another thread, so it is no asyncio.Event.
                        await asyncio.sleep(0.001)
                await asyncio.sleep(self.pause_s)
                yield output
        finally:
            self.running.discard(request.request_id)

    def _outputs(self, request: EngineRequest) -> Iterator[TokenOutput]:
        params, eos = request.params, self.hello.eos_token_ids[0]
        tokens = [*self.tokenizer.encode(self.answer(request)), eos][: params.max_tokens]
        for i, token in enumerate(tokens):
            last = i == len(tokens) - 1
            output = TokenOutput(request_id=request.request_id, token_ids=[token])
            if params.logprobs is not None:
                output.logprobs = [self._logprobs(token, params.logprobs)]
            if i == 0:
                output.num_cached_tokens = 1
                output.queue_s, output.tier, output.lora_rank = (0.2, "cpu", 9) if request.lora else (0.2, "", 0)
                output.fallback_reason = self.fallback_reason
                if params.prompt_logprobs is not None:
                    k = params.prompt_logprobs
                    output.prompt_logprobs = [None, *(self._logprobs(t, k) for t in request.prompt_token_ids[1:])]
            if request.traced and (i == 0 or last):
                queued_s = time.monotonic() - 10
                output.times = SequenceTimes(queued_s, queued_s + 1, queued_s + 2, queued_s + 4, queued_s + 7 * last)
            if last:
                output.finish_reason = "stop" if token == eos else "length"
                output.stop_token_id = eos if token == eos else None
            yield output

    def _logprobs(self, token: int, k: int) -> TokenLogprobs:
        """Makes the token the second best; all but the best two have -inf, which JSON holds only after clamping."""
        best = [40, token, *range(50, 50 + k)][:k]
        return TokenLogprobs(token, -0.5, 2, best, [-0.25, -0.5, *([float("-inf")] * k)][:k])

    async def load_adapter(self, lora: LoRARequest) -> AdapterInfo:
        return AdapterInfo(lora.lora_name, 8, 1, [])

    async def drop_adapter(self, digest: str) -> None:
        pass


class MemoryCatalog:
    """Keeps names in a dict; `hidden` ones are found only when they are requested, as by a resolver."""

    def __init__(self) -> None:
        self.loras = {
            name: LoRARequest(name, i + 1, f"/adapters/{name}", f"digest of {name}")
            for i, name in enumerate(("sql", "org/json"))
        }
        self.hidden = {"found": LoRARequest("found", 9, "/adapters/found", "digest of found")}
        self.failure: LorafleetError | None = None
        self.keys: list[str | None] = []  # The keys by which versions would be drawn.

    async def listed(self, after: str, end: str, limit: int) -> list[LoRARequest]:
        return [lora for name, lora in sorted(self.loras.items()) if after < name < end][:limit]

    @property
    def list_version(self) -> object | None:
        return tuple(self.loras)

    async def known(self, name: str) -> LoRARequest | None:
        return self.loras.get(name)

    async def resolve(self, name: str, key: str | None = None, _: str = "") -> LoRARequest:
        self.keys.append(key)
        if self.failure is not None:
            raise self.failure
        found = self.loras.get(name) or self.hidden.get(name)
        if found is None:
            raise ModelNotFound(f"nothing is called {name}")
        return found

    async def add(self, name: str, path: str, *, load_inplace: bool, limits: object, within: object) -> LoRARequest:  # noqa: ARG002  # There are no limits here.
        if self.failure is not None:
            raise self.failure
        if name in self.loras and not load_inplace:
            raise AdapterExists("taken", "lora_name")
        self.loras[name] = LoRARequest(name, 77, path)
        return self.loras[name]

    async def remove(self, name: str) -> None:
        if name not in self.loras:
            raise ModelNotFound("nothing")
        del self.loras[name]


@dataclass
class Holder:
    """Holds the front from which the server's API answers; every test sets its own."""

    front: AppState | None = None
    url: str = ""


@pytest.fixture(scope="session")
def holder() -> Iterator[Holder]:
    holder = Holder()
    config = uvicorn.Config(build_api(lambda: holder.front), port=0, log_level="warning", lifespan="off", ws="none")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    holder.url = f"http://127.0.0.1:{port}"
    yield holder
    server.should_exit = True
    thread.join()


@pytest.fixture
def engine(tokenizer: Tokenizer) -> ScriptedEngine:
    return ScriptedEngine(tokenizer)


@pytest.fixture
def catalog() -> MemoryCatalog:
    return MemoryCatalog()


@pytest.fixture
def config() -> FrontConfig:
    return FrontConfig(("llama", "llama-alias"), "/models/llama", allow_runtime_lora_updating=True)


@pytest.fixture
def front(
    config: FrontConfig, tokenizer: Tokenizer, engine: ScriptedEngine, catalog: MemoryCatalog
) -> Iterator[AppState]:
    front = make_state(config, tokenizer, engine, catalog)
    yield front
    front.close()


@pytest.fixture
def base_url(holder: Holder, front: AppState) -> Iterator[str]:
    holder.front = front
    yield holder.url
    holder.front = None


@pytest.fixture
def shown(
    holder: Holder,
    base_url: str,  # noqa: ARG001
    front: AppState,
    tokenizer: Tokenizer,
    engine: ScriptedEngine,
) -> Iterator[None]:
    """Makes the chat template show tools to the model."""
    engine.hello = msgspec.structs.replace(engine.hello, max_model_len=4096, kv_cache_tokens=8192)
    config = replace(front.config, chat_template=tool_templates.HERMES)
    holder.front = make_state(config, tokenizer, engine, front.models.catalog)
    yield
    holder.front.close()


@pytest.fixture
async def http(base_url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=base_url, timeout=120) as client:
        yield client


@pytest.fixture
def client(base_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=base_url + "/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture
async def async_client(base_url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=base_url + "/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture(scope="session")
def real(tmp_path_factory: pytest.TempPathFactory, fleet: Callable[[str], Any]) -> Iterator[RealServer]:
    """Serves a real engine behind the whole API, with one adapter, "sql".

    A test file that uses it sets `pytestmark = pytest.mark.xdist_group("real_server")`.
    """
    made = fleet("llama3")
    config = {"allow_runtime_lora_updating": True, "chat_template": tool_templates.HERMES}
    folder = tmp_path_factory.mktemp("real")
    adapters = {"sql": made.adapters["all"]}
    with real_server.running(folder, made.base, adapters, config, max_model_len=80, kv_cache_tokens=2048) as server:
        yield server
