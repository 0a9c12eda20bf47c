"""What the server answers, typed. Fields that a later server adds are passed over."""

from __future__ import annotations

from typing import Literal

import msgspec

Split = dict[str, float]  # version -> weight


class Version(msgspec.Struct, frozen=True, omit_defaults=True):
    """source: where it came from, for people. location: the folder that replicas read, where the catalogue has no copy.
    num_bytes: in the serving dtype."""

    number: int
    digest: str
    source: str
    rank: int
    num_bytes: int
    created_s: float  # since 1970
    location: str = ""
    base_model_name: str | None = None
    metadata: dict[str, str] = {}


class Move(msgspec.Struct, frozen=True):
    """What an alias stands for since at_s, seconds since 1970."""

    at_s: float
    split: Split


class Alias(msgspec.Struct, frozen=True):
    """history: the present split is its last."""

    split: Split
    history: list[Move]


class Adapter(msgspec.Struct, frozen=True):
    id: str
    object: Literal["adapter"]
    tenant: str | None
    pinned_replicas: int  # 0: not pinned
    removing: bool
    versions: list[Version]
    aliases: dict[str, Alias]


class AdapterPage(msgspec.Struct, frozen=True):
    object: Literal["list"]
    data: list[Adapter]
    has_more: bool
    last_id: str | None


class Removed(msgspec.Struct, frozen=True):
    object: Literal["adapter"]
    id: str
    removed: Literal[True]


class Prefetched(msgspec.Struct, frozen=True):
    """replicas: those that have it now."""

    id: str
    replicas: list[str]


class Verified(msgspec.Struct, frozen=True):
    id: str
    verified: list[int]  # numbers of versions


class QualityMeasures(msgspec.Struct, frozen=True):
    """Of a model beside its baseline; docs/quality.md says what each is. Perplexities: None without completions."""

    agreement: float
    drift: float  # nats
    kl: float  # nats
    perplexity: float | None
    baseline_perplexity: float | None


class Quality(msgspec.Struct, frozen=True):
    """How a model stands on its probes. error: of the last try, at tried_s; the rest is of the last run that did not
    fail, at at_s. Digests are of the adapter's versions, "" of the base."""

    id: str
    object: Literal["quality"]
    tried_s: float  # since 1970, as the others
    error: str
    at_s: float | None
    digest: str
    baseline_digest: str
    baseline_at_s: float | None
    measures: QualityMeasures | None


class QualityList(msgspec.Struct, frozen=True):
    object: Literal["list"]
    data: list[Quality]
