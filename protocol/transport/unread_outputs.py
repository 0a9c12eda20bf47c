"""Bounds the outputs that wait in the front for clients that read slowly: of one sequence, of one tenant, and in all.

An engine cannot pause one sequence of a step, so a sequence whose outputs exceed a bound is aborted. Its client gets
what was kept, and then the error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from lorafleet.protocol.errors import ClientTooSlow
from lorafleet.protocol.messages import TokenLogprobs, TokenOutput

MAX_UNREAD_OF_ONE = 4 << 20  # Bytes of one sequence: 100,000 tokens, or 2,500 with the 20 best tokens of each.
MAX_UNREAD = 128 << 20  # Bytes of all sequences of a front; one tenant may have half of it.

TOKEN_BYTES = 36  # A token ID: an int and its place in a list.
_LOGPROBS_BYTES = 256  # A TokenLogprobs with two empty lists.
_TOP_BYTES = 68  # One of its best tokens: an int, a float, and their places.


IsStalled = Callable[[], bool]  # Returns whether a stream waits for its client now.


def never_stalled() -> bool:
    """Returns False, for outputs that are collected, and not sent to a client as they come."""
    return False


class UnreadOutputs:
    """The bytes of unread outputs, by tenant."""

    def __init__(self, max_bytes: int = MAX_UNREAD, max_bytes_of_one: int = MAX_UNREAD_OF_ONE) -> None:
        self._max_bytes = max_bytes
        self._max_bytes_of_one = max_bytes_of_one
        self._held: Counter[str] = Counter()

    @property
    def num_bytes(self) -> int:
        return self._held.total()

    def share(self, tenant: str, is_stalled: IsStalled) -> UnreadShare:
        """Returns the account of one sequence of the tenant."""
        return UnreadShare(self, tenant, is_stalled)

    def add(self, tenant: str, num_bytes: int) -> None:
        self._held[tenant] += num_bytes
        if not self._held[tenant]:
            del self._held[tenant]

    def check(self, tenant: str, of_one: int) -> None:
        """Raises ClientTooSlow if the sequence or its tenant has more than its bound. If all tenants together have
        more than theirs, a tenant with less than an equal share is spared."""
        if of_one > self._max_bytes_of_one:
            raise _too_slow("outputs of this answer", of_one, self._max_bytes_of_one)
        own, of_all = self._held[tenant], self.num_bytes
        if own > self._max_bytes // 2:
            raise _too_slow("outputs of the answers of this tenant", own, self._max_bytes // 2)
        if of_all > self._max_bytes and own * len(self._held) >= of_all:
            raise _too_slow("outputs of all answers", of_all, self._max_bytes)


class UnreadShare:
    """The unread bytes of one sequence."""

    __slots__ = ("_is_stalled", "_num_bytes", "_outputs", "_tenant")

    def __init__(self, outputs: UnreadOutputs, tenant: str, is_stalled: IsStalled) -> None:
        self._outputs = outputs
        self._tenant = tenant
        self._is_stalled = is_stalled
        self._num_bytes = 0

    def add(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        self._outputs.add(self._tenant, num_bytes)

    def remove(self, num_bytes: int) -> None:
        self.add(-num_bytes)

    def check(self) -> None:
        """Raises ClientTooSlow if too many bytes are unread and the stream waits for its client. A front that is behind
        is not the client's fault."""
        if self._is_stalled():
            self._outputs.check(self._tenant, self._num_bytes)


def bytes_of(output: TokenOutput) -> int:
    """Returns about how many bytes the output takes in memory."""
    num_bytes = TOKEN_BYTES * len(output.token_ids) + len(output.embedding) + len(output.routed_experts)
    for entries in (output.logprobs or (), output.prompt_logprobs or ()):
        num_bytes += sum(map(_bytes_of_logprobs, entries))
    return num_bytes


def _bytes_of_logprobs(entry: TokenLogprobs | None) -> int:
    return 0 if entry is None else _LOGPROBS_BYTES + _TOP_BYTES * len(entry.top_ids)


def _too_slow(what: str, num_bytes: int, bound: int) -> ClientTooSlow:
    return ClientTooSlow(
        f"The client reads this stream more slowly than it is generated: about {num_bytes} bytes of {what} wait to be "
        f"read; at most {bound} may wait. The answer ends here. Read faster, or ask for fewer logprobs at a time."
    )
