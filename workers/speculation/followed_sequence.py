"""Follows one sequence of the target with a draft model: the same tokens, with keys and values of its own."""

from __future__ import annotations

from collections.abc import Sequence as Many

from lorafleet.protocol.sampling_params import SamplingParams
from lorafleet.workers.schedule.kv_cache import KVCacheManager
from lorafleet.workers.schedule.sequence import Sequence

GREEDY = SamplingParams(temperature=0.0)


class FollowedSequence:
    """The draft model's sequence beside one of the target.

    Its tokens are those of the target that are known, and behind them the last drafts. Most of these turn out to be
    right, and so their keys and values are kept.
    """

    def __init__(self, target: Sequence, num_known: int, digest: str, kv: KVCacheManager) -> None:
        """Takes over the keys and values of an earlier sequence of the same tenant that began alike.

        Args:
            digest: The adapter's if its draft LoRA computes the keys and values; "" without one.
        """
        self.digest = digest
        self.num_known = num_known  # First tokens that are the target's. The others are drafts.
        self.largest_token = max(target.tokens[:num_known])
        tokens = target.tokens[:num_known]
        self.own = Sequence(target.request_id, tokens, num_known, GREEDY, seed=0, max_tokens=0)
        self.own.blocks = kv.open((target.tenant, target.cache_salt, digest))
        self.own.num_computed = kv.reuse_prefix(self.own.blocks, tokens)
        self._kv = kv

    @property
    def drafts(self) -> list[int]:
        """The tokens behind the known ones."""
        return self.own.tokens[self.num_known :]

    @property
    def num_missing(self) -> int:
        """Known tokens whose keys and values are not computed yet."""
        return self.num_known - self.own.num_computed

    def advance(self, tokens: Many[int], num_known: int) -> None:
        """Takes in the target's first num_known tokens. Drafts from the first wrong one on are dropped."""
        own, same = self.own, self.num_known
        self.largest_token = max(self.largest_token, *tokens[same:num_known], 0)
        while same < num_known and same < len(own.tokens) and own.tokens[same] == tokens[same]:
            same += 1
        if same < num_known:
            own.tokens[same:] = tokens[same:num_known]
            own.num_computed = min(own.num_computed, same)
        self.num_known = num_known
        assert own.blocks is not None
        self._kv.commit(own.blocks, own.tokens, min(own.num_computed, num_known))

    def close(self) -> None:
        """Gives the blocks back. What is known of them may be found again."""
        assert self.own.blocks is not None
        self._kv.release(self.own.blocks)
