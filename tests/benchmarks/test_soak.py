from __future__ import annotations

import pytest

from lorafleet.api.access.usage import TenantUsage
from soak_drift import fitted
from soak_metering import Told, compare
from soak_truth import ABSENT, Truth

MIB = 1 << 20


def truth() -> Truth:
    return Truth({"a": [(1, 2, 3, 4)], "b": [(5, 6, 7, 8)]}, "a")


def test_an_answer_of_a_version_that_was_valid_during_the_request_is_right_and_of_any_other_wrong() -> None:
    name = truth()
    with name.watched() as before:
        name.may_be("b")
        name.is_now("b")
    with name.watched() as after:
        pass
    assert name.fault(before, 0, [1, 2, 3, 4]) is None
    assert name.fault(before, 0, [5, 6, 7, 8]) is None
    assert name.fault(after, 0, [5, 6]) is None
    assert "is version 'a'" in str(name.fault(after, 0, [1, 2, 3, 4]))
    assert name.fault(after, 0, [9, 9, 9, 9]) is not None


def test_a_removed_name_has_no_right_answer() -> None:
    name = truth()
    name.is_now(ABSENT)
    with name.watched() as seen:
        pass
    assert seen == {ABSENT}
    assert name.fault(seen, 0, [1, 2, 3, 4]) is not None


def test_only_prompts_whose_answers_are_sure_are_asked() -> None:
    assert Truth({"a": [(1, 2, 3, 4), (1,)], "b": [(5, 6, 7, 8), (5, 6, 7, 8)]}, "a").prompts == [0]


def line(request_id: str, prompt: int, completion: int, tenant: str = "acme") -> TenantUsage:
    return TenantUsage(1.0, request_id, tenant=tenant, prompt_tokens=prompt, completion_tokens=completion)


def test_what_was_told_and_what_is_metered_are_compared_request_by_request() -> None:
    told = {"soak1": Told("acme", True, 8, 10, 10), "soak2": Told("acme", False, 8, 3, 12)}
    right = [line("cmpl-soak1-0", 8, 5), line("cmpl-soak1-0", 0, 5), line("chatcmpl-soak2-1", 8, 4)]
    seen = compare(told, right)
    assert seen.faults == []
    assert seen.by_tenant == seen.told_by_tenant == {"acme": (16, 14)}
    assert (seen.num_left, seen.unmetered_tokens) == (1, 8)


@pytest.mark.parametrize(
    "lines",
    [
        [],
        [line("cmpl-soak1-0", 8, 4)],
        [line("cmpl-soak1-0", 8, 5), line("cmpl-soak1-0", 8, 5)],
        [line("cmpl-soak1-0", 8, 5, tenant="bolt")],
        [line("cmpl-soak1-0", 8, 5), line("cmpl-other-1", 0, 1)],
    ],
)
def test_a_line_too_few_too_many_or_of_somebody_else_is_found(lines: list[TenantUsage]) -> None:
    assert compare({"soak1": Told("acme", True, 8, 5, 5)}, lines).faults


def test_a_client_that_left_is_metered_at_least_what_it_received() -> None:
    assert compare({"soak1": Told("acme", False, 8, 3, 12)}, [line("cmpl-soak1-0", 8, 2)]).faults


def test_growth_beyond_three_percent_is_no_flat_memory() -> None:
    assert not fitted("worker", "rss", [100 * MIB + i * MIB for i in range(7)]).is_flat
    assert fitted("worker", "rss", [100 * MIB + i * MIB / 2 for i in range(5)]).is_flat
    assert fitted("worker", "rss", [100 * MIB - i * 9 * MIB for i in range(5)]).is_flat
