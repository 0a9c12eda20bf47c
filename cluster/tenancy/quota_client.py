"""A replica's side of the quotas: asks the directory for every request of a caller with limits, and tells it what has
ended.

One call is under way at a time and takes along all that came meanwhile, so a busy replica asks no more often than the
directory answers. Callers without limits ask for nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from lorafleet.cluster.tenancy.key_file import RateLimits
from lorafleet.cluster.tenancy.key_ring import KeyRing
from lorafleet.cluster.tenancy.quota_book import Ask, Limits, Meter, Verdict
from lorafleet.workers.errors import QuotaExceeded
from lorafleet.workers.openai.caller import Caller

GATHER_S = 0.05  # what ended is told so late at most, where no request comes by

Admit = Callable[[list[Ask], dict[str, int], dict[str, int]], Awaitable[list[Verdict]]]

logger = logging.getLogger("lorafleet.cluster")

_REMEDIES = {
    "requests_per_minute": "Send fewer requests, or ask the operator for more.",
    "tokens_per_minute": "Send fewer tokens, or ask the operator for more.",
    "max_concurrent": "Wait for one of them to end, or ask the operator for more.",
}


@dataclass(slots=True)
class _Admission:
    """See workers/openai/admission.py."""

    headers: dict[str, str]
    end: Callable[[], None]


class QuotaClient:
    """admit: QuotaBook's, wherever it is, for this replica."""

    def __init__(self, keys: KeyRing, admit: Admit) -> None:
        self._keys = keys
        self._admit = admit
        self._asks: list[tuple[Ask, asyncio.Future[Verdict]]] = []
        self._charges: Counter[str] = Counter()
        self._running: Counter[str] = Counter()
        self._untold = False
        self._asked = asyncio.Event()  # a request waits for the answer
        self._asking: asyncio.Task[None] | None = None

    async def admit(self, caller: Caller, num_prompt_tokens: int) -> _Admission | None:
        subjects = self._subjects(caller)
        if not subjects:
            return None
        answer: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        self._asks.append((Ask(subjects, num_prompt_tokens), answer))
        self._ask_soon()
        verdict = await answer
        headers = _headers(verdict)
        if verdict.refused_by:
            raise QuotaExceeded(_in_words(verdict), None, verdict.retry_after_s or 60.0, headers)
        return _Admission(headers, lambda: self._end(subjects))

    def charge(self, caller: Caller, num_tokens: int) -> None:
        for subject in self._subjects(caller):
            self._charges[subject] += num_tokens
            self._ask_soon()

    def _subjects(self, caller: Caller) -> dict[str, Limits]:
        entry = self._keys.entries.get(caller.key_id)
        found = {
            f"tenant {caller.tenant!r}": self._keys.tenant(caller.tenant).limits,
            f"API key {caller.key_id!r}": RateLimits() if entry is None else entry.limits,
        }
        return {
            subject: Limits(one.requests_per_minute, one.tokens_per_minute, one.max_concurrent)
            for subject, one in found.items()
            if one.limits_anything
        }

    def _end(self, subjects: dict[str, Limits]) -> None:
        self._running -= Counter(dict.fromkeys(subjects, 1))
        self._ask_soon()

    def _ask_soon(self) -> None:
        self._untold = True
        if self._asks:
            self._asked.set()
        if self._asking is None or self._asking.done():
            self._asking = asyncio.get_running_loop().create_task(self._ask())

    async def _ask(self) -> None:
        while self._untold:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._asked.wait(), GATHER_S)
            self._asked.clear()
            self._untold = False
            asks, self._asks = self._asks, []
            charges, self._charges = self._charges, Counter()
            try:
                verdicts = await self._admit([ask for ask, _ in asks], dict(charges), dict(self._running))
            except Exception as error:
                logger.warning("quotas cannot be asked for: %r", error)
                self._charges.update(charges)
                for _, answer in asks:
                    if not answer.done():
                        answer.set_exception(error)
                self._untold = bool(self._asks)
                continue
            for (ask, answer), verdict in zip(asks, verdicts, strict=True):
                self._deliver(ask, answer, verdict)

    def _deliver(self, ask: Ask, answer: asyncio.Future[Verdict], verdict: Verdict) -> None:
        gone = answer.done()  # the client has left
        if not verdict.refused_by and not gone:
            self._running.update(dict.fromkeys(ask.subjects, 1))
        if not gone:
            answer.set_result(verdict)
        elif not verdict.refused_by:
            self._charges.subtract(dict.fromkeys(ask.subjects, ask.num_tokens))
            self._untold = True


def _in_words(verdict: Verdict) -> str:
    bound = f"{verdict.refused_by}={verdict.limit}"
    subject = verdict.subject[0].upper() + verdict.subject[1:]
    if verdict.refused_by == "max_concurrent":
        said = f"{subject} would run {verdict.value} requests at a time; its limit is {bound}."
    elif verdict.retry_after_s is None:
        return (
            f"The prompt has {verdict.value} tokens, and {verdict.subject} may use {bound} at most: it can never be "
            "admitted. Shorten it, or ask the operator for more."
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


def _shown(meter: Meter) -> dict[str, str]:
    minutes, seconds = divmod(meter.reset_s, 60)
    reset = f"{int(minutes)}m{seconds:.3g}s" if minutes else f"{seconds:.3g}s"
    return {"limit": str(meter.limit), "remaining": str(meter.remaining), "reset": reset}
