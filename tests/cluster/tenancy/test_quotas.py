"""What tenants and keys may ask for counts over all replicas; who is over it hears which bound, and for how long."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from itertools import islice
from typing import Any

import msgspec
import pytest

from lorafleet.api.access.caller import Caller
from lorafleet.api.access.caller_admission import MAX_AUXILIARY
from lorafleet.api.answer.elsewhere import RETRY_HEADER, RETRY_STATUS
from lorafleet.api.answer.shared_run import SharedRun
from lorafleet.cluster.tenancy.key_ring import KeyRing
from lorafleet.cluster.tenancy.quota_book import Ask, Limits, QuotaBook, Verdict
from lorafleet.cluster.tenancy.quota_client import QuotaClient, QuotaTiming
from lorafleet.cluster.tenancy.quota_share import ReplicaPlace
from lorafleet.protocol.errors import DirectoryUnavailable, QueueFull
from lorafleet.protocol.messages import EngineRequest, TokenOutput
from lorafleet.protocol.transport.unread_outputs import IsStalled
from tests.cluster.tenancy.house import PROMPT, House


class Book:
    """Of two replicas, and a clock that is set."""

    def __init__(self, **limits: int) -> None:
        self.now_s = 0.0
        self.live = ["r1", "r2"]
        self.book = QuotaBook(lambda: self.live, lambda: self.now_s)
        self.limits = Limits(**limits)
        self.running = {"r1": 0, "r2": 0}
        self.totals = {"r1": 0, "r2": 0}
        for replica in self.live:
            self.book.admit(replica, [], {"acme": 0}, {})

    def ask(self, replica: str = "r1", num_tokens: int = 1, charge: int = 0, n: int = 1) -> Verdict:
        subjects = {"acme": self.limits}
        self.totals[replica] += charge
        [verdict] = self.book.admit(
            replica,
            [Ask(subjects, num_tokens, num_requests=n, num_running=n)],
            {"acme": self.totals[replica]},
            {"acme": self.running[replica]},
        )
        self.running[replica] += 0 if verdict.refused_by else n
        return verdict


def test_requests_are_counted_over_all_replicas_and_come_back_evenly() -> None:
    book = Book(requests_per_minute=6)
    admitted = [book.ask(replica) for replica in ("r1", "r2") * 3]
    assert [one.refused_by for one in admitted] == [""] * 6
    assert [one.requests.remaining for one in admitted if one.requests] == [5, 4, 3, 2, 1, 0]
    refused = book.ask("r2")
    assert (refused.refused_by, refused.limit, refused.retry_after_s) == ("requests_per_minute", 6, 10.0)
    book.now_s = 9.9
    assert book.ask().refused_by
    book.now_s = 10.0
    assert not book.ask().refused_by and book.ask().refused_by
    book.now_s = 1000.0
    assert [bool(book.ask().refused_by) for _ in range(7)] == [False] * 6 + [True], "a minute's worth is the most"


def test_over_any_time_the_tokens_are_at_most_the_limit_a_full_bucket_and_the_answers_under_way() -> None:
    book = Book(tokens_per_minute=600)
    served = under_way = 0
    for second in range(600):
        book.now_s = float(second)
        verdict = book.ask(("r1", "r2")[second % 2], num_tokens=30, charge=under_way)
        under_way = 0
        if not verdict.refused_by:
            served, under_way = served + 30 + 50, 50  # the answer is charged with the next call
        assert served <= 600 + second * 10 + 50
    assert served >= 0.95 * 600 * 10, "and nearly all of it can be used"


def test_a_prompt_over_the_limit_is_never_admitted_and_says_so() -> None:
    refused = Book(tokens_per_minute=100).ask(num_tokens=101)
    assert refused.refused_by == "tokens_per_minute" and refused.retry_after_s is None and refused.value == 101


def test_requests_at_a_time_are_counted_where_they_run_and_go_with_a_replica_that_dies() -> None:
    book = Book(max_concurrent=2)
    assert not book.ask("r1").refused_by and not book.ask("r2").refused_by
    assert book.ask("r1").refused_by == "max_concurrent" and book.ask("r2").refused_by == "max_concurrent"
    book.running["r2"] = 0  # it says so with its next call
    assert not book.ask("r2").refused_by and book.ask("r2").refused_by
    book.live = ["r1"]
    assert not book.ask("r1").refused_by


def test_a_request_counts_as_its_sequences() -> None:
    book = Book(requests_per_minute=6, max_concurrent=4)
    assert book.ask(n=5).refused_by == "max_concurrent"
    assert book.ask(n=5).retry_after_s is None, "waiting does not help"
    assert not book.ask(n=4).refused_by
    assert (book.ask(n=1).refused_by, book.ask(n=1).retry_after_s) == ("max_concurrent", 1.0)
    book.running["r1"] = 0
    refused = book.ask(n=3)
    assert (refused.refused_by, refused.retry_after_s) == ("requests_per_minute", 10.0), "2 are left of 6"
    assert not book.ask(n=2).refused_by
    never = Book(requests_per_minute=6).ask(n=7)
    assert never.refused_by == "requests_per_minute" and never.retry_after_s is None


def test_what_a_replica_tells_twice_is_charged_once_and_a_new_book_charges_nothing_of_before() -> None:
    book = Book(tokens_per_minute=100)
    book.ask(num_tokens=1)
    for _ in range(3):  # a call whose answer was lost is repeated with the same totals
        book.book.admit("r1", [], {"acme": 20}, {})
    left = book.ask(num_tokens=1, charge=20).tokens
    assert left is not None and left.remaining == 100 - 1 - 20 - 1
    restarted = QuotaBook(lambda: book.live, lambda: 0.0)
    [verdict] = restarted.admit("r1", [Ask({"acme": book.limits}, 1)], {"acme": 5000}, {})
    assert verdict.tokens is not None and verdict.tokens.remaining == 99


def test_a_refused_request_uses_nothing_up_of_any_subject() -> None:
    book = QuotaBook(list, lambda: 0.0)
    subjects = {"tenant": Limits(requests_per_minute=5), "key": Limits(requests_per_minute=1)}
    verdicts = book.admit("r", [Ask(subjects, 1)] * 4, {}, {})
    assert [one.refused_by for one in verdicts] == ["", *["requests_per_minute"] * 3]
    assert {one.subject for one in verdicts[1:]} == {"key"}
    [other] = book.admit("r", [Ask({"tenant": subjects["tenant"]}, 1)], {}, {})
    assert other.requests is not None and other.requests.remaining == 3


def test_a_changed_limit_keeps_what_was_used() -> None:
    book = Book(requests_per_minute=10)
    for _ in range(10):
        assert not book.ask().refused_by
    book.limits = Limits(requests_per_minute=12)
    assert [bool(book.ask().refused_by) for _ in range(3)] == [False, False, True]


async def test_over_http_the_answer_says_what_is_left_and_a_refusal_which_bound_and_when(house: House) -> None:
    house.tenants = {"acme": {"limits": {"requests_per_minute": 3, "tokens_per_minute": 1000}}}
    house.limits = {"acme": {"tokens_per_minute": 900}, "public": {"tokens_per_minute": len(PROMPT) - 1}}
    async with house.open():
        house.directory.quotas._clock = lambda: 0.0  # however long the requests take
        first = await house.complete("acme", "base")
        assert first.headers["x-ratelimit-limit-requests"] == "3"
        assert first.headers["x-ratelimit-remaining-requests"] == "2"
        assert first.headers["x-ratelimit-limit-tokens"] == "900", "of the two the one with less left"
        assert first.headers["x-ratelimit-remaining-tokens"] == str(900 - len(PROMPT))
        assert first.headers["x-ratelimit-reset-requests"].endswith("s")
        streamed = await house.complete("acme", "base", stream=True)
        assert streamed.headers["x-ratelimit-remaining-requests"] == "1"
        await house.complete("acme", "base")
        refused = await house.complete("acme", "base")
        assert refused.status_code == 429 and 1 <= int(refused.headers["retry-after"]) <= 20
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        error = refused.json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        assert "Tenant 'acme' has used up its limit of requests_per_minute=3; try again in" in error["message"]
        free = await house.complete("rival", "base")
        assert free.status_code == 200 and "x-ratelimit-limit-requests" not in free.headers
        too_long = await house.complete("public", "base")
        assert too_long.status_code == 429 and "can never be admitted" in too_long.json()["error"]["message"]
        assert "retry-after" not in too_long.headers, "waiting does not help"


def test_an_ask_that_counts_once_counts_once_whichever_replica_sends_it() -> None:
    book = Book(requests_per_minute=10, tokens_per_minute=100)
    for replica in ("r1", "r2"):
        book.ask(replica, num_tokens=50)
    given_back = Ask({"acme": book.limits}, -50, -1, num_running=0, once="a request")
    for replica in ("r1", "r2", "r1"):
        [verdict] = book.book.admit(replica, [given_back], {"acme": 0}, {"acme": 0})
        assert not verdict.refused_by
    left = book.ask(num_tokens=0, n=0)
    assert left.requests and left.tokens and (left.requests.remaining, left.tokens.remaining) == (9, 50)


@pytest.mark.parametrize(("num_refusals", "status"), [(1, 200), (2, RETRY_STATUS)])
async def test_a_request_that_goes_to_another_replica_is_charged_once_whether_that_one_answers_or_not(
    house: House, num_refusals: int, status: int
) -> None:
    house.tenants = {"acme": {"limits": {"requests_per_minute": 4, "tokens_per_minute": 4000, "max_concurrent": 3}}}
    async with house.open():
        house.directory.quotas._clock = lambda: 0.0
        generate = house.engine.generate

        async def full(_: EngineRequest, _is_stalled: IsStalled) -> AsyncGenerator[TokenOutput, None]:
            raise QueueFull("The queue is full.")
            yield  # makes this a generator

        house.http.headers[RETRY_HEADER] = "the request"
        for i in range(2):  # one replica stands for both: they ask the same directory
            house.engine.generate = full if i < num_refusals else generate  # type: ignore[method-assign]
            answer = await house.complete("acme", "base", n=3, max_tokens=1)
        assert answer.status_code == status
        assert answer.headers["x-ratelimit-remaining-requests"] == "1"
        del house.http.headers[RETRY_HEADER]
        house.engine.generate = generate  # type: ignore[method-assign]
        last = await house.complete("acme", "base", max_tokens=1)
        assert (last.status_code, last.headers["x-ratelimit-remaining-requests"]) == (200, "0")


async def admitted_again(house: House) -> None:
    while (await house.complete("acme", "base", max_tokens=1)).status_code != 200:  # noqa: ASYNC110  # no event says so
        await asyncio.sleep(0.01)


async def test_requests_at_a_time_are_freed_when_they_end_or_their_client_leaves(house: House) -> None:
    house.tenants = {"acme": {"limits": {"max_concurrent": 1}}}
    async with house.open():
        generate = house.engine.generate
        held = house.hold(after=2)
        running = asyncio.create_task(house.complete("acme", "base"))
        await held.wait()
        house.engine.generate = generate  # type: ignore[method-assign]
        refused = await house.complete("acme", "base")
        assert refused.status_code == 429
        assert "would run 2 sequences at a time; its limit is max_concurrent=1." in refused.json()["error"]["message"]
        assert (await house.complete("rival", "base")).status_code == 200
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await admitted_again(house)
        await admitted_again(house)
        house.engine.fail("killed")
        while (await house.complete("acme", "base")).status_code == 429:
            pass
        assert (await house.complete("acme", "base")).status_code in (429, 503)
        assert house.tenancy.quotas is not None and not house.tenancy.quotas._running


@pytest.mark.parametrize("fault", [False, True])
async def test_a_client_that_leaves_while_it_waits_for_the_directory_holds_nothing(house: House, fault: bool) -> None:
    house.tenants = {"acme": {"limits": {"max_concurrent": 1}}}
    async with house.open():
        asked, may_answer, admit = asyncio.Event(), asyncio.Event(), house.admit

        async def slow(*arguments: Any) -> list[Verdict]:
            asked.set()
            await may_answer.wait()
            if fault:
                raise ConnectionError("the directory is being restarted")
            return await admit(*arguments)

        house.admit = slow
        leaving = asyncio.create_task(house.complete("acme", "base"))
        await asked.wait()
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        house.admit = admit
        may_answer.set()
        await admitted_again(house)


async def test_every_route_that_works_for_a_tenant_counts_and_a_loop_of_bad_requests_ends_in_429(house: House) -> None:
    house.tenants = {"acme": {"limits": {"requests_per_minute": 40}}}
    chat = {"model": "base", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    calls: list[tuple[str, str, Any, int]] = [  # and what each costs
        ("POST", "/tokenize", {"prompt": "hi"}, 1),
        ("POST", "/detokenize", {"tokens": [5]}, 1),
        ("POST", "/v1/responses/input_tokens", {"model": "base", "input": "hi"}, 1),
        ("GET", "/v1/models", None, 1),
        ("POST", "/v1/chat/completions", chat, 1),
        ("POST", "/v1/completions", {"model": "base", "prompt": ["a", "b"], "n": 3, "max_tokens": 1}, 6),
        ("POST", "/v1/embeddings", {"model": "base", "input": ["one", "two"]}, 2),
        ("POST", "/generate", {"text": "hi", "sampling_params": {"max_new_tokens": 1}}, 1),
        ("POST", "/v1/completions", {"model": "nobody", "prompt": "a"}, 1),  # 404
        ("POST", "/v1/completions", {"model": "base", "prompt": 7}, 1),  # 400
        ("POST", "/tokenize", {"oops": 7}, 1),
    ]
    async with house.open():
        house.directory.quotas._clock = lambda: 0.0
        left = 40
        for method, path, body, cost in calls:
            answer = await house.ask("acme", method, path, body)
            left -= cost
            assert answer.status_code in (200, 400, 404), answer.text
            assert answer.headers["x-ratelimit-remaining-requests"] == str(left), path
        statuses = [(await house.ask("acme", "POST", "/tokenize", {"oops": 7})).status_code for _ in range(left + 5)]
        assert statuses == [400] * left + [429] * 5
        refused = await house.ask("acme", "POST", "/v1/completions", {"model": "base", "prompt": 7})
        assert refused.status_code == 429 and 1 <= int(refused.headers["retry-after"]) <= 2
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        assert (await house.ask("acme", "GET", "/v1/adapters")).status_code == 200, "administration has its own count"
        assert (await house.complete("rival", "base")).status_code == 200


async def test_who_has_used_all_up_is_refused_without_asking_the_directory_or_reading_the_body(house: House) -> None:
    house.tenants = {"acme": {"limits": {"requests_per_minute": 1}}}
    async with house.open():
        house.directory.quotas._clock = house.clock = lambda: 0.0
        admit, num_asked = house.admit, 0

        async def counted(asks: Any, totals: Any, running: Any) -> list[Verdict]:
            nonlocal num_asked
            num_asked += len(asks)
            return await admit(asks, totals, running)

        house.admit = counted
        read: list[int] = []

        async def body() -> Any:
            read.append(1)
            yield b"{}"

        for _ in range(50):
            await house.ask("acme", "POST", "/tokenize", content=body())
        assert num_asked == 2, "one was admitted, one was refused"
        assert len(read) == 1, "that which was admitted"
        house.directory.quotas._clock = house.clock = lambda: 61.0
        assert (await house.ask("acme", "POST", "/tokenize", {"prompt": "hi"})).status_code == 200


async def test_tokens_that_are_only_counted_are_charged_where_the_limits_say_so(house: House) -> None:
    limits = {"tokens_per_minute": 100}
    house.tenants = {
        "acme": {"limits": limits | {"count_auxiliary_tokens": True}},
        "rival": {"limits": limits},
    }
    async with house.open():
        house.directory.quotas._clock = lambda: 0.0

        async def ask(caller: str, num_tokens: int) -> int:
            return (await house.ask(caller, "POST", "/detokenize", {"tokens": [5] * num_tokens})).status_code

        for caller in ("rival", "acme"):
            assert await ask(caller, 150) == 200
        async with asyncio.timeout(60):
            while await ask("acme", 1) != 429:  # noqa: ASYNC110  # what was charged is told a moment later
                await asyncio.sleep(0.02)
        assert await ask("rival", 1) == 200


async def test_auxiliary_work_and_uploads_of_one_tenant_are_bounded_also_without_limits(house: House) -> None:
    async with house.open():
        asked, may_end = asyncio.Semaphore(0), asyncio.Event()

        async def slow() -> Any:
            asked.release()
            await may_end.wait()
            yield b'{"prompt": "hi"}'

        running = [
            asyncio.create_task(house.ask("acme", "POST", "/tokenize", content=slow())) for _ in range(MAX_AUXILIARY)
        ]
        for _ in running:
            await asked.acquire()
        refused = await house.ask("acme", "POST", "/tokenize", {"prompt": "hi"})
        assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["code"] == "queue_full"
        assert (await house.ask("rival", "POST", "/tokenize", {"prompt": "hi"})).status_code == 200
        assert (await house.complete("acme", "base")).status_code == 200
        may_end.set()
        assert [answer.status_code for answer in await asyncio.gather(*running)] == [200] * MAX_AUXILIARY
        assert (await house.ask("acme", "POST", "/tokenize", {"prompt": "hi"})).status_code == 200


async def test_metrics_are_made_once_for_all_who_ask_and_one_tenant_asks_so_many_at_a_time(house: House) -> None:
    async with house.open():
        num_made, may_end, make = 0, asyncio.Event(), house.front.telemetry.metrics.render

        async def slow() -> bytes:
            nonlocal num_made
            num_made += 1
            await may_end.wait()
            return await make()

        house.front.telemetry = replace(house.front.telemetry, scrape=SharedRun(slow))
        asked = [asyncio.create_task(house.ask("acme", "GET", "/metrics")) for _ in range(MAX_AUXILIARY + 3)]
        other = asyncio.create_task(house.ask("operator", "GET", "/metrics"))
        for refused in islice(asyncio.as_completed(asked), 3):
            assert (await refused).status_code == 429
        may_end.set()
        statuses = [answer.status_code for answer in await asyncio.gather(*asked)]
        assert (statuses.count(429), statuses.count(200)) == (3, MAX_AUXILIARY)
        assert (await other).status_code == 200 and num_made == 1


class StoppedDirectory:
    """A directory that can be stopped, and that has a second replica. While it is stopped, every call times out."""

    def __init__(self, house: House) -> None:
        self.answers = True
        self._admit = house.admit
        house.admit = self

    async def __call__(self, asks: Any, totals: Any, running: Any) -> list[Verdict]:
        if not self.answers:
            raise TimeoutError
        verdicts = await self._admit(asks, totals, running)
        return [msgspec.structs.replace(verdict, num_replicas=2, replica_index=0) for verdict in verdicts]


def test_each_replica_hears_its_place_among_those_that_share_the_limits() -> None:
    book = Book(requests_per_minute=6)
    places = [(verdict.num_replicas, verdict.replica_index) for verdict in map(book.ask, ("r1", "r2"))]
    assert places == [(2, 0), (2, 1)]


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 9])
def test_the_shares_of_all_replicas_together_are_the_limit(limit: int) -> None:
    limits = Limits(limit, None, limit)
    shares = [ReplicaPlace(3, index).share("tenant 'acme'", limits) for index in range(min(3, limit))]
    assert sum(share.requests_per_minute or 0 for share in shares) == limit
    assert sum(share.max_concurrent or 0 for share in shares) == limit
    assert {share.tokens_per_minute for share in shares} == {None}
    for index in range(limit, 3):
        with pytest.raises(DirectoryUnavailable, match=f"3 replicas share the limit of {limit},"):
            ReplicaPlace(3, index).share("tenant 'acme'", limits)


async def test_a_request_does_not_wait_for_a_directory_that_never_answers(house: House) -> None:
    async def admit(*_: Any) -> list[Verdict]:
        await asyncio.Event().wait()
        return []

    house.tenants = {"acme": {"limits": {"max_concurrent": 1}}}
    quotas = QuotaClient(KeyRing(house.key_file), admit, QuotaTiming(answer_s=0.01))
    for _ in range(2):
        with pytest.raises(DirectoryUnavailable, match="does not know how many replicas share them"):
            await quotas.admit_sequences(Caller("acme", "acme"), num_sequences=1, num_prompt_tokens=1)


async def test_while_the_directory_is_silent_a_replica_goes_on_with_its_share_of_each_limit(house: House) -> None:
    house.tenants = {"acme": {"limits": {"requests_per_minute": 8, "max_concurrent": 6}}}
    async with house.open():
        house.clock = lambda: 0.0
        directory = StoppedDirectory(house)
        directory.answers = False
        unknown = await house.complete("acme", "base")
        assert unknown.status_code == 503 and "retry-after" in unknown.headers, "how many replicas there are is unknown"
        directory.answers = True
        await admitted_again(house)
        directory.answers = False
        too_many = await house.complete("acme", "base", n=4, temperature=1.0)
        assert too_many.status_code == 429 and "max_concurrent=3" in too_many.json()["error"]["message"]
        answers = [await house.complete("acme", "base") for _ in range(6)]
        statuses = [answer.status_code for answer in answers]
        assert statuses == [200] * 3 + [429] * 3, "one of its four was used by the request with n=4"
        assert answers[-1].headers["x-ratelimit-limit-requests"] == "4" and "retry-after" in answers[-1].headers
        assert (await house.complete("rival", "base")).status_code == 200
        directory.answers = True
        await admitted_again(house)  # by itself
        assert house.tenancy.quotas is not None and not house.tenancy.quotas._running
