"""Combines the directory's view and the replicas' views into one JSON object for the console.

Both views are already cut to what the viewer may see, except for the digests in a replica's slots and memory. Of
these, only digests for which the directory gives this viewer a name are shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from lorafleet import __version__
from lorafleet.api.telemetry.recent import WINDOW_S, Failure, Traffic, total_of
from lorafleet.cluster.console.view import (
    AdapterView,
    DirectoryView,
    ReplicaState,
    ReplicaView,
    VersionView,
    Viewer,
)
from lorafleet.protocol.names import tenant_of

BASE = ""  # The base model's name in the traffic.
MAX_FAILURES = 100  # Failures that are shown.
POLL_S = 2.0


def state_of(
    base_names: Sequence[str], viewer: Viewer, directory: DirectoryView, views: Sequence[ReplicaView]
) -> dict[str, Any]:
    seen = Views(views, viewer)
    names = {digest: viewer.naming(name) for digest, name in directory.names.items()}
    failures = [*directory.failures, *(failure for view in views for failure in view.failures)]
    failures.sort(key=lambda failure: failure.at_s, reverse=True)
    return {
        "object": "console.state",
        "version": __version__,
        "base_models": list(base_names),
        "poll_s": POLL_S + directory.num_replicas / 50,
        "window_s": WINDOW_S,
        "num_adapters": directory.num_adapters,
        "adapters": [seen.adapter(adapter) for adapter in directory.adapters],
        "has_more": directory.has_more,
        "after": directory.adapters[-1].name if directory.adapters else None,
        "num_replicas": directory.num_replicas,
        "replicas": [seen.replica(state, names) for state in directory.replicas],
        "more_replicas": directory.more_replicas,
        "last_replica": directory.replicas[-1].replica if directory.replicas else None,
        "names": names,
        "total": _traffic(total_of(view.total for view in views)),
        "base": _traffic(seen.traffic((BASE,))),
        "load": _load(views) if viewer.sees_all else None,
        "loads": _loads(directory, views, names, viewer),
        "failures": [_failure(failure, viewer) for failure in failures[:MAX_FAILURES]],
    }


def names_of(adapter: AdapterView) -> list[str]:
    """Returns the names by which requests may ask for the adapter."""
    return [adapter.name, *(alias for alias in adapter.aliases if alias != adapter.name)]


class Views:
    def __init__(self, views: Sequence[ReplicaView], viewer: Viewer) -> None:
        self._views = views
        self._viewer = viewer
        self._by_replica = {view.replica: view for view in views}

    def traffic(self, names: Sequence[str]) -> Traffic:
        return total_of(view.traffic[name] for view in self._views for name in names if name in view.traffic)

    def adapter(self, adapter: AdapterView) -> dict[str, Any]:
        """Returns one row, with the present target of each alias. history() returns the earlier ones too."""
        return {
            **_adapter(adapter, self._viewer),
            "aliases": {self._viewer.naming(alias): moves[-1].split for alias, moves in adapter.aliases.items()},
            "traffic": _traffic(self.traffic(names_of(adapter))),
        }

    def history(self, adapter: AdapterView) -> dict[str, Any]:
        return {
            self._viewer.naming(alias): [msgspec.to_builtins(move) for move in moves]
            for alias, moves in adapter.aliases.items()
        }

    def replica(self, state: ReplicaState, names: Mapping[str, str]) -> dict[str, Any]:
        view = self._by_replica.get(state.replica)
        shown: dict[str, Any] = {
            "replica": state.replica,
            "state": _state(state, view),
            "pinned": [digest for digest in state.pinned if digest in names],
        }
        if view is None:
            return shown
        shown |= {
            "slots": [digest if digest in names else "" for digest in view.slots],
            "in_cpu": [digest for digest in view.in_cpu if digest in names],
            "cpu_loras": view.cpu_loras,
        }
        return shown | (_load([view]) if self._viewer.sees_all else {})


def _adapter(adapter: AdapterView, viewer: Viewer) -> dict[str, Any]:
    return {
        "name": viewer.naming(adapter.name),
        "tenant": tenant_of(adapter.name),
        "pinned_replicas": adapter.pinned_replicas,
        "removing": adapter.removing,
        "found": adapter.found,
        "versions": [_version(version) for version in adapter.versions],
    }


def _version(version: VersionView) -> dict[str, Any]:
    shown: dict[str, Any] = msgspec.to_builtins(version)
    return shown


def _state(state: ReplicaState, view: ReplicaView | None) -> str:
    if state.draining:
        return "draining"
    if not state.ready:
        return "starting"
    return "ready" if view is not None else "silent"


def _load(views: Sequence[ReplicaView]) -> dict[str, Any]:
    return {
        "num_running": sum(view.num_running for view in views),
        "num_waiting": sum(view.num_waiting for view in views),
        "max_num_seqs": sum(view.max_num_seqs for view in views),
        "kv_used": round(sum(view.kv_used for view in views) / max(1, len(views)), 3),
        "lora_memory_used": round(sum(view.lora_memory_used for view in views) / max(1, len(views)), 3),
    }


def _traffic(traffic: Traffic) -> dict[str, Any]:
    first_token_s, drafts = traffic.first_token_s(0.95), traffic.drafts
    return {
        "requests": traffic.requests,
        "failed": traffic.failed,
        "tokens": traffic.generated_tokens,
        "p95_first_token_s": None if first_token_s is None else round(first_token_s, 5),
        "accepted_drafts": round(drafts.num_accepted / drafts.num_tokens, 3) if drafts.num_tokens else None,
    }


def _failure(failure: Failure, viewer: Viewer) -> dict[str, Any]:
    shown = msgspec.structs.replace(
        failure, adapter=viewer.naming(failure.adapter), message=viewer.words(failure.message)
    )
    builtins: dict[str, Any] = msgspec.to_builtins(shown)
    return builtins


def _loads(
    directory: DirectoryView, views: Sequence[ReplicaView], names: Mapping[str, str], viewer: Viewer
) -> list[dict[str, Any]]:
    """Returns the commands that replicas have not completed, and the adapters that their requests wait for."""
    orders: list[dict[str, Any]] = [
        {**msgspec.structs.asdict(order), "adapter": viewer.naming(order.adapter)} for order in directory.orders
    ]
    return orders + [
        {
            "replica": view.replica,
            "adapter": names[digest],
            "digest": digest,
            "kind": "fill" if digest in view.in_cpu else "read",
            "since_s": None,
        }
        for view in views
        for digest in view.waiting
        if digest in names and digest not in view.slots
    ]
