"""What tenants and keys may ask for counts over all replicas; who is over it hears which bound, and for how long."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from lorafleet.cluster.tenancy.quota_book import Ask, Limits, QuotaBook, Verdict
from tests.cluster.tenancy.house import PROMPT, House


class Book:
    """Of two replicas, and a clock that is set."""

    def __init__(self, **limits: int) -> None:
        self.now_s = 0.0
        self.live = ["r1", "r2"]
        self.book = QuotaBook(lambda: self.live, lambda: self.now_s)
        self.limits = Limits(**limits)
        self.running = {"r1": 0, "r2": 0}

    def ask(self, replica: str = "r1", num_tokens: int = 1, charge: int = 0) -> Verdict:
        subjects = {"acme": self.limits}
        [verdict] = self.book.admit(
            replica, [Ask(subjects, num_tokens)], {"acme": charge}, {"acme": self.running[replica]}
        )
        self.running[replica] += not verdict.refused_by
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
    house.limits = {"acme": {"tokens_per_minute": 900}}
    async with house.open():
        house.directory._quotas._clock = lambda: 0.0  # however long the requests take
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
        for caller in ("rival", "public"):
            free = await house.complete(caller, "base")
            assert free.status_code == 200 and "x-ratelimit-limit-requests" not in free.headers
        too_long = await house.complete("acme", "base", prompt=[7] * 901)
        assert too_long.status_code == 400 or "it can never be admitted" in too_long.json()["error"]["message"]


async def admitted_again(house: House) -> None:
    while (await house.complete("acme", "base", max_tokens=1)).status_code != 200:
        pass


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
        assert "would run 2 requests at a time; its limit is max_concurrent=1." in refused.json()["error"]["message"]
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
        assert house.tenancy.quotas is not None
        asked, may_answer, admit = asyncio.Event(), asyncio.Event(), house.tenancy.quotas._admit

        async def slow(*arguments: Any) -> list[Verdict]:
            asked.set()
            await may_answer.wait()
            if fault:
                raise ConnectionError("the directory is being restarted")
            return await admit(*arguments)

        house.tenancy.quotas._admit = slow
        leaving = asyncio.create_task(house.complete("acme", "base"))
        await asked.wait()
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        house.tenancy.quotas._admit = admit
        may_answer.set()
        await admitted_again(house)
