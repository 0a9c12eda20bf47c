"""Simulates the quiet tenant, which asks its adapters short questions at a steady rate, and times each answer.

Questions are sent on schedule, whether or not the previous one has been answered, each on a connection of its own. So
every question that is sent during a stall of three seconds sees the stall.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

PATIENCE_S = 30.0  # A question without an answer after this time counts as unanswered.
MAX_TOKENS = 32

Question = tuple[str, str]  # The model and the text of the question.


@dataclass(slots=True)
class Answer:
    """One answer, and its times."""

    asked_s: float
    status: int = 0  # The HTTP status, or 0 if there was none.
    ttft_s: float | None = None  # Time to first token, or None if no token came.
    gaps_s: list[float] = field(default_factory=list)
    fault: str | None = None  # The error, or None if the answer is correct.


class QuietTenant:
    """Asks questions as the quiet tenant, and compares the answers with the correct ones. Close it with `aclose`."""

    def __init__(self, url: str, key: str, questions: Sequence[Question], interval_s: float) -> None:
        headers = {"authorization": f"Bearer {key}"}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._http = httpx.AsyncClient(
            base_url=url, headers=headers, timeout=PATIENCE_S, limits=limits, trust_env=False
        )
        self._questions = questions
        self._interval_s = interval_s
        self._right: dict[Question, str] = {}

    async def learn(self) -> None:
        """Records the answers to all questions while the server is otherwise idle, as the correct ones."""
        for question in self._questions:
            answer = await self._http.post("/v1/chat/completions", json=self._body(question))
            answer.raise_for_status()
            self._right[question] = answer.json()["choices"][0]["message"]["content"]

    @asynccontextmanager
    async def asking(self) -> AsyncIterator[list[Answer]]:
        """Asks questions within the block. The list grows as answers end; afterwards it is complete."""
        answers: list[Answer] = []
        asking = asyncio.create_task(self._ask_on(answers))
        try:
            yield answers
        finally:
            asking.cancel()
            await asyncio.wait([asking])
            await asyncio.gather(*self._asked)

    async def _ask_on(self, answers: list[Answer]) -> None:
        self._asked: set[asyncio.Task[None]] = set()
        begin = time.monotonic()
        for number, question in enumerate(itertools.cycle(self._questions)):
            await asyncio.sleep(begin + number * self._interval_s - time.monotonic())
            task = asyncio.create_task(self._ask(question, answers))
            self._asked.add(task)
            task.add_done_callback(self._asked.discard)

    async def _ask(self, question: Question, answers: list[Answer]) -> None:
        answer = Answer(time.monotonic())
        try:
            async with asyncio.timeout(PATIENCE_S):
                await self._read(question, answer)
        except (TimeoutError, httpx.HTTPError) as error:
            answer.fault = f"{type(error).__name__} after {time.monotonic() - answer.asked_s:.0f} s"
        answers.append(answer)

    async def _read(self, question: Question, answer: Answer) -> None:
        body = self._body(question) | {"stream": True}
        async with self._http.stream("POST", "/v1/chat/completions", json=body) as stream:
            answer.status = stream.status_code
            if answer.status != 200:
                answer.fault = f"{answer.status}: {_code(await stream.aread())}"
                return
            text, last_s = "", answer.asked_s
            async for line in stream.aiter_lines():
                if line.startswith('data: {"error"'):
                    answer.fault = f"error event: {_code(line.removeprefix('data: ').encode())}"
                    return
                words = _words(line)
                now = time.monotonic()
                if words and answer.ttft_s is None:
                    answer.ttft_s = now - last_s
                elif words:
                    answer.gaps_s.append(now - last_s)
                if words:
                    text, last_s = text + words, now
            if text != self._right[question]:
                answer.fault = f"wrong: {text[:100]!r} in place of {self._right[question]!r}"

    def _body(self, question: Question) -> dict[str, Any]:
        model, text = question
        message: Mapping[str, str] = {"role": "user", "content": text}
        return {"model": model, "messages": [message], "max_tokens": MAX_TOKENS, "temperature": 0}

    async def aclose(self) -> None:
        await self._http.aclose()


def _code(body: bytes) -> str:
    """Returns the code of an error in OpenAI's form, or else the beginning of the body."""
    try:
        error = json.loads(body)["error"]
        return str(error["code"] or error["message"])[:80]
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")[:80]


def _words(line: str) -> str:
    """Returns the text that an event adds."""
    if not line.startswith("data: {"):
        return ""
    choices = json.loads(line.removeprefix("data: ")).get("choices") or [{}]
    return choices[0].get("delta", {}).get("content") or ""
