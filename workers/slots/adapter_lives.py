"""Tracks the life of each adapter on one worker, as a state machine:

    READING -> IN_HOST -> COPYING -> IN_SLOT

From a slot an adapter returns to IN_HOST, or is GONE if its copy in host memory has been evicted meanwhile. An adapter
that is dropped is DROPPING until nothing can use it or bring it back.

Transitions that end a wait are recorded as moves between tiers. cpu_tier.py and slot_policy.py own the adapters
themselves, and adapter_loads.py the files that are being read. An adapter that is read for the first time has no
digest yet, and begins IN_HOST.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto

from lorafleet.protocol.messages import AdapterMove, Tier


class AdapterState(Enum):
    READING = auto()  # Its files are being read, by all ranks.
    IN_HOST = auto()  # It is in host memory and in no slot.
    COPYING = auto()  # It is being copied into a slot.
    IN_SLOT = auto()  # It is in a slot, and perhaps in host memory as well.
    DROPPING = auto()  # It is to leave, but a sequence still uses its slot, or its files are being read.
    GONE = auto()  # It is in no tier, or was never here.


_READING, _IN_HOST, _COPYING, _IN_SLOT, _DROPPING, _GONE = AdapterState
_NEXT: Mapping[AdapterState, frozenset[AdapterState]] = {
    _READING: frozenset({_IN_HOST, _DROPPING, _GONE}),
    _IN_HOST: frozenset({_COPYING, _DROPPING, _GONE}),
    _COPYING: frozenset({_IN_SLOT, _IN_HOST, _DROPPING, _GONE}),
    _IN_SLOT: frozenset({_IN_HOST, _DROPPING, _GONE}),
    _DROPPING: frozenset({_READING, _IN_SLOT, _GONE}),  # It is back if it is loaded again in time.
    _GONE: frozenset({_READING, _IN_HOST}),
}


@dataclass(frozen=True, slots=True)
class _Visit:
    """The stay of one adapter in its present state."""

    state: AdapterState
    since_s: float
    lora_name: str  # Name under which it was requested, for its move at the end of the state.
    nearest: Tier  # Nearest tier that had the adapter when it was dropped.


class AdapterLives:
    """The states of all adapters of one worker. `record` takes their moves."""

    def __init__(self, record: Callable[[AdapterMove], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._record = record
        self._clock = clock
        self._visits: dict[str, _Visit] = {}  # By digest, without those that are GONE.
        self._in_state: dict[AdapterState, dict[str, None]] = {state: {} for state in AdapterState}

    def state(self, digest: str) -> AdapterState:
        visit = self._visits.get(digest)
        return AdapterState.GONE if visit is None else visit.state

    def in_state(self, state: AdapterState) -> list[str]:
        """Returns the digests of the adapters in the state, in the order in which they came to it."""
        return list(self._in_state[state])

    def enter(self, digest: str, state: AdapterState, lora_name: str = "", nearest: Tier = "disk") -> None:
        """Moves the adapter to another state, which must be one that can follow its present state."""
        last, now_s = self._visits.pop(digest, None), self._clock()
        before = AdapterState.GONE if last is None else last.state
        assert state in _NEXT[before], (digest, before, state)
        if last is not None:
            del self._in_state[before][digest]
            self._record_move(last, state, now_s - last.since_s)
        if state is not AdapterState.GONE:
            self._in_state[state][digest] = None
            self._visits[digest] = _Visit(state, now_s, lora_name, nearest)

    def _record_move(self, last: _Visit, state: AdapterState, seconds: float) -> None:
        match last.state, state:
            case AdapterState.COPYING, AdapterState.IN_SLOT:
                self._record(AdapterMove(last.lora_name, "cpu", "gpu", seconds))
            case AdapterState.DROPPING, AdapterState.GONE if last.nearest != "disk":  # else it was in no tier here
                self._record(AdapterMove("", last.nearest, "none", seconds))
