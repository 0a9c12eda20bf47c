"""The typed answers of the server: those of protocol/admin_answers.py, and those about quality."""

from __future__ import annotations

from typing import Literal

import msgspec

# These answers are the client's public names, too.
from lorafleet.protocol.admin_answers import Adapter as Adapter
from lorafleet.protocol.admin_answers import AdapterPage as AdapterPage
from lorafleet.protocol.admin_answers import Alias as Alias
from lorafleet.protocol.admin_answers import Downloaded as Downloaded
from lorafleet.protocol.admin_answers import Move as Move
from lorafleet.protocol.admin_answers import Prefetched as Prefetched
from lorafleet.protocol.admin_answers import PushedVersion as PushedVersion
from lorafleet.protocol.admin_answers import Removed as Removed
from lorafleet.protocol.admin_answers import Split as Split
from lorafleet.protocol.admin_answers import Verified as Verified
from lorafleet.protocol.admin_answers import Version as Version


class QualityMeasures(msgspec.Struct, frozen=True):
    """Measures of a model compared with its baseline; docs/quality.md explains each."""

    agreement: float
    drift: float  # In nats.
    kl: float  # In nats.
    perplexity: float | None  # None without completions.
    baseline_perplexity: float | None  # None without completions.


class Quality(msgspec.Struct, frozen=True):
    """The result of a model's quality probes. Times are in seconds since 1970."""

    id: str
    object: Literal["quality"]
    tried_s: float  # Time of the last try.
    error: str  # Error of the last try.
    at_s: float | None  # Time of the last run without a failure, from which the other fields are.
    digest: str  # Digest of the adapter's version; "" for the base.
    baseline_digest: str  # The same for the baseline.
    baseline_at_s: float | None
    measures: QualityMeasures | None


class QualityList(msgspec.Struct, frozen=True):
    object: Literal["list"]
    data: list[Quality]
