"""Follows one sequence of the target with a draft model: the same tokens, with keys and values of its own."""

from __future__ import annotations

from lorafleet.protocol.sampling_params import SamplingParams
from lorafleet.workers.schedule.kv_cache import KVCacheManager
from lorafleet.workers.schedule.sequence import Sequence

GREEDY = SamplingParams(temperature=0.0)


class FollowedSequence:
    """The draft model's sequence beside one of the target.

    Its tokens are those of the target that are known, and behind them the last drafts. A head (eagle_head.py) reads the
    token behind each place. So its sequence lacks the target's first token.
    """

    def __init__(self, target: Sequence, num_known: int, digest: str, kv: KVCacheManager, *, is_of_head: bool) -> None:
        """Takes over the keys and values of an earlier sequence of the same tenant that began alike.

        Args:
            num_known: The target's tokens that the host knows.
            digest: That of the adapter, if the keys and values depend on it; otherwise "".
        """
        self.target = target
        self.digest = digest
        self.first = int(is_of_head)  # The target's token that is the first one here.
        self.num_known = num_known - self.first  # First tokens that are the target's. The others are drafts.
        self.largest_token = max(target.tokens[:num_known])
        tokens = target.tokens[self.first : num_known]
        self.own = Sequence(target.request_id, tokens, self.num_known, GREEDY, seed=0, max_tokens=0)
        owner = target.tenant, target.cache_salt, digest, target.base.digest
        self.own.blocks = kv.open((*owner, *target.tokens[: self.first]))
        self.behind: int | None = None  # Number of the last step behind which go_behind() has computed.
        self._kv = kv
        self.reuse_prefix()

    @property
    def drafts(self) -> list[int]:
        """The tokens behind the known ones."""
        return self.own.tokens[self.num_known :]

    @property
    def num_missing(self) -> int:
        """Known tokens whose keys and values are not computed yet."""
        return self.num_known - self.own.num_computed

    def reuse_prefix(self) -> None:
        """Takes over the keys and values of others that began alike, if nothing was computed for it yet."""
        own = self.own
        assert own.blocks is not None
        if not own.blocks.table:
            own.num_computed = self._kv.reuse_prefix(own.blocks, own.tokens[: self.num_known])

    def share(self, num_computed: int) -> None:
        """Lets others take over the keys and values of its first tokens, which this step or an earlier one computes."""
        assert self.own.blocks is not None
        self._kv.commit(self.own.blocks, self.own.tokens, num_computed)

    def advance(self, target: Sequence, num_known: int) -> None:
        """Takes in the target's first num_known tokens. If some of them are new, all drafts behind them are dropped.

        A head computes accepted drafts again, since the target's features are better than its own.
        """
        own, same, before = self.own, self.num_known, self.num_known
        new = target.tokens[self.first + before : num_known]
        self.largest_token = max(self.largest_token, *new, 0)
        self.num_known = before + len(new)
        while same < self.num_known and same < len(own.tokens) and own.tokens[same] == new[same - before]:
            same += 1
        if same < self.num_known:
            own.tokens[same:] = new[same - before :]
        if new:
            del own.tokens[self.num_known :]
            own.num_computed = min(own.num_computed, before if self.first else same)
        assert own.blocks is not None
        self._kv.commit(own.blocks, own.tokens, min(own.num_computed, self.num_known))

    def go_behind(self, step: int) -> None:
        """Prepares for drafts behind a step whose tokens are not known. All known tokens are computed.

        The tokens of the step are computed too, with arbitrary ones behind those that are right. What was drafted
        before is forgotten.
        """
        own = self.own
        assert own.blocks is not None
        del own.tokens[self.num_known :]
        own.num_computed, self.behind = self.num_known, step
        self._kv.commit(own.blocks, own.tokens, self.num_known)

    def feature_slots(self, target: Sequence, end: int, block_size: int) -> list[int]:
        """Returns the KV slots in which the target has the features of the tokens that are not computed yet."""
        assert target.blocks is not None
        table = target.blocks.table
        return [table[i // block_size] * block_size + i % block_size for i in range(self.own.num_computed, end)]

    def close(self) -> None:
        """Gives the blocks back. What is known of them may be found again."""
        assert self.own.blocks is not None
        self._kv.release(self.own.blocks)
