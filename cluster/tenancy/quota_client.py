"""Implements a replica's side of the quotas: it asks the directory for every request of a caller with limits, and
reports what has ended.

Only one call is in flight at a time. It carries everything that came meanwhile, so a busy replica asks no more often
than the directory answers. Callers without limits cause no calls. While the directory does not answer, the replica
decides by itself, with its share of each limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from lorafleet.api.access.caller import Caller
from lorafleet.api.access.caller_admission import Kind
from lorafleet.cluster.tenancy.key_file import RateLimits
from lorafleet.cluster.tenancy.key_ring import KeyRing
from lorafleet.cluster.tenancy.quota_book import Ask, LimitMeter, Limits, Verdict
from lorafleet.cluster.tenancy.quota_share import QuotaShare, ReplicaPlace
from lorafleet.cluster.tenancy.spent_buckets import SpentBuckets
from lorafleet.protocol.errors import DirectoryUnavailable, QuotaExceeded

Admit = Callable[[list[Ask], dict[str, int], dict[str, int]], Awaitable[list[Verdict]]]

logger = logging.getLogger("lorafleet.cluster")

_REMEDIES = {
    "requests_per_minute": "Send fewer requests, or ask the operator to raise the limit.",
    "tokens_per_minute": "Send fewer tokens, or ask the operator to raise the limit.",
    "max_concurrent": "Wait for some of them to end, or ask the operator to raise the limit.",
}


@dataclass(slots=True)
class _Admission:
    """An admitted request; see api/access/caller_admission.py."""

    headers: Mapping[str, str]
    end: Callable[[], None]
    give_back: Callable[[str], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class QuotaTiming:
    """The waits of a replica's quotas, in seconds."""

    gather_s: float = 0.05  # Ended requests are reported after this time at the latest, if no new one comes.
    answer_s: float = 1.0  # A request waits so long for the directory before this replica decides by itself.
    probe_s: float = 0.5  # Pause between two calls to a directory that does not answer.


QUOTA_TIMING = QuotaTiming()


