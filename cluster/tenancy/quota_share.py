"""Decides about requests with one replica's share of each limit, while the directory does not answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from lorafleet.cluster.tenancy.quota_book import Ask, Limits, QuotaBook, Verdict
from lorafleet.protocol.errors import DirectoryUnavailable


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


class QuotaShare:
    """Enforces this replica's share of each limit, so that all replicas together admit no more than the limit."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.place: ReplicaPlace | None = None  # The directory's last report; None before the first one.
        self._book = QuotaBook(lambda: (), clock)

    def decide(self, ask: Ask, running: Counter[str]) -> Verdict:
        """Returns the verdict on a request while these sequences of each subject run. Raises DirectoryUnavailable if
        the share is not known, or is nothing."""
        if self.place is None:
            raise DirectoryUnavailable(
                "The adapter directory, which enforces the limits of your key and tenant, does not answer, and this "
                "replica does not know how many replicas share them. Try again in a moment."
            )
        shares = {subject: self.place.share(subject, limits) for subject, limits in ask.subjects.items()}
        [verdict] = self._book.admit(
            "", [msgspec.structs.replace(ask, subjects=shares)], {}, {name: running[name] for name in shares}
        )
        return verdict

    def charge(self, subject: str, num_tokens: int) -> None:
        self._book.charge(subject, num_tokens)
