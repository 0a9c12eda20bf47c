"""Runs the clients of a soak.

Tenants request completions and chats, close streams early, and try others' adapters. Pages and scrapers poll.
Administrators push, move and remove adapters. Each client compares every answer with soak_truth.py.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from soak_metering import Told
from soak_truth import ABSENT, MIN_SURE, Truth
from soak_world import ANSWER_TOKENS, CHAT, PENALTY, TENANTS, Adapter, World

PROBER = "dune"  # A tenant without adapters that requests others' adapters.
WATCHER = "echo"  # A tenant that only polls.
OPERATOR = "operator"
LIMITED = "coil"  # The tenant with quotas.
MAX_SHOWN = 20
TIMEOUT_S = 300.0


@dataclass(slots=True)
class Report:
    usages: dict[str, Told] = field(default_factory=dict)  # The usage of each request, as its client knows it.
    done: Counter[str] = field(default_factory=Counter)  # The number of requests and calls by kind.
    faults: Counter[str] = field(default_factory=Counter)
    shown: list[str] = field(default_factory=list)
    waiting: list[float] = field(default_factory=list)  # The number of waiting sequences at each scrape.

    def fault(self, kind: str, what: str) -> None:
        self.faults[kind] += 1
        if self.faults[kind] <= MAX_SHOWN:
            self.shown.append(f"{kind}: {what[:500]}")


@dataclass(slots=True)
class Soak:
    """Holds the state that all clients of a soak share."""

    http: httpx.AsyncClient
    world: World
    keys: dict[str, str]  # The keys by tenant, and the operator's.
    report: Report = field(default_factory=Report)
    ending: bool = False
    _number: int = 0

    def headers(self, who: str, request_id: str | None = None) -> dict[str, str]:
        headers = {"authorization": f"Bearer {self.keys[who]}"}
        return headers if request_id is None else headers | {"x-request-id": request_id}

    def next_id(self) -> str:
        self._number += 1
        return f"soak{self._number}"

    # -- tenants ---------------------------------------------------------------------------------------------------

    async def client(self, seed: int) -> None:
        draw = random.Random(seed)
        while not self.ending:
            tenant = draw.choice(TENANTS)
            try:
                await self._ask(draw, tenant, *self._target(draw, tenant))
            except httpx.HTTPError as error:
                self.report.fault("no answer", repr(error))
                await asyncio.sleep(1)  # The pause avoids thousands of faults for one cause.

    def _target(self, draw: random.Random, tenant: str) -> tuple[str, Truth]:
        kind = draw.random()
        if kind < 0.1:
            return "base", self.world.base
        if kind < 0.2:
            return draw.choice(self.world.mixes[tenant])
        seen = self.world.seen_by(tenant)
        adapter = seen[int(len(seen) * draw.random() ** 2)] if draw.random() < 0.7 else draw.choice(seen)
        return adapter.name, adapter.truth

    async def _ask(self, draw: random.Random, tenant: str, model: str, truth: Truth) -> None:
        prompt, n = draw.choice(truth.prompts), 3 if draw.random() < 0.1 else 1
        tokens, stream = draw.randint(MIN_SURE, ANSWER_TOKENS), draw.random() < 0.5
        body: dict[str, Any] = {"model": model, "max_tokens": tokens, "temperature": 0, "n": n}
        body |= {"ignore_eos": True, "return_token_ids": True, "stream": stream, "presence_penalty": PENALTY}
        if stream:
            body["stream_options"] = {"include_usage": True}
        chat = prompt == 0 and draw.random() < 0.5
        body |= {"messages": CHAT} if chat else {"prompt": self.world.prompts[prompt]}
        path = "/v1/chat/completions" if chat else "/v1/completions"
        leave_after = draw.randint(1, 3) if stream and draw.random() < 0.25 else None
        ask = _Ask(self.next_id(), tenant, model, truth, prompt, n, tokens)
        with truth.watched() as seen:
            # Until more is known, the request counts as a stream that was closed early; other faults are recorded
            # below.
            self.report.usages[ask.id] = Told(tenant, False, len(self.world.prompts[prompt]), 0, n * tokens)
            headers = self.headers(tenant, ask.id)
            if stream:
                async with self.http.stream("POST", path, json=body, headers=headers) as answer:
                    if answer.status_code != 200:
                        await answer.aread()
                        self._refused(ask, seen, answer)
                    else:
                        await self._read_stream(ask, seen, answer, leave_after)
            else:
                answer = await self.http.post(path, json=body, headers=headers)
                if answer.status_code != 200:
                    self._refused(ask, seen, answer)
                else:
                    content = answer.json()
                    answers = {choice["index"]: choice["token_ids"] for choice in content["choices"]}
                    self._whole(ask, seen, answers, content["usage"], "chat" if chat else "whole")

    def _refused(self, ask: _Ask, seen: set[str], answer: httpx.Response) -> None:
        self.report.usages[ask.id] = Told(ask.tenant, True, 0, 0, 0)
        status = answer.status_code
        if status == 404 and ABSENT in seen:
            self.report.done["404 while it was not there"] += 1
        elif status == 429 and ask.tenant == LIMITED and "rate_limit_exceeded" in answer.text:
            self.report.done["429 over a quota"] += 1
        else:
            self.report.fault(f"status {status}", f"{ask} with {sorted(seen)}: {answer.text}")

    async def _read_stream(self, ask: _Ask, seen: set[str], answer: httpx.Response, leave_after: int | None) -> None:
        answers: dict[int, list[int]] = {i: [] for i in range(ask.n)}
        num_chunks, usage = 0, None
        async with aclosing(_events(answer)) as events:
            async for chunk in events:
                if "error" in chunk:
                    self.report.fault("error in a stream", f"{ask}: {chunk}")
                    return
                for choice in chunk["choices"]:
                    answers[choice["index"]] += choice.get("token_ids") or []
                usage, num_chunks = chunk.get("usage") or usage, num_chunks + 1
                if leave_after is not None and num_chunks >= leave_after and usage is None:
                    received = sum(map(len, answers.values()))
                    before = self.report.usages[ask.id]
                    most = before.most_completion_tokens
                    self.report.usages[ask.id] = Told(ask.tenant, False, before.prompt_tokens, received, most)
                    self._check(ask, seen, answers)
                    self.report.done["stream that was left"] += 1
                    return
        if usage is None:
            self.report.fault("stream without an end", str(ask))
        else:
            self._whole(ask, seen, answers, usage, "stream")

    def _whole(
        self, ask: _Ask, seen: set[str], answers: dict[int, list[int]], usage: dict[str, Any], kind: str
    ) -> None:
        prompt, completion = usage["prompt_tokens"], usage["completion_tokens"]
        self.report.usages[ask.id] = Told(ask.tenant, True, prompt, completion, completion)
        if len(answers) != ask.n or any(len(tokens) != ask.tokens for tokens in answers.values()):
            self.report.fault("tokens missing", f"{ask}: {answers}")
        if prompt != len(self.world.prompts[ask.prompt]) or completion != ask.n * ask.tokens:
            self.report.fault("usage", f"{ask}: {usage}")
        self._check(ask, seen, answers)
        self.report.done[f"{kind} with n={ask.n}" if ask.n > 1 else kind] += 1
        self.report.done["mix" if "+" in ask.model else "base" if ask.model == "base" else "adapter"] += 1

    def _check(self, ask: _Ask, seen: set[str], answers: dict[int, list[int]]) -> None:
        for tokens in answers.values():
            fault = ask.truth.fault(seen, ask.prompt, tokens)
            if fault is not None:
                self.report.fault("wrong answer", f"{ask} {fault}; it is that of {self._owners_of(ask.prompt, tokens)}")

    def _owners_of(self, prompt: int, tokens: list[int]) -> str:
        truths = [(f"{adapter.tenant}/{adapter.name}", adapter.truth) for adapter in self.world.adapters]
        truths += [("base", self.world.base), *(mix for mixes in self.world.mixes.values() for mix in mixes)]
        owners = [name for name, truth in truths if truth.fault(set(truth.answers), prompt, tokens) is None]
        return " or ".join(owners) or "nobody"

    # -- clients that must not learn anything ----------------------------------------------------------------------

    async def prober(self, seed: int) -> None:
        """Requests another tenant's adapter and a name that never existed; both answers must be the same."""
        draw = random.Random(seed)
        private = [adapter for adapter in self.world.adapters if adapter.tenant is not None]
        public = next(
            adapter.name for adapter in self.world.adapters if adapter.tenant is None and adapter.kind == "steady"
        )
        while not self.ending:
            adapter = draw.choice(private)
            name, absent = adapter.name, "z" * len(adapter.name)
            form = draw.choice(["{0}", "base:{0}", f"{public}+{{0}}", f"~{adapter.tenant}/{{0}}"])
            stream = draw.random() < 0.5
            bodies = [
                {"model": form.format(model), "prompt": self.world.prompts[1], "max_tokens": 4, "stream": stream}
                for model in (name, absent)
            ]
            try:
                own = [self.next_id() for _ in bodies]
                self.report.usages.update(dict.fromkeys(own, Told(PROBER, True, 0, 0, 0)))
                hidden, unknown = [
                    await self.http.post("/v1/completions", json=body, headers=self.headers(PROBER, request_id))
                    for body, request_id in zip(bodies, own, strict=True)
                ]
            except httpx.HTTPError as error:
                self.report.fault("no answer", repr(error))
                continue
            alike = hidden.text.replace(name, absent) == unknown.text
            if not alike or (hidden.status_code, unknown.status_code) not in {(404, 404), (400, 400)}:
                self.report.fault("another tenant's adapter", f"{bodies[0]}: {hidden.text} but {unknown.text}")
            self.report.done["other tenants' adapters asked for"] += 1

    async def poller(self) -> None:
        """Scrapes metrics and polls the console, and checks that no tenant sees another's name."""
        while not self.ending:
            for who in (*TENANTS, WATCHER, OPERATOR):
                for path in ("/metrics", "/v1/console/state", "/v1/models", "/v1/adapters"):
                    try:
                        answer = await self.http.get(path, headers=self.headers(who))
                    except httpx.HTTPError as error:
                        self.report.fault("no answer", repr(error))
                        continue
                    if answer.status_code != 200:
                        self.report.fault(f"status {answer.status_code}", f"{path} of {who}: {answer.text}")
                    others = [tenant for tenant in TENANTS if tenant not in (who, OPERATOR) and who != OPERATOR]
                    leaked = [tenant for tenant in others if tenant in answer.text]
                    if leaked:
                        where = answer.text.index(leaked[0])
                        said = answer.text[max(0, where - 80) : where + 80]
                        self.report.fault("another tenant's name", f"{path} tells {who}: {said}")
                    self.report.done[f"GET {path}"] += 1
                    if who == OPERATOR and path == "/metrics":
                        self.report.waiting.append(series(answer.text, "vllm:num_requests_waiting"))
            await asyncio.sleep(2)

    # -- administrators --------------------------------------------------------------------------------------------

    async def push_all(self) -> None:
        free = asyncio.Semaphore(8)

        async def push(adapter: Adapter) -> None:
            async with free:
                await _Administrator(self, adapter.tenant, random.Random(0)).push(adapter)

        await asyncio.gather(*(push(adapter) for adapter in self.world.adapters))

    async def administrator(self, tenant: str | None, seed: int) -> None:
        draw = random.Random(seed)
        administrator = _Administrator(self, tenant, draw)
        changing = [adapter for adapter in self.world.adapters if adapter.tenant == tenant and adapter.kind != "steady"]
        while not self.ending:
            await administrator.change(draw.choice(changing))
            await asyncio.sleep(draw.uniform(0, 1))

    async def settle(self) -> None:
        """Waits until nothing runs, as the server must give up requests whose clients have left."""
        for _ in range(600):
            answer = await self.http.get("/metrics", headers=self.headers(OPERATOR))
            if not series(answer.text, "vllm:num_requests_running") + series(answer.text, "vllm:num_requests_waiting"):
                return
            await asyncio.sleep(0.1)
        self.report.fault("never idle", "requests are running a minute after the last one was sent or abandoned")


