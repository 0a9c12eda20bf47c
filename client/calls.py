"""Each call of /v1/adapters and /v1/quality as data, which the clients in admin.py send.

The server's side is in cluster/admin/admin_api.py and cluster/quality/routes.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Literal, TypedDict, TypeVar
from urllib.parse import quote

from lorafleet.client.results import Adapter, AdapterPage, Prefetched, Quality, QualityList, Removed, Verified

AnswerT = TypeVar("AnswerT", covariant=True)


@dataclass(frozen=True, slots=True)
class AdminCall(Generic[AnswerT]):
    """One HTTP call and the type of its answer."""

    answer: type[AnswerT]
    method: str
    path: str = ""  # Below /v1/adapters, or below /v1/quality depending on `of`.
    query: Mapping[str, str] = field(default_factory=dict)
    body: Mapping[str, Any] | None = None  # Sent as JSON.
    folder: Path | None = None  # Its files are sent as a tar.
    of: Literal["adapters", "quality"] = "adapters"


class PushOptions(TypedDict, total=False):
    """Options for adding an adapter or a version."""

    replicas: int  # Number of replicas that must load the adapter before the call returns. Default: 1.
    activate: bool  # Whether the name's requests use this version from now on. Default: True.
    pin: int | None  # Number of replicas that pin the adapter in a slot.
    tenant: str | None  # Tenant that will own the adapter, if the operator pushes it.
    base_model_name: str | None
    metadata: dict[str, str]  # Stored with the version.


def page(after: str, limit: int) -> AdminCall[AdapterPage]:
    return AdminCall(AdapterPage, "GET", query={"after": after, "limit": str(limit)})


def show(name: str) -> AdminCall[Adapter]:
    return AdminCall(Adapter, "GET", quote(name))


def push(name: str, source: str, options: PushOptions) -> AdminCall[Adapter]:
    return AdminCall(Adapter, "POST", body={"name": name, "source": source, **options})


def upload(name: str, folder: Path, options: PushOptions) -> AdminCall[Adapter]:
    query = {"options": json.dumps(options), "source": str(folder.absolute())}
    return AdminCall(Adapter, "PUT", f"{quote(name)}/files", query, folder=folder)


def alias(name: str, to: int | Mapping[int, float], alias: str | None) -> AdminCall[Adapter]:
    target = {"version": to} if isinstance(to, int) else {"split": {str(one): weight for one, weight in to.items()}}
    return _verb(Adapter, name, "alias", {"alias": alias, **target})


def unalias(name: str, alias: str) -> AdminCall[Adapter]:
    return AdminCall(Adapter, "DELETE", quote(name), {"alias": alias})


def rollback(name: str, alias: str | None) -> AdminCall[Adapter]:
    return _verb(Adapter, name, "rollback", {"alias": alias})


def pin(name: str, replicas: int) -> AdminCall[Adapter]:
    return _verb(Adapter, name, "pin", {"replicas": replicas})


def unpin(name: str) -> AdminCall[Adapter]:
    return _verb(Adapter, name, "unpin", {})


def prefetch(name: str, replicas: int) -> AdminCall[Prefetched]:
    return _verb(Prefetched, name, "prefetch", {"replicas": replicas})


def verify(name: str) -> AdminCall[Verified]:
    return _verb(Verified, name, "verify", {})


def remove(name: str, wait_s: float) -> AdminCall[Removed]:
    return AdminCall(Removed, "DELETE", quote(name), {"wait_s": str(wait_s)})


def quality() -> AdminCall[QualityList]:
    return AdminCall(QualityList, "GET", of="quality")


def run_quality(model: str, *, accept: bool) -> AdminCall[Quality]:
    return AdminCall(Quality, "POST", f"{quote(model)}/{'accept' if accept else 'run'}", body={}, of="quality")


def _verb(answer: type[AnswerT], name: str, verb: str, body: Mapping[str, Any]) -> AdminCall[AnswerT]:
    return AdminCall(answer, "POST", f"{quote(name)}/{verb}", body=body)
