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

import msgspec

from lorafleet.api.access.caller import Caller
from lorafleet.api.access.caller_admission import Kind
from lorafleet.cluster.tenancy.key_file import RateLimits
from lorafleet.cluster.tenancy.key_ring import KeyRing
from lorafleet.cluster.tenancy.quota_book import Ask, LimitMeter, Limits, QuotaBook, Verdict
from lorafleet.protocol.errors import DirectoryUnavailable, QuotaExceeded

GATHER_S = 0.05  # Seconds until ended requests are reported at the latest, if no new one comes.
ANSWER_S = 1.0  # Seconds that a request waits for the directory before this replica decides by itself.
PROBE_S = 0.5  # Seconds between two calls to a directory that does not answer.

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
class _Spent:
    """A bucket without a whole request in it. Until it has one again, the directory need not be asked."""

    limits: Limits
    verdict: Verdict
    until_s: float

    def after(self, wait_s: float) -> Verdict:
        """Returns the verdict as it is when wait_s of the wait are left."""
        waited_s = (self.verdict.retry_after_s or 0.0) - wait_s
        meter = self.verdict.requests
        requests = None if meter is None else LimitMeter(meter.limit, 0, max(0.0, meter.reset_s - waited_s))
        return msgspec.structs.replace(self.verdict, retry_after_s=wait_s, requests=requests, tokens=None)


@dataclass(frozen=True, slots=True)
class ReplicaPlace:
    """The place of a replica among those that share limits while the directory does not answer."""

    num_replicas: int
    index: int

    def share(self, subject: str, limits: Limits) -> Limits:
        """Returns this replica's share of the limits. All replicas' shares together are the limits. Raises
        DirectoryUnavailable if the share of a limit is nothing."""
        return Limits(
            self._part(subject, limits.requests_per_minute),
            self._part(subject, limits.tokens_per_minute),
            self._part(subject, limits.max_concurrent),
        )

    def _part(self, subject: str, limit: int | None) -> int | None:
        if limit is None:
            return None
        part, rest = divmod(limit, self.num_replicas)
        part += self.index < rest
        if not part:
            raise DirectoryUnavailable(
                f"The adapter directory, which enforces the limits of {subject}, does not answer. Until it does, "
                f"{self.num_replicas} replicas share the limit of {limit}, and this replica's share is 0. Try again in "
                "a moment."
            )
        return part


class QuotaClient:
    """The quotas of one replica. `admit` calls QuotaBook.admit for this replica, wherever the book is."""

    def __init__(
        self,
        keys: KeyRing,
        admit: Admit,
        clock: Callable[[], float] = time.monotonic,
        answer_s: float = ANSWER_S,
        probe_s: float = PROBE_S,
    ) -> None:
        self._keys = keys
        self._admit = admit
        self._clock = clock
        self._answer_s, self._probe_s = answer_s, probe_s
        self._asks: list[tuple[Ask, asyncio.Future[Verdict]]] = []
        self._totals: Counter[str] = Counter()  # Tokens charged to each subject that ever existed.
        self._unreported: set[str] = set()  # Subjects whose totals the directory does not know.
        self._running: Counter[str] = Counter()
        self._has_news = False
        self._asked = asyncio.Event()  # Set while a request waits for an answer.
        self._asking: asyncio.Task[None] | None = None
        self._spent: dict[str, _Spent] = {}
        self._place: ReplicaPlace | None = None  # The directory's last report; None before the first one.
        self._is_alone = False  # True while the directory does not answer.
        self._own_book = QuotaBook(lambda: (), clock)  # Used while this replica is alone.

    async def admit_request(self, caller: Caller, kind: Kind) -> _Admission | None:
        subjects = self._subjects(caller, kind)
        if not subjects:
            return None
        self._check_spent(subjects)
        counts_tokens = kind == "auxiliary" and self._counts_auxiliary(caller)
        ask = Ask(subjects, num_tokens=int(counts_tokens), num_running=0)
        verdict = await self._verdict(ask)
        if verdict.refused_by == "requests_per_minute" and verdict.retry_after_s is not None and not self._is_alone:
            until_s = self._clock() + verdict.retry_after_s
            self._spent[verdict.subject] = _Spent(subjects[verdict.subject], verdict, until_s)
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
            self._own_book.charge(subject, num_tokens)
            return
        self._totals[subject] += num_tokens
        self._unreported.add(subject)
        self._ask_soon()

    def _subjects(self, caller: Caller, kind: Kind = "generation") -> dict[str, Limits]:
        entry = self._keys.entries.get(caller.key_id)
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
        entry = self._keys.entries.get(caller.key_id)
        return self._keys.tenant(caller.tenant).limits.count_auxiliary_tokens or (
            entry is not None and entry.limits.count_auxiliary_tokens
        )

    def _check_spent(self, subjects: dict[str, Limits]) -> None:
        """Raises QuotaExceeded while a bucket is spent, so that a client that sends in a loop costs the directory
        nothing."""
        for subject, limits in subjects.items():
            spent = self._spent.get(subject)
            if spent is None:
                continue
            wait_s = spent.until_s - self._clock()
            if wait_s > 0 and spent.limits == limits:
                _accepted(spent.after(wait_s))
            del self._spent[subject]

    async def _verdict(self, ask: Ask) -> Verdict:
        if self._is_alone:
            return self._decide_alone(ask)
        answer: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        self._asks.append((ask, answer))
        self._ask_soon()
        try:
            return await asyncio.wait_for(answer, self._answer_s)
        except TimeoutError:
            return self._decide_alone(ask)

    def _decide_alone(self, ask: Ask) -> Verdict:
        """Decides with this replica's share of each limit, so that all replicas together admit no more than the
        limit. Raises DirectoryUnavailable if the share is not known, or is nothing."""
        if self._place is None:
            raise DirectoryUnavailable(
                "The adapter directory, which enforces the limits of your key and tenant, does not answer, and this "
                "replica does not know how many replicas share them. Try again in a moment."
            )
        shares = {subject: self._place.share(subject, limits) for subject, limits in ask.subjects.items()}
        [verdict] = self._own_book.admit(
            "", [msgspec.structs.replace(ask, subjects=shares)], {}, {name: self._running[name] for name in shares}
        )
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
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._asked.wait(), self._probe_s if self._is_alone else GATHER_S)
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
                    self._answer_s,
                )
            except Exception as error:
                self._go_on_alone(asks, unreported, error)
                continue
            if self._is_alone:
                logger.info("quotas: the directory answers again")
            self._is_alone = False
            for (ask, answer), verdict in zip(asks, verdicts, strict=True):
                self._place = ReplicaPlace(verdict.num_replicas, verdict.replica_index)
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
