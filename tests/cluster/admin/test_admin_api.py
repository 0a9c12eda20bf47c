"""The HTTP routes of administration are derived from its verbs, and each route's schema has the verb's fields."""

from __future__ import annotations

from typing import Any, get_args

import httpx
import msgspec
import pytest

from lorafleet.api.routes.operations import TarFile, TensorBytes, operation_of
from lorafleet.client.http_calls import call_of
from lorafleet.cluster.admin.admin_api import admin_routes
from lorafleet.protocol import admin_verbs as verbs
from lorafleet.protocol.admin_verbs import DirectoryVerb, HttpVerb, PassedOnVerb, Verb, route_of

ROUTES = {
    (method, path.replace(":path", "")): operation_of(handler)
    for method, path, _, handler in admin_routes(None)  # type: ignore[arg-type]  # only described here
}


@pytest.mark.parametrize("kind", get_args(HttpVerb))
def test_a_verb_has_a_route_that_takes_its_fields(kind: type[Verb[Any]]) -> None:
    route = route_of(kind)
    operation = ROUTES[route.method, route.path]
    assert operation is not None and operation.summary == route.summary
    model = operation.query if operation.body in (None, TarFile, TensorBytes) else operation.body
    fields = set() if model is None else set(model.model_fields)  # type: ignore[union-attr]
    own = {field.name for field in msgspec.structs.fields(kind)} - set(route.in_path)
    assert own <= fields, route
    assert own == fields or route.method == "DELETE", route  # two verbs share it


def test_no_route_is_anything_else_than_a_verb() -> None:
    assert set(ROUTES) == {(route_of(kind).method, route_of(kind).path) for kind in get_args(HttpVerb)}


@pytest.mark.parametrize("kind", get_args(DirectoryVerb))
def test_a_verb_that_is_not_passed_on_is_not_reachable_over_http(kind: type[Verb[Any]]) -> None:
    assert (kind.http is None) == (kind not in get_args(PassedOnVerb))


@pytest.mark.parametrize(
    ("verb", "method", "url", "body"),
    [
        (verbs.ListAdapters("a", 5), "GET", "/v1/adapters?after=a&limit=5", None),
        (verbs.ShowAdapter("org/sql 1"), "GET", "/v1/adapters/org/sql%201", None),
        (verbs.RollBackAlias("sql"), "POST", "/v1/adapters/sql/rollback", b"{}"),
        (verbs.DownloadAdapter("org/sql", 2), "POST", "/v1/adapters/org/sql/download", b'{"version":2}'),
        (verbs.PinAdapter("sql", 2), "POST", "/v1/adapters/sql/pin", b'{"replicas":2}'),
        (
            verbs.MoveAlias.to("sql", {1: 9.0}, "b"),
            "POST",
            "/v1/adapters/sql/alias",
            b'{"alias":"b","split":{"1":9.0}}',
        ),
        (verbs.PushAdapter("sql", "/x", pin=1), "POST", "/v1/adapters", b'{"name":"sql","source":"/x","pin":1}'),
        (verbs.RemoveAdapter("sql", 2.5), "DELETE", "/v1/adapters/sql?wait_s=2.5", None),
        (
            verbs.UploadAdapter("sql", "/x", verbs.PushOptions(replicas=2)),
            "PUT",
            "/v1/adapters/sql/files?source=%2Fx&options=%7B%22replicas%22%3A2%7D",
            None,
        ),
    ],
)
def test_a_client_sends_a_verb_as_it_is(verb: Verb[object], method: str, url: str, body: bytes | None) -> None:
    call = call_of(verb)
    assert (call.method, call.body) == (method, body)
    assert httpx.URL(call.path, params=call.query) == httpx.URL(url)
