"""What /openapi.json says is what the server does: schemathesis sends it what the document allows, and what it does
not, to a replica with a real engine."""

from __future__ import annotations

import inspect
import os
import re
from typing import Any

import httpx
import hypothesis
import jsonschema
import openai
import pytest
import schemathesis
from schemathesis.checks import CHECKS

from lorafleet.api.request.fields import Tolerant
from lorafleet.api.routes.build_api import ROUTES
from lorafleet.api.routes.openapi import openapi
from lorafleet.api.routes.operations import operation_of
from lorafleet.cluster.admin.admin_api import admin_routes
from real_server import ADMIN_KEY, RealServer

pytestmark = pytest.mark.xdist_group("real_server")

ADMIN_ROUTES = admin_routes(None)  # type: ignore[arg-type]  # only described here
ROUTED = [*ROUTES, *ADMIN_ROUTES]
DOCUMENT = openapi(ROUTED)
LONG = "LORAFLEET_SCHEMATHESIS_EXAMPLES" in os.environ  # such as 100: minutes
EXAMPLES = int(os.environ.get("LORAFLEET_SCHEMATHESIS_EXAMPLES", "3"))
NOT_CHECKED = {
    "positive_data_acceptance",  # a body may fit its schema and still ask for what cannot be: n over its bound
    "ignored_auth",  # the key is this test's own, so that every route is reached
    "ensure_resource_availability",
    "max_response_time",
}


@schemathesis.serializer("application/x-tar")
def as_it_is(_: object, value: bytes) -> bytes:
    return value


api = schemathesis.openapi.from_dict(DOCUMENT)
api.config.phases.coverage.enabled = LONG  # some hundred cases an operation
checks = [check for check in CHECKS.get_all() if check.__name__ not in NOT_CHECKED]


@api.parametrize()
@hypothesis.settings(
    max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=list(hypothesis.HealthCheck)
)
def test_requests_of_every_kind_are_answered_as_documented(real: RealServer, case: schemathesis.Case) -> None:
    response = case.call(base_url=real.url, headers={"authorization": f"Bearer {ADMIN_KEY}"})
    assert response.status_code < 500 or response.status_code == 503, response.text
    if response.text == "Invalid HTTP request received.":
        return  # The HTTP parser's own answer, to a URL of more than 64 KiB.
    case.validate_response(response, checks=checks)


@pytest.mark.parametrize(("method", "path", "needed", "handler"), ROUTED)
def test_every_route_says_what_it_takes(method: str, path: str, needed: str, handler: Any) -> None:
    operation = operation_of(handler)
    assert operation is not None, path
    assert needed in ("open", "infer", "admin", "metrics", "loading")
    assert method.lower() in DOCUMENT["paths"][re.sub(r":path", "", path)]
    if (method, path, needed, handler) in ADMIN_ROUTES:
        return  # derived from the verbs, as tests/cluster/admin/test_admin_api.py shows
    read = re.findall(r"read_body\(\w+, request, (\w+)\)", inspect.getsource(inspect.unwrap(handler)))
    assert read == ([] if operation.body is None or operation.query else [operation.body.__name__]), path
    queried = re.findall(r"parse_query\(request, (\w+)\)", inspect.getsource(inspect.unwrap(handler)))
    assert queried == ([] if operation.query is None else [operation.query.__name__]), path


def test_the_table_of_other_servers_fields_is_in_the_document() -> None:
    properties = DOCUMENT["components"]["schemas"]["ChatRequest"]["properties"]
    assert properties["store"]["enum"] == [None, False]
    assert "user" in properties
    assert "store" not in DOCUMENT["components"]["schemas"]["PushRequest"]["properties"]
    assert issubclass(operation_of(ROUTES[0][3]).body, Tolerant)  # type: ignore[union-attr, arg-type]


async def test_the_document_is_served(http: httpx.AsyncClient) -> None:
    assert (await http.get("/openapi.json")).json() == openapi(ROUTES)


CHAT, TEXT, SGLANG = (
    ("/v1/chat/completions", "ChatCompletion", {"messages": [{"role": "user", "content": "hi"}]}),
    ("/v1/completions", "Completion", {"prompt": ["hi", "there"], "n": 2}),
    ("/generate", "Generated", {"text": "hi", "sampling_params": {"max_new_tokens": 3}}),
)
EXTRAS: list[tuple[tuple[str, str, dict[str, Any]], dict[str, Any]]] = [
    *((route, {}) for route in (CHAT, TEXT, SGLANG)),
    *((route, {"prompt_logprobs": 1, "return_token_ids": True}) for route in (CHAT, TEXT)),
    (TEXT, {"logprobs": 2, "echo": True}),
    (CHAT, {"logprobs": True, "top_logprobs": 2}),
    (SGLANG, {"return_logprob": True, "top_logprobs_num": 1, "logprob_start_len": 0, "return_text_in_logprobs": True}),
]


@pytest.mark.parametrize(("route", "extra"), EXTRAS)
async def test_answers_with_all_their_extras_are_as_documented(
    http: httpx.AsyncClient, engine: Any, route: tuple[str, str, dict[str, Any]], extra: dict[str, Any]
) -> None:
    engine.fallback_reason = "no such file"
    path, schema, body = route
    answer = (await http.post(path, json={"model": "sql"} | body | extra)).json()
    jsonschema.validate(answer, {"$ref": f"#/components/schemas/{schema}", **DOCUMENT})


def test_streamed_chunks_are_as_documented(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="sql", messages=[{"role": "user", "content": "hi"}], stream=True, stream_options={"include_usage": True}
    )
    for chunk in stream:
        document = {"$ref": "#/components/schemas/ChatCompletionChunk", **DOCUMENT}
        jsonschema.validate(chunk.model_dump(exclude_unset=True), document)
