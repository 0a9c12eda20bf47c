"""Long bodies, conversations and answers stay off the event loop, in threads for which tenants take turns; the bytes of
all bodies under way are bounded."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import httpx
import msgspec
import pytest

from lorafleet.api.access.body_budget import BodyBudget, HeldBody
from lorafleet.api.access.caller import Caller
from lorafleet.api.access.fair_threads import FairThreads
from lorafleet.api.access.long_work import MAX_INLINE_BODY_BYTES
from lorafleet.api.answer import generation
from lorafleet.api.app_state import AppState
from lorafleet.protocol.errors import Overloaded, QueueFull
from lorafleet.sandbox.job_turns import TurnLimits

T = TypeVar("T")
LONG = 1000  # tokens


class Counted(FairThreads):
    """Counts the jobs that it is given."""

    def __init__(self) -> None:
        super().__init__("counted", TurnLimits(2, 128))
        self.num_jobs = 0

    async def run(self, group: str, work: Callable[[], T]) -> T:
        self.num_jobs += 1
        return await super().run(group, work)


@pytest.fixture
def jobs(front: AppState, engine: Any) -> Iterator[Counted]:
    engine.hello = msgspec.structs.replace(engine.hello, max_model_len=1 << 20, kv_cache_tokens=1 << 20)
    front.long_work.close()
    front.long_work = Counted()
    yield front.long_work
    front.long_work.close()


# -- threads -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def threads() -> Iterator[FairThreads]:
    made = FairThreads("long work", TurnLimits(running=2, waiting=3))
    yield made
    made.close()


async def test_one_tenant_s_long_work_keeps_nobody_else_waiting_and_is_bounded(threads: FairThreads) -> None:
    go = threading.Event()
    loud = [asyncio.create_task(threads.run("loud", go.wait)) for _ in range(5)]
    assert await threads.run("quiet", lambda: "done") == "done"
    with pytest.raises(QueueFull, match="'long work' now: 3 jobs of the same tenant or model are waiting") as full:
        await loud[-1]
    assert full.value.retry_after_s is not None
    go.set()
    assert all(await asyncio.gather(*loud[:-1]))


async def test_a_client_that_leaves_gives_its_turn_back_when_its_thread_has_ended(threads: FairThreads) -> None:
    go, began = threading.Event(), threading.Event()

    def work() -> None:
        began.set()
        go.wait(120)

    left = asyncio.create_task(threads.run("loud", work))
    await asyncio.to_thread(began.wait, 120)
    left.cancel()
    waiting = asyncio.create_task(threads.run("loud", lambda: "next"))
    gone = asyncio.create_task(threads.run("loud", lambda: "never"))
    await threads.run("quiet", lambda: None)
    assert left.cancelled() and not waiting.done()
    gone.cancel()
    go.set()
    assert await waiting == "next"
    assert await asyncio.gather(gone, return_exceptions=True) != ["never"]


# -- requests and answers ----------------------------------------------------------------------------------------------


async def test_long_conversations_are_parsed_and_rendered_in_threads(http: httpx.AsyncClient, jobs: Counted) -> None:
    short = {"messages": [{"role": "user", "content": "hi"}]}
    long = {"messages": [{"role": "user", "content": "x" * 20}] * (MAX_INLINE_BODY_BYTES // 40)}
    for path, more in (("/v1/chat/completions", {"max_tokens": 2}), ("/tokenize", {})):
        assert (await http.post(path, json=short | more)).status_code == 200
        assert jobs.num_jobs == 0
        assert (await http.post(path, json=long | more)).status_code == 200
        assert jobs.num_jobs >= 2, "one to parse it, one to render it"
        jobs.num_jobs = 0


def scored(num_tokens: int) -> dict[str, Any]:
    return {"prompt": [3] * num_tokens, "max_tokens": 2, "logprobs": 5}


ANSWERS: list[tuple[str, Callable[[int], dict[str, Any]]]] = [
    ("/v1/completions", lambda count: scored(count) | {"prompt_logprobs": 5}),
    ("/v1/completions", lambda count: scored(count) | {"echo": True}),
    ("/v1/completions", lambda count: scored(count) | {"echo": True, "stream": True}),
    (
        "/v1/chat/completions",
        lambda count: {"messages": [{"role": "user", "content": "a" * count}], "prompt_logprobs": 5, "max_tokens": 2},
    ),
    *(
        (
            "/generate",
            lambda count, stream=stream: {
                "input_ids": [3] * count,
                "sampling_params": {"max_new_tokens": 2},
                "return_logprob": True,
                "logprob_start_len": 0,
                "top_logprobs_num": 5,
                "stream": stream,
            },
        )
        for stream in (False, True)
    ),
    ("/tokenize", lambda count: {"prompt": "a" * 5 * count}),
]


@pytest.mark.parametrize(("path", "body"), ANSWERS)
async def test_long_lists_of_an_answer_are_written_in_threads(
    http: httpx.AsyncClient, jobs: Counted, path: str, body: Callable[[int], dict[str, Any]]
) -> None:
    assert (await http.post(path, json=body(20))).status_code == 200
    assert jobs.num_jobs == 0
    answer = await http.post(path, json=body(LONG))
    assert answer.status_code == 200, answer.text[:300]
    assert jobs.num_jobs > 0


async def test_logprobs_of_a_long_prompt_are_whole(http: httpx.AsyncClient, jobs: Counted) -> None:
    body = scored(LONG) | {"echo": True, "prompt_logprobs": 5}
    [choice] = (await http.post("/v1/completions", json=body)).json()["choices"]
    assert jobs.num_jobs == 1
    assert len(choice["prompt_logprobs"]) == LONG and choice["prompt_logprobs"][0] is None
    assert all(entry["3"]["logprob"] == -0.5 and len(entry) == 5 for entry in choice["prompt_logprobs"][1:])
    lists = choice["logprobs"]
    assert {len(lists[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")} == {LONG + 2}


# -- the bytes of all bodies -------------------------------------------------------------------------------------------


def test_a_tenant_s_bodies_take_half_of_the_budget_at_most_and_all_of_them_no_more_than_it() -> None:
    budget = BodyBudget(1000)
    first, second, third = (HeldBody(budget, Caller(tenant)) for tenant in ("a", "b", "c"))
    first.add(500)
    with pytest.raises(QueueFull, match=r"tenant 'a' .* have 500 bytes in total; at most 500 are allowed"):
        HeldBody(budget, Caller("a")).add(1)
    second.add(450)
    with pytest.raises(Overloaded, match=r"all requests .* have 950 bytes in total; at most 1000 are allowed"):
        third.add(51)
    first.end()
    third.add(51)
    second.end()
    third.end()
    HeldBody(budget, Caller("a")).add(500)


async def test_bodies_under_way_hold_up_others_of_the_same_caller_only_until_they_are_answered(
    http: httpx.AsyncClient, front: AppState, engine: Any
) -> None:
    body = {"prompt": "a" * 200, "max_tokens": 2}
    size = len(json.dumps(body))
    front.body_budget = BodyBudget(2 * size + 40)
    engine.hold_after = 0
    held = asyncio.create_task(http.post("/v1/completions", json=body))
    while not engine.running:  # noqa: ASYNC110  nothing announces it
        await asyncio.sleep(0.01)
    refused = await http.post("/v1/completions", json=body)
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (429, "queue_full")
    assert "clients without a key" in error["message"] and str(size + 20) in error["message"]
    assert int(refused.headers["retry-after"]) >= 1
    held.cancel()
    while engine.running:  # noqa: ASYNC110  nothing announces it
        await asyncio.sleep(0.01)
    engine.hold_after = None
    while (answer := await http.post("/v1/completions", json=body)).status_code == 429:  # noqa: ASYNC110  nothing announces it
        await asyncio.sleep(0.01)
    assert answer.status_code == 200, "the body of a request whose client left counts no more"


WHOLE: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a", "n": 2, "logprobs": 20},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "n": 2, "logprobs": True},
    "/v1/responses": {"input": "a", "include": ["message.output_text.logprobs"], "top_logprobs": 20},
    "/generate": {"text": "a", "return_logprob": True, "top_logprobs_num": 20},
}


AMOUNTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"max_tokens": 200},
    "/generate": {"sampling_params": {"max_new_tokens": 200}},
}


@pytest.mark.parametrize("path", WHOLE)
async def test_a_whole_answer_is_counted_while_it_grows(
    http: httpx.AsyncClient, front: AppState, engine: Any, path: str
) -> None:
    engine.answer = lambda _: "a" * 200
    amount = AMOUNTS.get(path, {})
    front.body_budget = BodyBudget(1250)
    answer = await http.post(path, json=WHOLE[path] | amount)
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
    assert "whole answers of the requests of" in answer.json()["error"]["message"]
    assert not engine.running
    front.body_budget = BodyBudget(64 << 20)
    answer = await http.post(path, json=WHOLE[path] | amount)
    assert answer.status_code == 200, "what a refused answer had so far counts no more"


async def test_the_logprobs_of_a_request_s_answers_are_bounded_together(
    http: httpx.AsyncClient, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "MAX_ANSWER_LOGPROBS", 500)
    engine.answer = lambda _: "a" * 100
    body = {"prompt": "a", "max_tokens": 200, "logprobs": 1, "n": 3}
    refused = await http.post("/v1/completions", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "logprobs")
    assert "more than 500 logprobs" in refused.json()["error"]["message"]
    assert (await http.post("/v1/completions", json=body | {"n": 2})).status_code == 200
