"""The whole cluster's counts of what tenants and keys ask for: one token bucket for requests and one for tokens each,
filled evenly and holding a minute's worth, and how many requests run where. Plain arithmetic, in the directory's
process; replicas ask with every request (quota_client.py), so that nothing is admitted twice.

Answers are charged once they are there: a bucket may so fall below nothing, and nobody is admitted until it is filled
again. So over any minutes the tokens are at most the limit, a full bucket, and the answers that were under way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

import msgspec


class Limits(msgspec.Struct, frozen=True):
    """Of one subject. None: no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent: int | None = None


class Ask(msgspec.Struct, frozen=True):
    """One request, of all the subjects that it counts for: a tenant, a key."""

    subjects: dict[str, Limits]
    num_tokens: int  # of its prompts


class Meter(msgspec.Struct, frozen=True):
    """What is left of one limit, for OpenAI's headers. reset_s: until it is all there again."""

    limit: int
    remaining: int
    reset_s: float


class Verdict(msgspec.Struct, frozen=True):
    """refused_by: "" where the request is admitted; else the bound, a field of Limits, of subject. retry_after_s: None
    where waiting does not help. requests, tokens: of the subject that has the least left."""

    refused_by: str = ""
    subject: str = ""
    limit: int = 0
    value: int = 0
    retry_after_s: float | None = None
    requests: Meter | None = None
    tokens: Meter | None = None


class _Bucket:
    def __init__(self, limit: int, now_s: float) -> None:
        self.limit = limit
        self.level = float(limit)
        self._at_s = now_s

    def fill(self, limit: int, now_s: float) -> None:
        if limit != self.limit:  # the operator has changed it: what was used stays used
            self.level += limit - self.limit
            self.limit = limit
        self.level = min(limit, self.level + (now_s - self._at_s) * limit / 60)
        self._at_s = now_s

    def wait_s(self, level: float) -> float:
        return max(0.0, (level - self.level) * 60 / self.limit)

    def meter(self) -> Meter:
        return Meter(self.limit, max(0, int(self.level)), self.wait_s(self.limit))


class QuotaBook:
    """live: the replicas whose running requests count."""

    def __init__(self, live: Callable[[], Iterable[str]], clock: Callable[[], float] = time.monotonic) -> None:
        self._live = live
        self._clock = clock
        self._requests: dict[str, _Bucket] = {}
        self._tokens: dict[str, _Bucket] = {}
        self._running: dict[str, dict[str, int]] = {}  # by replica and subject

    def admit(
        self, replica_id: str, asks: Sequence[Ask], charges: dict[str, int], running: dict[str, int]
    ) -> list[Verdict]:
        """charges: tokens that were answered since the last call, by subject; fewer than none is given back. running:
        the replica's requests now, without those that it asks for."""
        for subject, num_tokens in charges.items():
            if subject in self._tokens:
                self._tokens[subject].level -= num_tokens
        self._running[replica_id] = dict(running)
        alive = {replica_id, *self._live()}
        for gone in self._running.keys() - alive:
            del self._running[gone]
        return [self._admit_one(replica_id, ask) for ask in asks]

    def _admit_one(self, replica_id: str, ask: Ask) -> Verdict:
        now_s = self._clock()
        for subject, limits in ask.subjects.items():
            self._fill(self._requests, subject, limits.requests_per_minute, now_s)
            self._fill(self._tokens, subject, limits.tokens_per_minute, now_s)
        refused = [one for subject, limits in ask.subjects.items() if (one := self._refusal(subject, limits, ask))]
        if not refused:
            mine = self._running[replica_id]
            for subject in ask.subjects:
                mine[subject] = mine.get(subject, 0) + 1
                if subject in self._requests:
                    self._requests[subject].level -= 1
                if subject in self._tokens:
                    self._tokens[subject].level -= ask.num_tokens
        verdict = refused[0] if refused else Verdict()
        return msgspec.structs.replace(
            verdict, requests=_least(self._requests, ask.subjects), tokens=_least(self._tokens, ask.subjects)
        )

    def _fill(self, buckets: dict[str, _Bucket], subject: str, limit: int | None, now_s: float) -> None:
        if limit is None:
            buckets.pop(subject, None)
        else:
            buckets.setdefault(subject, _Bucket(limit, now_s)).fill(limit, now_s)

    def _refusal(self, subject: str, limits: Limits, ask: Ask) -> Verdict | None:
        running = sum(replica.get(subject, 0) for replica in self._running.values())
        if limits.max_concurrent is not None and running >= limits.max_concurrent:
            return Verdict("max_concurrent", subject, limits.max_concurrent, running + 1, 1.0)
        requests, tokens = self._requests.get(subject), self._tokens.get(subject)
        if requests is not None and requests.level < 1:
            return Verdict("requests_per_minute", subject, requests.limit, 0, requests.wait_s(1))
        if tokens is None:
            return None
        if ask.num_tokens > tokens.limit:
            return Verdict("tokens_per_minute", subject, tokens.limit, ask.num_tokens)
        if tokens.level < max(1, ask.num_tokens):
            wait_s = tokens.wait_s(max(1, ask.num_tokens))
            return Verdict("tokens_per_minute", subject, tokens.limit, ask.num_tokens, wait_s)
        return None


def _least(buckets: dict[str, _Bucket], subjects: Iterable[str]) -> Meter | None:
    meters = [buckets[subject].meter() for subject in subjects if subject in buckets]
    return min(meters, key=lambda meter: meter.remaining, default=None)