class QuotaClient:
    """The quotas of one replica. `admit` calls QuotaBook.admit for this replica, wherever the book is."""

    def __init__(
        self,
        keys: KeyRing,
        admit: Admit,
        timing: QuotaTiming = QUOTA_TIMING,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._keys = keys
        self._admit = admit
        self._timing = timing
        self._asks: list[tuple[Ask, asyncio.Future[Verdict]]] = []
        self._totals: Counter[str] = Counter()  # Tokens charged to each subject that ever existed.
        self._unreported: set[str] = set()  # Subjects whose totals the directory does not know.
        self._running: Counter[str] = Counter()
        self._has_news = False
        self._asked = asyncio.Event()  # Set while a request waits for an answer.
        self._asking: asyncio.Task[None] | None = None
        self._spent = SpentBuckets(clock)
        self._is_alone = False  # True while the directory does not answer.
        self._share = QuotaShare(clock)  # Used while this replica is alone.

    async def admit_request(self, caller: Caller, kind: Kind) -> _Admission | None:
        subjects = self._subjects(caller, kind)
        if not subjects:
            return None
        spent = self._spent.verdict(subjects)
        if spent is not None:
            _accepted(spent)
        counts_tokens = kind == "auxiliary" and self._counts_auxiliary(caller)
        ask = Ask(subjects, num_tokens=int(counts_tokens), num_running=0)
        verdict = await self._verdict(ask)
        if not self._is_alone:
            self._spent.record(subjects, verdict)
        return self._admission(ask, verdict)

    async def admit_sequences(self, caller: Caller, num_sequences: int, num_prompt_tokens: int) -> _Admission | None:
        subjects = self._subjects(caller)
        if not subjects:
            return None
        ask = Ask(subjects, num_prompt_tokens, num_requests=num_sequences - 1, num_running=num_sequences)
        return self._admission(ask, await self._verdict(ask))

    def _admission(self, ask: Ask, verdict: Verdict) -> _Admission:
        """Returns the admission that a verdict gives. Raises QuotaExceeded if the request is rejected."""
        return _Admission(_accepted(verdict), lambda: self._end(ask), lambda retry_id: self._give_back(ask, retry_id))

    async def _give_back(self, ask: Ask, retry_id: str) -> None:
        """Ends the request and returns its charge. A replica that is alone keeps the charge, since it cannot know
        what another replica charges."""
        self._end(ask)
        if not self._is_alone:
            negative = Ask(ask.subjects, -ask.num_tokens, -ask.num_requests, num_running=0, once=retry_id)
            with contextlib.suppress(DirectoryUnavailable):
                await self._verdict(negative)

    def charge(self, caller: Caller, num_tokens: int) -> None:
        for subject in self._subjects(caller):
            self._charge(subject, num_tokens)

    def charge_auxiliary(self, caller: Caller, num_tokens: int) -> None:
        if self._counts_auxiliary(caller):
            self.charge(caller, num_tokens)

    def _charge(self, subject: str, num_tokens: int) -> None:
        if self._is_alone:
            self._share.charge(subject, num_tokens)
            return
        self._totals[subject] += num_tokens
        self._unreported.add(subject)
        self._ask_soon()

    def _subjects(self, caller: Caller, kind: Kind = "generation") -> dict[str, Limits]:
        entry = self._keys.entries.get(caller.key_mark)
        found = {
            f"tenant {caller.tenant!r}": self._keys.tenant(caller.tenant).limits,
            f"API key {caller.key_id!r}": RateLimits() if entry is None else entry.limits,
        }
        if kind == "administration":
            return {
                f"administration of {subject}": Limits(limits.requests_per_minute)
                for subject, limits in found.items()
                if limits.requests_per_minute is not None
            }
        return {
            subject: Limits(limits.requests_per_minute, limits.tokens_per_minute, limits.max_concurrent)
            for subject, limits in found.items()
            if limits.limits_anything
        }

    def _counts_auxiliary(self, caller: Caller) -> bool:
        entry = self._keys.entries.get(caller.key_mark)
        return self._keys.tenant(caller.tenant).limits.count_auxiliary_tokens or (
            entry is not None and entry.limits.count_auxiliary_tokens
        )

    async def _verdict(self, ask: Ask) -> Verdict:
        if self._is_alone:
            return self._decide_alone(ask)
        answer: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        self._asks.append((ask, answer))
        self._ask_soon()
        try:
            return await asyncio.wait_for(answer, self._timing.answer_s)
        except TimeoutError:
            return self._decide_alone(ask)

    def _decide_alone(self, ask: Ask) -> Verdict:
        """Decides with this replica's share of each limit. Raises DirectoryUnavailable."""
        verdict = self._share.decide(ask, self._running)
        if not verdict.refused_by:
            self._run(ask)
        return verdict

    def _run(self, ask: Ask) -> None:
        for subject in ask.subjects if ask.num_running else ():
            self._running[subject] += ask.num_running

    def _end(self, ask: Ask) -> None:
        if not ask.num_running:
            return
        for subject in ask.subjects:
            self._running[subject] -= ask.num_running
            if self._running[subject] <= 0:
                del self._running[subject]
        self._ask_soon()

    def _ask_soon(self) -> None:
        self._has_news = True
        if self._asks:
            self._asked.set()
        if self._asking is None or self._asking.done():
            self._asking = asyncio.get_running_loop().create_task(self._ask())

    async def _ask(self) -> None:
        while self._has_news:
            pause_s = self._timing.probe_s if self._is_alone else self._timing.gather_s
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._asked.wait(), pause_s)
            self._asked.clear()
            self._has_news = False
            asks, self._asks = self._asks, []
            unreported, self._unreported = self._unreported, set()
            subjects = unreported.union(*(ask.subjects for ask, _ in asks))
            try:
                verdicts = await asyncio.wait_for(
                    self._admit(
                        [ask for ask, _ in asks],
                        {subject: self._totals[subject] for subject in subjects},
                        dict(self._running),
                    ),
                    self._timing.answer_s,
                )
            except Exception as error:
                self._go_on_alone(asks, unreported, error)
                continue
            if self._is_alone:
                logger.info("quotas: the directory answers again")
            self._is_alone = False
            for (ask, answer), verdict in zip(asks, verdicts, strict=True):
                self._share.place = ReplicaPlace(verdict.num_replicas, verdict.replica_index)
                self._deliver(ask, answer, verdict)

    def _go_on_alone(
        self, asks: list[tuple[Ask, asyncio.Future[Verdict]]], unreported: set[str], error: Exception
    ) -> None:
        if not self._is_alone:
            logger.warning(
                "quotas: the directory does not answer, so this replica uses its share of the limits: %r", error
            )
        self._is_alone, self._has_news = True, True
        self._unreported |= unreported
        waiting, self._asks = [*asks, *self._asks], []
        for ask, answer in waiting:
            if answer.done():
                continue
            try:
                answer.set_result(self._decide_alone(ask))
            except DirectoryUnavailable as unavailable:
                answer.set_exception(unavailable)

    def _deliver(self, ask: Ask, answer: asyncio.Future[Verdict], verdict: Verdict) -> None:
        gone = answer.done()  # The client has disconnected, or this replica has decided by itself.
        if not gone:
            answer.set_result(verdict)
        if verdict.refused_by:
            return
        if not gone:
            self._run(ask)
            return
        for subject in ask.subjects:
            self._charge(subject, -ask.num_tokens)


def _accepted(verdict: Verdict) -> dict[str, str]:
    """Returns the headers of the answer. Raises QuotaExceeded if the request is rejected."""
    headers = _headers(verdict)
    if verdict.refused_by:
        raise QuotaExceeded(_in_words(verdict), None, verdict.retry_after_s, headers)
    return headers


def _in_words(verdict: Verdict) -> str:
    bound = f"{verdict.refused_by}={verdict.limit}"
    subject = verdict.subject[0].upper() + verdict.subject[1:]
    if verdict.refused_by == "max_concurrent":
        said = f"{subject} would run {verdict.value} sequences at a time; its limit is {bound}."
    elif verdict.retry_after_s is None:
        wanted = "prompts have" if verdict.refused_by == "tokens_per_minute" else "request counts as"
        unit = "tokens" if verdict.refused_by == "tokens_per_minute" else "requests in addition to the first"
        return (
            f"The {wanted} {verdict.value} {unit}, but {verdict.subject} may use at most {bound}, so the request can "
            "never be admitted. Send a smaller request, or ask the operator to raise the limit."
        )
    else:
        said = f"{subject} has used up its limit of {bound}; try again in {math.ceil(verdict.retry_after_s)} s."
    return f"{said} {_REMEDIES[verdict.refused_by]}"


def _headers(verdict: Verdict) -> dict[str, str]:
    meters = {"requests": verdict.requests, "tokens": verdict.tokens}
    return {
        f"x-ratelimit-{what}-{kind}": value
        for kind, meter in meters.items()
        if meter is not None
        for what, value in _shown(meter).items()
    }


def _shown(meter: LimitMeter) -> dict[str, str]:
    minutes, seconds = divmod(meter.reset_s, 60)
    reset = f"{int(minutes)}m{seconds:.3g}s" if minutes else f"{seconds:.3g}s"
    return {"limit": str(meter.limit), "remaining": str(meter.remaining), "reset": reset}
