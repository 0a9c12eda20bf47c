"""The JSON answers of the administration API, as types, from which /openapi.json is made
(api/answer/answer_types.py)."""

from __future__ import annotations

from typing import Literal, NotRequired

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict

_exactly = with_config(ConfigDict(extra="forbid"))

Split = dict[str, float]  # Version number -> weight.


@_exactly
class ShownVersion(TypedDict):
    number: int
    digest: str
    source: str
    rank: int
    num_bytes: int
    created_s: float
    location: NotRequired[str]
    base_model_name: NotRequired[str]
    metadata: NotRequired[dict[str, str]]


@_exactly
class ShownMove(TypedDict):
    at_s: float
    split: Split


@_exactly
class ShownAlias(TypedDict):
    split: Split
    history: list[ShownMove]


@_exactly
class ShownAdapter(TypedDict):
    id: str
    object: Literal["adapter"]
    tenant: str | None
    pinned_replicas: int
    removing: bool
    versions: list[ShownVersion]
    aliases: dict[str, ShownAlias]


@_exactly
class AdapterPage(TypedDict):
    object: Literal["list"]
    data: list[ShownAdapter]
    has_more: bool
    last_id: str | None


@_exactly
class Removed(TypedDict):
    object: Literal["adapter"]
    id: str
    removed: Literal[True]


@_exactly
class Prefetched(TypedDict):
    id: str
    replicas: list[str]


@_exactly
class Verified(TypedDict):
    id: str
    verified: list[int]
