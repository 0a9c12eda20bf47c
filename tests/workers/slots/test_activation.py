from __future__ import annotations

import pytest

from lorafleet.workers.slots.activation import NEVER, first_adapted


@pytest.mark.parametrize(
    ("prompt", "invocation", "first"),
    [
        ([1, 2, 3, 4, 5], (3, 4), 2),
        ([3, 4, 1, 3, 4, 2], (3, 4), 3),
        ([3, 3, 3], (3, 3), 1),
        ([1, 2, 3], (1, 2, 3), 0),
        ([1, 2], (1, 2, 3), NEVER),
        ([1, 3, 2, 4], (3, 4), NEVER),
        ([], (3,), NEVER),
    ],
)
def test_an_activated_adapter_works_from_its_last_invocation_on(prompt, invocation, first):
    assert first_adapted(prompt, invocation) == first
