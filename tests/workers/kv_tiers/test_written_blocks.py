"""The blocks that a step may write to: those of a sequence may lie further back if drafts in flight are accepted."""

from __future__ import annotations

from lorafleet.protocol.sampling_params import SamplingParams
from lorafleet.workers.kv_tiers.leaving_blocks import written_blocks
from lorafleet.workers.schedule.kv_cache import SequenceBlocks
from lorafleet.workers.schedule.sequence import Chunk, Sequence


def test_a_step_may_write_behind_all_drafts_in_flight() -> None:
    blocks = SequenceBlocks(0, 0)
    blocks.table.extend([7, 3, 9, 5, 8])
    one = Sequence("a", [1] * 10, 4, SamplingParams(), seed=0, max_tokens=50, blocks=blocks, num_computed=9)
    assert list(written_blocks([Chunk(one, 2)], 4)) == [9]
    one.num_unverified = 2
    assert list(written_blocks([Chunk(one, 2)], 4)) == [9, 5]
    one.num_unverified = 6
    assert list(written_blocks([Chunk(one, 2)], 4)) == [9, 5, 8]
