"""Provides a front without an engine process, for routes that only read state."""

from __future__ import annotations

import hashlib
from types import SimpleNamespace
from typing import Any, cast

from lorafleet.api.access.access import Access
from lorafleet.api.access.caller import Caller
from lorafleet.api.access.gate import Gate, KnownKey
from lorafleet.api.app_state import AppState, make_state
from lorafleet.api.front_config import FrontConfig
from lorafleet.protocol.messages import EngineStats

ADMIN_KEY = "the admin key"


def bare_front(keys: dict[str, Caller] | None = None, stats: EngineStats | None = None) -> AppState:
    """Returns the front of the replica "r0". The admin key is always valid; without `keys` it is the only one."""
    known = None if keys is None else {_digest(key): KnownKey(caller) for key, caller in keys.items()}
    gate = Gate(ADMIN_KEY, None if known is None else lambda: known)
    engine = SimpleNamespace(
        hello=SimpleNamespace(vocab_size=10, eos_token_ids=[0], ends=lambda eos: [eos], rope_positions=512),
        stats=stats or EngineStats(),
        listen_to_moves=lambda _: None,
    )
    config, nothing = FrontConfig(("base",), "/models/base", replica_id="r0"), cast(Any, None)
    tokenizer = cast(Any, SimpleNamespace(eos_token_id=0))
    return make_state(config, tokenizer, cast(Any, engine), nothing, Access(gate))


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()
