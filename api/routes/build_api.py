"""Assembles the HTTP API of a replica: the routes, the access that each needs, the error handlers, and the middleware.

It has no state of its own: `get_state` returns the AppState for each request, or None while the replica starts.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lorafleet import __version__
from lorafleet.api.access.audit import audited
from lorafleet.api.access.caller import Caller, Needed, inner_caller, sent_key, set_caller, whose
from lorafleet.api.access.caller_admission import (
    MAX_AUXILIARY,
    MAX_UPLOADS,
    Kind,
    add_admission,
    admissions_of,
    give_back,
)
from lorafleet.api.access.work_threads import work_for
from lorafleet.api.answer.elsewhere import RETRY_STATUS, meant_status, retry_id
from lorafleet.api.answer.error_responses import internal_error_response, on_http_exception, on_lorafleet_error
from lorafleet.api.answer.gathered_writes import GatheredWrites, set_body_sender
from lorafleet.api.answer.piecewise import in_pieces
from lorafleet.api.anthropic.messages_api import count_message_tokens, messages
from lorafleet.api.app_state import AppState
from lorafleet.api.routes.chat import chat
from lorafleet.api.routes.classify import classify
from lorafleet.api.routes.completions import completions
from lorafleet.api.routes.cross_origin import CrossOrigin
from lorafleet.api.routes.docs import docs_routes
from lorafleet.api.routes.embeddings import embeddings, pooling
from lorafleet.api.routes.generate import generate
from lorafleet.api.routes.load_lora_adapter import (
    load_lora_adapter,
    load_sglang_adapter,
    unload_lora_adapter,
    unload_sglang_adapter,
)
from lorafleet.api.routes.models import list_models, model_info, show_model
from lorafleet.api.routes.response_routes import cancel_response, delete_response, list_input_items, show_response
from lorafleet.api.routes.responses_api import count_input_tokens, responses
from lorafleet.api.routes.score import rerank, score
from lorafleet.api.routes.server_info import get_world_size, server_info
from lorafleet.api.routes.service import finish_session, health, metrics, version
from lorafleet.api.routes.tokenize import detokenize, tokenize
from lorafleet.api.routes.tokens import generate_tokens, render_chat_tokens
from lorafleet.api.routes.unserved import unserved_routes
from lorafleet.api.telemetry.endpoint import CLIENT_LEFT, endpoint_of, set_endpoint
from lorafleet.api.telemetry.http_metrics import label_of_request
from lorafleet.protocol.errors import InvalidRequest, LorafleetError, Overloaded
from lorafleet.protocol.limits import MAX_MODEL_CHARS

if TYPE_CHECKING:
    from lorafleet.api.telemetry.tracing import Tracing

Handler = Callable[[AppState, Request], Awaitable[Response]]
Route = tuple[str, str, Needed, Handler]  # Method, path, needed access, handler.
GetState = Callable[[], AppState | None]

ROUTES: tuple[Route, ...] = (
    ("POST", "/v1/completions", "infer", completions),
    ("POST", "/v1/chat/completions", "infer", chat),
    ("POST", "/v1/responses", "infer", responses),
    ("POST", "/v1/responses/input_tokens", "infer", count_input_tokens),
    ("GET", "/v1/responses/{response_id}", "infer", show_response),
    ("DELETE", "/v1/responses/{response_id}", "infer", delete_response),
    ("POST", "/v1/responses/{response_id}/cancel", "infer", cancel_response),
    ("GET", "/v1/responses/{response_id}/input_items", "infer", list_input_items),
    ("POST", "/v1/messages", "infer", messages),
    ("POST", "/v1/messages/count_tokens", "infer", count_message_tokens),
    ("POST", "/v1/embeddings", "infer", embeddings),
    ("POST", "/pooling", "infer", pooling),
    ("POST", "/classify", "infer", classify),
    ("POST", "/score", "infer", score),
    ("POST", "/v1/score", "infer", score),
    ("POST", "/rerank", "infer", rerank),
    ("POST", "/v1/rerank", "infer", rerank),
    ("POST", "/v2/rerank", "infer", rerank),
    ("POST", "/generate", "infer", generate),
    ("POST", "/inference/v1/generate", "infer", generate_tokens),
    ("POST", "/v1/chat/completions/render", "infer", render_chat_tokens),
    ("GET", "/v1/models", "infer", list_models),
    ("GET", "/v1/models/{model:path}", "infer", show_model),
    ("POST", "/tokenize", "infer", tokenize),
    ("POST", "/detokenize", "infer", detokenize),
    ("POST", "/v1/load_lora_adapter", "loading", load_lora_adapter),
    ("POST", "/v1/unload_lora_adapter", "loading", unload_lora_adapter),
    ("POST", "/load_lora_adapter", "loading", load_sglang_adapter),
    ("POST", "/unload_lora_adapter", "loading", unload_sglang_adapter),
    ("POST", "/skyrl/v1/load_lora_adapter", "loading", load_sglang_adapter),
    *unserved_routes(),
    ("GET", "/server_info", "loading", server_info),
    ("GET", "/get_world_size", "loading", get_world_size),
    ("GET", "/model_info", "infer", model_info),
    ("GET", "/get_model_info", "infer", model_info),
    ("POST", "/finish_session", "open", finish_session),
    ("GET", "/health", "open", health),
    ("GET", "/health_generate", "open", health),
    ("GET", "/liveness", "open", health),
    ("GET", "/ping", "open", health),
    ("POST", "/ping", "open", health),
    ("GET", "/version", "open", version),
    ("GET", "/metrics", "metrics", metrics),
)
# Routes that cost work but generate nothing.
AUXILIARY = frozenset(
    (
        "/tokenize",
        "/detokenize",
        "/v1/chat/completions/render",
        "/v1/messages/count_tokens",
        "/v1/responses/input_tokens",
        "/v1/responses/{response_id}",
        "/v1/responses/{response_id}/cancel",
        "/v1/responses/{response_id}/input_items",
        "/v1/files",
        "/v1/files/{file_id}",
        "/v1/files/{file_id}/content",
        "/v1/batches",
        "/v1/batches/{batch_id}",
        "/v1/batches/{batch_id}/cancel",
    )
)
# Routes that change something although their method is GET: SGLang's clients flush so.
CHANGING_GETS = frozenset(("/flush_cache",))
_READING = frozenset(("GET", "HEAD"))  # A route of GET answers HEAD too.
# Routes that query all replicas.
OF_ALL = frozenset(("/metrics", "/v1/console/state", "/v1/console/adapters/{name:path}"))

logger = logging.getLogger("lorafleet.http")


def build_api(
    get_state: GetState,
    more_routes: Sequence[Route] = (),
    tracing: Tracing | None = None,
) -> FastAPI:
    """Builds the app for all routes."""
    # docs.py serves the OpenAPI document and its page, because FastAPI cannot describe plain routes.
    api = FastAPI(title="lorafleet", version=__version__, redirect_slashes=False, openapi_url=None)
    routes = (*ROUTES, *more_routes)
    for method, path, needed, handler in (*routes, *docs_routes(routes)):
        # The routes are plain because handlers read their bodies themselves; FastAPI would parse them a second time.
        api.add_route(path, _endpoint(handler, path, needed, get_state), methods=[method], name=handler.__name__)
    api.add_exception_handler(LorafleetError, on_lorafleet_error)
    api.add_exception_handler(HTTPException, on_http_exception)
    api.add_middleware(CountRequests, get_state=get_state)
    if tracing is not None:
        api.add_middleware(tracing.layer)
    api.add_middleware(CrossOrigin, allowed=lambda: _allowed_origins(get_state()))
    return api


def _allowed_origins(state: AppState | None) -> tuple[str, ...]:
    return () if state is None else state.config.origins.allowed


def _endpoint(
    handler: Handler, path: str, needed: Needed, get_state: GetState
) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        set_endpoint(request.scope, path)
        state = get_state()
        if state is None:
            raise Overloaded("This replica is starting; try again in a moment.")
        if needed != "metrics":
            state.in_progress.check()
        if needed in ("admin", "loading") and (request.method not in _READING or path in CHANGING_GETS):
            return await audited(request, state.access.audit, lambda: admitted(state, request))
        return await admitted(state, request)

    async def admitted(state: AppState, request: Request) -> Response:
        caller = inner_caller(request.scope)
        if caller is None:
            if needed != "open" and not state.access.gate.has_keys:
                state.config.origins.check(request.headers)
                if path in CHANGING_GETS and request.method in _READING:
                    state.config.origins.check_change(request.headers)
            caller = state.access.gate.caller(sent_key(request.headers), needed)
        set_caller(request.scope, caller)
        work_for(whose(caller))
        if needed != "open":
            await _admit(state, request, path, needed, caller)
        for name, value in request.path_params.items():
            if len(value) > MAX_MODEL_CHARS:
                raise InvalidRequest(
                    f"`{name}` in the path has {len(value)} characters; at most {MAX_MODEL_CHARS} are allowed.", name
                )
        return await handler(state, request)

    return endpoint


async def _admit(state: AppState, request: Request, path: str, needed: Needed, caller: Caller) -> None:
    """Admits the request before its body is read. Raises QuotaExceeded or QueueFull."""
    kind: Kind = "administration" if needed != "infer" else "auxiliary" if path in AUXILIARY else "generation"
    add_admission(request.scope, await state.access.quotas.admit_request(caller, kind))
    most = MAX_AUXILIARY if path in AUXILIARY | OF_ALL else MAX_UPLOADS if request.method == "PUT" else None
    if most is not None:
        add_admission(request.scope, state.work_bounds.enter(f"{request.method} {path}", most, caller))


class CountRequests:
    """The middleware around every request.

    It counts the request by its status, ends its admissions, and converts an unexpected exception to a 500 with a body.
    """

    def __init__(self, app: ASGIApp, get_state: GetState) -> None:
        self._app = app
        self._get_state = get_state
        self._writes = GatheredWrites()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = self._get_state()
        if state is None or inner_caller(scope) is not None:
            await self._count(scope, receive, send)
            return
        with state.in_progress.counted():
            await self._count(scope, receive, send)

    async def _count(self, scope: Scope, receive: Receive, send: Send) -> None:
        status = CLIENT_LEFT
        send = in_pieces(send)
        set_body_sender(scope, self._writes.sender(send))

        async def record_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = meant_status(message)
                headers = {
                    name: value for admission in admissions_of(scope) for name, value in admission.headers.items()
                }
                given = [name for name, _ in message["headers"]]  # Headers that a rejection has set.
                more = [(n.encode(), v.encode()) for n, v in headers.items() if n.encode() not in given]
                message = {**message, "headers": [*message["headers"], *more]}
                if message["status"] == RETRY_STATUS and (known_as := retry_id(scope)) is not None:
                    await give_back(scope, known_as)  # Before another replica charges the request again.
            await send(message)

        try:
            await self._app(scope, receive, record_status)
        except ClientDisconnect:
            pass
        except Exception as error:
            logger.exception("%s %s failed", scope["method"], scope["path"])
            if (state := self._get_state()) is not None:
                state.telemetry.failures.record(error)
            if status != CLIENT_LEFT:
                raise  # The answer has begun, so only a broken connection can tell the client.
            await internal_error_response(scope)(scope, receive, record_status)
        finally:
            for admission in admissions_of(scope):
                admission.end()
            state = self._get_state()
            if state is not None:
                state.telemetry.metrics.count_request(endpoint_of(scope), label_of_request(scope), status)
