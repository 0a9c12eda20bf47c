"""The terms of a push have the limits of the adapter's owner, and are otherwise as the caller wants them."""

from __future__ import annotations

import pytest

from lorafleet.api.backend import StorageLimits
from lorafleet.cluster.admin.push_limits import limited
from lorafleet.protocol.admin_verbs import PushTerms


@pytest.mark.parametrize("limits", [StorageLimits(), StorageLimits(3), StorageLimits(3, 1 << 30)])
def test_limits_replace_those_of_the_terms_and_nothing_else(limits: StorageLimits) -> None:
    terms = PushTerms("memory", replace=False, num_replicas=None, max_adapters=9, metadata={"step": "1"})
    expected = PushTerms("memory", False, True, None, None, {"step": "1"}, limits.adapters, limits.num_bytes)
    assert limited(terms, limits) == expected