@dataclass(frozen=True, slots=True)
class _Ask:
    id: str
    tenant: str
    model: str
    truth: Truth = field(repr=False)
    prompt: int
    n: int
    tokens: int


class _Administrator:
    """Administers a tenant's adapters, or the public ones as the operator, and tracks the content of each version."""

    def __init__(self, soak: Soak, tenant: str | None, draw: random.Random) -> None:
        self._soak = soak
        self._who = OPERATOR if tenant is None else tenant
        self._draw = draw

    async def change(self, adapter: Adapter) -> None:
        """Makes one random change that is possible for the adapter now."""
        letters = adapter.letters
        if ABSENT in adapter.truth.now:
            await self.push(adapter)
            return
        if adapter.kind == "mortal" and self._draw.random() < 0.5:
            await self._remove(adapter)
            return
        kind = self._draw.choice(("push", "push", "push aside", "rollback", "alias", "split", "verify"))
        if kind == "push":
            await self.push(adapter)
        elif kind == "push aside":
            await self.push(adapter, activate=False)
        elif kind == "rollback":
            if adapter.num_moves > 1:
                await self._do(adapter, "rollback", {})
        elif kind == "verify":
            await self._do(adapter, "verify", {})
        elif kind == "alias":
            await self._do(adapter, "alias", {"version": self._draw.choice(list(letters))})
        elif len(letters) > 1:
            await self._do(
                adapter, "alias", {"split": {str(number): 0.5 for number in self._draw.sample(list(letters), 2)}}
            )

    async def push(self, adapter: Adapter, *, activate: bool = True) -> None:
        letter = self._draw.choice(list(adapter.contents))
        packed = adapter.packed(letter, tag=self._soak.next_id())
        query = {"options": json.dumps({"activate": activate})}
        path = f"/v1/adapters/{adapter.name}/files"
        async with self._changing(adapter, f"push of {adapter.name}") as done:
            done(await self._soak.http.put(path, content=packed, params=query, headers=self._headers), letter)

    async def _do(self, adapter: Adapter, verb: str, body: dict[str, Any]) -> None:
        async with self._changing(adapter, f"{verb} {body} of {adapter.name}") as done:
            done(
                await self._soak.http.post(f"/v1/adapters/{adapter.name}/{verb}", json=body, headers=self._headers),
                None,
            )

    async def _remove(self, adapter: Adapter) -> None:
        async with self._changing(adapter, f"removal of {adapter.name}", ABSENT) as done:
            done(await self._soak.http.delete(f"/v1/adapters/{adapter.name}", headers=self._headers), None)

    @property
    def _headers(self) -> dict[str, str]:
        return self._soak.headers(self._who)

    @asynccontextmanager
    async def _changing(self, adapter: Adapter, what: str, *labels: str) -> AsyncIterator[Any]:
        """Marks the adapter as possibly changed within the block, and as its answer says afterwards."""
        adapter.truth.may_be(*adapter.contents, *labels)
        report = self._soak.report

        def done(answer: httpx.Response, pushed: str | None) -> None:
            if answer.status_code != 200:
                report.fault("administration", f"{what}: {answer.status_code} {answer.text}")
                return
            report.done[what.split()[0]] += 1
            self._record(adapter, answer.json(), pushed)

        try:
            yield done
        except httpx.HTTPError as error:
            report.fault("no answer", f"{what}: {error!r}")

    def _record(self, adapter: Adapter, shown: dict[str, Any], pushed: str | None) -> None:
        if shown.get("removed"):
            adapter.letters.clear()
            adapter.truth.is_now(ABSENT)
            return
        if "verified" in shown:
            adapter.truth.is_now(*adapter.stands_for)
            return
        letters, numbers = adapter.letters, [version["number"] for version in shown["versions"]]
        if pushed is not None:
            letters[max(numbers)] = pushed
        for gone in letters.keys() - set(numbers):
            del letters[gone]
        history = shown["aliases"][adapter.name]["history"]
        adapter.num_moves = len(history)
        adapter.stands_for = {letters[int(number)] for number in history[-1]["split"]}
        adapter.truth.is_now(*adapter.stands_for)


async def _events(answer: httpx.Response) -> AsyncGenerator[dict[str, Any], None]:
    async for line in answer.aiter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


def series(text: str, name: str, label: str = "") -> float:
    """Returns the sum of a series over its labels, or over the lines with `label`, such as 'kind="prompt"'."""
    return sum(
        float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if line.partition("{")[0].partition(" ")[0] in (name, f"{name}_total") and label in line
    )
