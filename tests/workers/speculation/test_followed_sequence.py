"""The draft model's sequence has the tokens of the target that are known, and none of the drafts before them."""

from __future__ import annotations

import pytest

from lorafleet.protocol.sampling_params import SamplingParams
from lorafleet.workers.schedule.kv_cache import KVCacheManager
from lorafleet.workers.schedule.sequence import Sequence
from lorafleet.workers.speculation.followed_sequence import FollowedSequence

KNOWN = [1, 2, 3]
DRAFTS = [7, 8, 9]


def drafted(*, is_of_head: bool) -> tuple[Sequence, FollowedSequence]:
    """Returns a sequence of the target, and the draft model's, which has computed all drafts but the last."""
    target = Sequence("one", list(KNOWN), 2, SamplingParams(), seed=0, max_tokens=9)
    followed = FollowedSequence(target, 3, "", KVCacheManager(8, 16, enable_prefix_caching=True), is_of_head=is_of_head)
    followed.own.tokens += DRAFTS
    followed.own.num_computed = followed.num_known + 2
    return target, followed


@pytest.mark.parametrize(
    ("drawn", "num_right"), [([5], 0), ([7], 1), ([7, 5], 1), ([7, 8], 2), ([7, 8, 9, 4], 2), ([7, 8, 5, 4], 2)]
)
def test_no_draft_is_taken_again_behind_tokens_that_were_drawn(drawn: list[int], num_right: int) -> None:
    """Only the first drafts are verified in a step, so those behind them may follow a wrong one."""
    for is_of_head in (False, True):
        target, followed = drafted(is_of_head=is_of_head)
        target.tokens += drawn
        followed.advance(target, len(target.tokens))
        assert followed.own.tokens == target.tokens[int(is_of_head) :] and not followed.drafts
        assert followed.num_missing == len(drawn) - (0 if is_of_head else num_right)


def test_drafts_stay_while_nothing_was_drawn() -> None:
    target, followed = drafted(is_of_head=False)
    followed.advance(target, 3)
    assert followed.drafts == DRAFTS and followed.num_missing == -2
