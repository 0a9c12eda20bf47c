"""Records which buckets of requests are spent, so that the directory need not be asked for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from lorafleet.cluster.tenancy.quota_book import LimitMeter, Limits, Verdict


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


class SpentBuckets:
    """Rejects requests for which the directory has no room yet, so that a client that sends in a loop costs it
    nothing."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._spent: dict[str, _Spent] = {}

    def record(self, subjects: Mapping[str, Limits], verdict: Verdict) -> None:
        """Records the directory's verdict on a request of these subjects, if it says that a bucket is spent."""
        if verdict.refused_by == "requests_per_minute" and verdict.retry_after_s is not None:
            until_s = self._clock() + verdict.retry_after_s
            self._spent[verdict.subject] = _Spent(subjects[verdict.subject], verdict, until_s)

    def verdict(self, subjects: Mapping[str, Limits]) -> Verdict | None:
        """Returns the verdict on a request of these subjects, or None if the directory must be asked."""
        for subject, limits in subjects.items():
            spent = self._spent.get(subject)
            if spent is None:
                continue
            wait_s = spent.until_s - self._clock()
            if wait_s > 0 and spent.limits == limits:
                return spent.after(wait_s)
            del self._spent[subject]
        return None
