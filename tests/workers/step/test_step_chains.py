"""Several steps of a draft model as one graph: where their tokens lie, and the same drafts as by single steps."""

from __future__ import annotations

import numpy as np
import pytest

from lorafleet.workers.attention.attention_backend import AttentionBatch
from lorafleet.workers.device.step_plan import StepPlan
from lorafleet.workers.step.step_chains import NO_SLOT, chain_moves, chain_plan
from tests.workers.speculation.test_model_drafter import Counts, answers, assert_is_empty, drafter, made_engine
from tests.workers.step.chains_on_cpu import add_chains


def test_tokens_lie_behind_each_other_and_a_sequence_that_has_all_it_needs_stays_where_it_is() -> None:
    fields_FT = np.zeros((5, 2), np.int64)
    batch = AttentionBatch([1, 1], [4, 10], [[7, 3], [2, 9, 5]])
    plan = chain_plan(StepPlan(fields_FT, batch, [-1, -1], [0, 0], [0, 1], True, [], []), [3, 1])
    assert plan.attention == AttentionBatch([3, 1], [6, 10], [[7, 3], [2, 9, 5]])
    position_KB, kv_slot_KB = chain_moves(plan, block_size=4)
    assert position_KB.T.tolist() == [[3, 4, 5], [9, 9, 9]]
    assert kv_slot_KB.T.tolist() == [[7 * 4 + 3, 3 * 4, 3 * 4 + 1], [5 * 4 + 1, NO_SLOT, NO_SLOT]]


@pytest.mark.parametrize("overlap", [False, True])
def test_chains_draft_what_single_steps_draft(fleet, prompt, overlap) -> None:
    """The draft model is the target, so its drafts are right. Sequences end at different times, and the last drafts of
    each are shorter."""
    base = fleet("llama3").base
    prompts = {"a": prompt(20), "b": prompt(35), "c": prompt(7)}
    stepped = made_engine(base, base, async_scheduling=overlap)
    capturer, counts = add_chains(drafter(stepped)), Counts(stepped)
    assert answers(stepped, prompts) == answers(made_engine(base), prompts)
    assert counts.drafted == counts.accepted > 50
    assert_is_empty(stepped)
    assert sum(graph.graph.num_replays for graph in capturer.graphs) > 3


def test_chains_are_not_used_after_their_release_and_not_for_more_sequences_than_they_take(fleet, prompt) -> None:
    base = fleet("llama3").base
    stepped = made_engine(base, base, max_num_seqs=8)
    capturer, chains = add_chains(drafter(stepped)), drafter(stepped).steps.chains
    assert chains is not None
    assert chains.find(3, [-1] * 4) is not None
    assert chains.find(2, [-1]) is not chains.find(3, [-1])
    for num_steps, slots in ((1, [-1]), (4, [-1]), (3, [-1] * 5), (3, [0])):
        assert chains.find(num_steps, slots) is None, "a single step, a longer chain, more sequences, or an adapter"
    drafter(stepped).steps.release_graphs()
    assert chains.find(3, [-1]) is None
    drafter(stepped).steps.capture_graphs()
    assert chains.find(3, [-1]) is not None
    answers(stepped, {str(i): prompt(20 + i) for i in range(5)})
    assert len(capturer.graphs) == 8
