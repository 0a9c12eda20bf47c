"""Requests with random faults, to every route that takes a body or parameters: none is a 5xx, each refusal is a short
error in OpenAI's form (in Anthropic's on its routes), and a request beside it is answered. LORAFLEET_FUZZ_S seconds of
it; `make fuzz` takes an hour.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import string
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from lorafleet.api.app_state import AppState, make_state
from lorafleet.api.front_config import FrontConfig
from lorafleet.api.text.tokenizer import Tokenizer
from tests.api.conftest import MemoryCatalog, ScriptedEngine
from tests.api.routes.test_openapi_bounds import ALL_ROUTES, DOCUMENT, LEAST, least, over, resolved
from whole_api import serving

FUZZ_S = float(os.environ.get("LORAFLEET_FUZZ_S", "4"))
SEED = int(os.environ.get("LORAFLEET_FUZZ_SEED", "0"))
MODEL = Path(__file__).parents[2] / "demo" / "model"
MAX_ERROR_BYTES = 2048
GOOD = {"model": "llama", "prompt": "a", "max_tokens": 2}

HUGE = 10**400
ODD_TEXTS = [
    "",
    "\x00",
    "é" * 300,
    "\ud800",
    "a\udfff",
    "\u2028",
    "../../etc/passwd",
    "~a/b",
    "1e400",
    "nan",
    "a" * 5000,
]
ODD_NUMBERS = [0, -1, 1.5, HUGE, -HUGE, 2**31, 2**63, 2**64, 1e308, -1e308, 5e-324, True, False]
ODD_VALUES = [*ODD_TEXTS, *ODD_NUMBERS, None, [], {}, [[]], [{}], {"": None}, {"type": "x"}, ["a", 1, None, {}]]
# Put into the text of a body: no encoder of JSON writes them.
ODD_BYTES = [
    b"NaN",
    b"1e400",
    b"-",
    b"9" * 5000,
    b"[" * 5000,
    b'{"a":' * 2000,
    b"\xff",
    b'"\\ud800"',
    b"\\",
    b",",
    b"\x00",
]

pytestmark = pytest.mark.timeout(FUZZ_S + 600)


@pytest.fixture
def front() -> Iterator[AppState]:
    tokenizer = Tokenizer.from_folder(MODEL)
    config = FrontConfig(("llama",), str(MODEL), allow_runtime_lora_updating=True)
    front = make_state(config, tokenizer, ScriptedEngine(tokenizer), MemoryCatalog())
    yield front
    front.close()


class Drafts:
    """Draws requests. The same seed draws the same ones."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._over: dict[tuple[str, str], list[Any]] = {}

    def draw(self) -> tuple[str, str, bytes]:
        """Method, path with its parameters, body."""
        method, path, _, _ = self.random.choice(ALL_ROUTES)
        path = path.replace(":path", "")
        operation = DOCUMENT["paths"][path][method.lower()]
        content = operation.get("requestBody", {}).get("content", {})
        body = b"" if not content else self._body(path, content)
        return method, self._address(path, operation), body

    def _address(self, path: str, operation: dict[str, Any]) -> str:
        query = [one for one in operation["parameters"] if one["in"] == "query" and self.random.random() < 0.7]
        for name in ("name", "model"):
            path = path.replace("{" + name + "}", quote(self._name(), safe=""))
        given = "&".join(f"{one['name']}={quote(self._name(), safe='')}" for one in query)
        return f"{path}?{given}" if given else path

    def _name(self) -> str:
        text = str(self.random.choice(["sql", "a", *ODD_TEXTS, *ODD_NUMBERS]))
        return text.encode(errors="replace").decode()[:6000]

    def _body(self, path: str, content: dict[str, Any]) -> bytes:
        if "application/json" not in content:
            return self.random.randbytes(self.random.choice((0, 10, 512, 3000)))
        schema = resolved(content["application/json"]["schema"])
        body = LEAST.get(path) or least(schema)
        fields = list(schema.get("properties", {}))
        for name in self.random.sample(fields, min(len(fields), self.random.choice((0, 1, 1, 2, 5)))):
            body = body | {name: self._value(path, name, schema["properties"][name])}
        if self.random.random() < 0.3:
            body = self._mutated(body, 4)
        raw = json.dumps(body).encode()
        return self._broken(raw) if self.random.random() < 0.3 else raw

    def _value(self, path: str, name: str, schema: Any) -> Any:
        """One that fits, one over a bound, or an odd one."""
        kind = self.random.random()
        if kind < 0.2:
            return least(schema)
        if kind < 0.6:
            if (path, name) not in self._over:
                self._over[path, name] = list(over(schema))
            if self._over[path, name]:
                return self.random.choice(self._over[path, name])
        return self._mutated(least(schema), 3)

    def _mutated(self, value: Any, depth: int) -> Any:
        if not depth or self.random.random() < 0.3:
            return self.random.choice(ODD_VALUES)
        if isinstance(value, dict) and value:
            name = self.random.choice(list(value))
            return value | {self.random.choice([name, name, *ODD_TEXTS]): self._mutated(value[name], depth - 1)}
        if isinstance(value, list) and value:
            return [*value[1:], self._mutated(value[0], depth - 1)] * self.random.choice((1, 1, 3))
        return [value] if self.random.random() < 0.5 else {str(value)[:20]: value}

    def _broken(self, raw: bytes) -> bytes:
        """Cut, or with odd bytes in the place of others."""
        start = self.random.randrange(len(raw) + 1)
        end = min(len(raw), start + self.random.choice((0, 0, 1, 8)))
        kind = self.random.random()
        if kind < 0.2:
            return raw[:start]
        new = self.random.choice(ODD_BYTES) if kind < 0.8 else self.random.choice(string.printable).encode()
        return raw[:start] + new + raw[end:]


def check(path: str, answer: httpx.Response) -> None:
    assert answer.status_code < 500, answer.text[:500]
    if answer.status_code < 400:
        return
    assert len(answer.content) <= MAX_ERROR_BYTES, answer.text[:3000]
    body = json.loads(answer.content)
    error = body["error"]
    if path.startswith("/v1/messages"):  # Anthropic's form, which its clients read
        assert body["type"] == "error" and set(error) == {"type", "message"}, body
    else:
        assert set(error) == {"message", "type", "param", "code"}, error
    assert error["message"] and error["type"], error


async def ask(http: httpx.AsyncClient, method: str, path: str, body: bytes) -> None:
    try:
        check(path, await http.request(method, path, content=body))
    except Exception as error:
        raise AssertionError(f"{method} {path} {body[:2000]!r} ({len(body)} bytes)") from error


async def test_whatever_a_request_holds_it_is_answered_or_refused(front: AppState, tmp_path: Path) -> None:
    drafts = Drafts(SEED)
    ends_s = time.monotonic() + FUZZ_S
    num_asked = 0
    async with serving(front, tmp_path) as api:
        while time.monotonic() < ends_s:
            requests = [ask(api.http, *drafts.draw()) for _ in range(8)]
            [good, *_] = await asyncio.gather(api.http.post("/v1/completions", json=GOOD), *requests)
            assert good.status_code == 200, good.text
            num_asked += len(requests)
    print(f"\n{num_asked} requests asked")
    assert num_asked > 0
