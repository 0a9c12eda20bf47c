"""Who may do what, by the key that is sent."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.datastructures import Headers

from lorafleet.api.access.caller import ANONYMOUS, sent_key
from lorafleet.api.access.gate import Gate
from lorafleet.api.routes.build_api import ROUTES
from lorafleet.api.routes.docs import docs_routes
from lorafleet.api.routes.unserved import unserved_routes
from lorafleet.cluster.batches.batch_routes import batch_routes
from lorafleet.cluster.console.state_api import StateApi
from lorafleet.cluster.quality.routes import QualityApi
from lorafleet.cluster.serve.api_routes import routes_beside
from lorafleet.protocol.errors import Forbidden, Unauthorized

ADMIN_KEY = "correct horse battery"


@pytest.mark.parametrize("key", [None, "none", "lf-anything"])
def test_without_keys_everybody_infers_and_nobody_administers(key: str | None) -> None:
    gate = Gate()
    assert gate.caller(key, "infer") == gate.caller(key, "metrics") == gate.caller(key, "loading") == ANONYMOUS
    with pytest.raises(Forbidden, match="Administration is off"):
        gate.caller(key, "admin")


def test_the_admin_key_opens_everything_and_another_nothing_but_what_is_open_anyway() -> None:
    gate = Gate(ADMIN_KEY)
    admin = gate.caller(ADMIN_KEY, "admin")
    assert admin.is_operator and admin.scopes == {"infer", "admin", "metrics"}
    assert not gate.caller("wrong", "infer").is_operator
    for key in (None, "", "wrong", ADMIN_KEY + " "):
        with pytest.raises(Unauthorized):
            gate.caller(key, "admin")


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ({}, None),
        ({"authorization": "Bearer abc"}, "abc"),
        ({"authorization": "bearer abc"}, "abc"),
        ({"x-api-key": "abc"}, "abc"),
        ({"authorization": "Bearer abc", "x-api-key": "other"}, "abc"),
        ({"authorization": "Bearer "}, None),
        ({"authorization": "Basic dXNlcg=="}, "Basic dXNlcg=="),
    ],
)
def test_the_key_is_read_from_the_header(headers: dict[str, str], key: str | None) -> None:
    assert sent_key(Headers(headers)) == key


def test_only_what_says_that_the_server_lives_is_open_to_all() -> None:
    """Of all routes that a replica has. The API's document and the console's files tell what the source code tells, and
    so do the refusals of other servers' routes."""
    unused: Any = None
    console = StateApi(unused, unused, unused)
    routes = [*ROUTES, *routes_beside(unused, console, QualityApi(unused), batch_routes())]
    assert {path for _, path, needed, _ in [*routes, *docs_routes(routes)] if needed == "open"} == {
        *("/health", "/health_generate", "/liveness", "/ping", "/version", "/finish_session"),
        *(path for _, path, _, _ in unserved_routes()),
        *("/docs", "/docs/{name}", "/openapi.json"),
        *("/console", "/console/", "/console/{name}"),
    }
