"""Provides stores that a test need not stop: tests/resolvers/conftest.py stops them after each test."""

from __future__ import annotations

from lorafleet.protocol.sources import SourcesConfig
from lorafleet.resolvers.store import AdapterStore

_stores: list[AdapterStore] = []


def kept(config: SourcesConfig) -> AdapterStore:
    _stores.append(AdapterStore(config))
    return _stores[-1]


def stop_all() -> None:
    while _stores:
        _stores.pop().stop()
