"""Bodies of administration and quality routes with numbers, sizes or depths that are wrong: each is a short 400."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from lorafleet.api.app_state import AppState, make_state
from lorafleet.api.front_config import FrontConfig
from lorafleet.api.text.tokenizer import Tokenizer
from tests.api.conftest import MemoryCatalog, ScriptedEngine
from tests.api.routes.test_openapi_bounds import DOCUMENT, LEAST, least, over, resolved
from whole_api import serving

MODEL = Path(__file__).parents[3] / "demo" / "model"
PATHS = [
    path
    for path, methods in DOCUMENT["paths"].items()
    if path not in LEAST and "application/json" in methods.get("post", {}).get("requestBody", {}).get("content", {})
]
BAD_VALUES = ["1e400", "-1e400", "NaN", "Infinity", "9" * 401, "-" + "9" * 5000, "[" * 3000 + "]" * 3000, '"\\ud800"']


@pytest.fixture
def front() -> Iterator[AppState]:
    tokenizer = Tokenizer.from_folder(MODEL)
    front = make_state(FrontConfig(("llama",), str(MODEL)), tokenizer, ScriptedEngine(tokenizer), MemoryCatalog())
    yield front
    front.close()


@pytest.fixture
async def http(front: AppState, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with serving(front, tmp_path) as api:
        yield api.http


def body_of(path: str) -> Any:
    return DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]


async def check(http: httpx.AsyncClient, path: str, body: str) -> None:
    answer = await http.post(path.replace("{name}", "a"), content=body)
    assert answer.status_code == 400, f"{path} {body[:200]} {answer.text[:300]}"
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and len(answer.content) < 1500, answer.text


def test_there_are_routes_of_both_kinds() -> None:
    assert {"/v1/adapters", "/v1/adapters/{name}/alias", "/v1/quality/{name}/run"} <= set(PATHS)


@pytest.mark.parametrize("path", PATHS)
async def test_numbers_that_are_none_and_values_of_any_depth_are_refused(http: httpx.AsyncClient, path: str) -> None:
    schema = resolved(body_of(path))
    start = json.dumps(least(schema))[:-1]
    for name in [*schema.get("properties", {}), "no_such_field"]:
        for value in BAD_VALUES:
            comma = "" if start == "{" else ","
            await check(http, path, f'{start}{comma}"{name}":{value}}}')


@pytest.mark.parametrize("path", PATHS)
async def test_what_is_over_a_documented_bound_is_refused(http: httpx.AsyncClient, path: str) -> None:
    schema = resolved(body_of(path))
    for name, field in schema.get("properties", {}).items():
        for value in over(field):
            await check(http, path, json.dumps(least(schema) | {name: value}))
