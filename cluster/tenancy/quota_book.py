"""Counts for the whole cluster what tenants and keys use. Each has a token bucket for requests and one for tokens,
which fill evenly and hold a minute's worth, and a count of the sequences that run on each replica. This is plain
arithmetic in the directory's process. Replicas ask with every request (quota_client.py), so nothing is admitted
twice.

Answers are charged once they exist, so a bucket may fall below zero, and nothing is admitted until it has filled
again. Over any number of minutes, the tokens are at most the limit, a full bucket, and the answers that were in
flight.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

import msgspec

from lorafleet.protocol.lru_cache import LRUCache

MAX_COUNTED = 10_000  # Stored `once` texts, which are of requests that two replicas reject.


class Limits(msgspec.Struct, frozen=True):
    """The limits of one subject. None means that there is no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent: int | None = None


class Ask(msgspec.Struct, frozen=True):
    """The use that a request asks for, and all subjects that it counts for: a tenant, a key."""

    subjects: dict[str, Limits]
    num_tokens: int = 0  # Tokens of its prompts.
    num_requests: int = 1  # Counts against requests_per_minute.
    num_running: int = 1  # Sequences that run from now on; counts against max_concurrent.
    once: str = ""  # If several asks have the same text here, only the first counts.


class LimitMeter(msgspec.Struct, frozen=True):
    """The remainder of one limit, for OpenAI's headers."""

    limit: int
    remaining: int
    reset_s: float  # Seconds until all of it is available again.


class Verdict(msgspec.Struct, frozen=True):
    refused_by: str = ""  # A field of Limits; "" if the request is admitted.
    subject: str = ""  # The owner of that limit.
    limit: int = 0
    value: int = 0  # The use of it that the request would lead to.
    retry_after_s: float | None = None  # Seconds; None if waiting does not help.
    requests: LimitMeter | None = None  # For the subject that has the least left.
    tokens: LimitMeter | None = None
    num_replicas: int = 0  # Including the replica that asks.
    replica_index: int = 0  # Index of the replica that asks among them, in the order of their ids.


class _Bucket:
    def __init__(self, limit: int, now_s: float) -> None:
        self.limit = limit
        self.level = float(limit)
        self._filled_s = now_s

    def fill(self, limit: int, now_s: float) -> None:
        if limit != self.limit:  # The operator has changed it; what was used stays used.
            self.level += limit - self.limit
            self.limit = limit
        self.level = min(limit, self.level + (now_s - self._filled_s) * limit / 60)
        self._filled_s = now_s

    def wait_s(self, level: float) -> float:
        return max(0.0, (level - self.level) * 60 / self.limit)

    def meter(self) -> LimitMeter:
        return LimitMeter(self.limit, max(0, int(self.level)), self.wait_s(self.limit))


class QuotaBook:
    """The counts of the whole cluster. `live` returns the replicas whose running requests count."""

    def __init__(self, live: Callable[[], Iterable[str]], clock: Callable[[], float] = time.monotonic) -> None:
        self._live = live
        self._clock = clock
        self._requests: dict[str, _Bucket] = {}
        self._tokens: dict[str, _Bucket] = {}
        self._running: dict[str, dict[str, int]] = {}  # By replica and subject.
        self._counted: LRUCache[str, None] = LRUCache(MAX_COUNTED)  # The latest `once` texts.
        self._charged: dict[str, dict[str, int]] = {}  # The totals that each replica sent last, by subject.

    def admit(
        self, replica_id: str, asks: Sequence[Ask], totals: dict[str, int], running: dict[str, int]
    ) -> list[Verdict]:
        """Returns a verdict on each ask of a replica.

        Args:
            totals: Tokens that the replica has ever charged to each subject, besides those of its asks. They are
                totals, so that a repeated call charges nothing twice.
            running: The replica's sequences that run now, by subject, without those that it asks for.
        """
        alive = {replica_id, *self._live()}
        for by_replica in (self._running, self._charged):
            for gone in by_replica.keys() - alive:
                del by_replica[gone]
        self._running[replica_id] = dict(running)
        charged = self._charged.setdefault(replica_id, {})
        for subject, total in totals.items():
            # Tokens that a replica charged before this process knew of it are not charged here.
            self.charge(subject, total - charged.get(subject, total))
            charged[subject] = total
        index = sum(other < replica_id for other in alive)
        return [
            msgspec.structs.replace(self._verdict(replica_id, ask), num_replicas=len(alive), replica_index=index)
            for ask in asks
        ]

    def charge(self, subject: str, num_tokens: int) -> None:
        if subject in self._tokens:
            self._tokens[subject].level -= num_tokens

    def _verdict(self, replica_id: str, ask: Ask) -> Verdict:
        if ask.once and not self._is_first(ask.once):
            return Verdict()
        now_s = self._clock()
        for subject, limits in ask.subjects.items():
            self._fill(self._requests, subject, limits.requests_per_minute, now_s)
            self._fill(self._tokens, subject, limits.tokens_per_minute, now_s)
        refusals = (self._refusal(subject, limits, ask) for subject, limits in ask.subjects.items())
        refused = [refusal for refusal in refusals if refusal]
        if not refused:
            mine = self._running[replica_id]
            for subject in ask.subjects:
                mine[subject] = mine.get(subject, 0) + ask.num_running
                if subject in self._requests:
                    self._requests[subject].level -= ask.num_requests
                if subject in self._tokens:
                    self._tokens[subject].level -= ask.num_tokens
        verdict = refused[0] if refused else Verdict()
        return msgspec.structs.replace(
            verdict, requests=_least(self._requests, ask.subjects), tokens=_least(self._tokens, ask.subjects)
        )

    def _is_first(self, once: str) -> bool:
        if once in self._counted:
            return False
        self._counted.put(once, None)
        return True

    def _fill(self, buckets: dict[str, _Bucket], subject: str, limit: int | None, now_s: float) -> None:
        if limit is None:
            buckets.pop(subject, None)
        else:
            buckets.setdefault(subject, _Bucket(limit, now_s)).fill(limit, now_s)

    def _refusal(self, subject: str, limits: Limits, ask: Ask) -> Verdict | None:
        return (
            self._too_many_running(subject, limits.max_concurrent, ask.num_running)
            or _too_much("requests_per_minute", subject, self._requests.get(subject), ask.num_requests)
            or _too_much("tokens_per_minute", subject, self._tokens.get(subject), ask.num_tokens)
        )

    def _too_many_running(self, subject: str, limit: int | None, num_more: int) -> Verdict | None:
        if limit is None or not num_more:
            return None
        running = sum(replica.get(subject, 0) for replica in self._running.values())
        if running + num_more <= limit:
            return None
        return Verdict("max_concurrent", subject, limit, running + num_more, None if num_more > limit else 1.0)


def _too_much(what: str, subject: str, bucket: _Bucket | None, wanted: int) -> Verdict | None:
    if bucket is None or wanted <= 0 or bucket.level >= wanted:
        return None
    return Verdict(what, subject, bucket.limit, wanted, None if wanted > bucket.limit else bucket.wait_s(wanted))


def _least(buckets: dict[str, _Bucket], subjects: Iterable[str]) -> LimitMeter | None:
    meters = [buckets[subject].meter() for subject in subjects if subject in buckets]
    return min(meters, key=lambda meter: meter.remaining, default=None)
