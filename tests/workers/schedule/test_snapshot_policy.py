"""Snapshots of recurrent states: where they are taken, who resumes from them, and that they are always right.

A state is simulated by the tokens that made it. So a sequence that went on from a wrong state would show.
"""

from __future__ import annotations

import random

import pytest

from lorafleet.protocol.sampling_params import SamplingParams
from lorafleet.workers.bases.rope_config import RopeConfig
from lorafleet.workers.schedule.kv_cache import KVCacheManager
from lorafleet.workers.schedule.scheduler import Scheduler
from lorafleet.workers.schedule.sequence import UNKNOWN, Chunk, Sequence
from lorafleet.workers.schedule.state_slots import StateSlots
from lorafleet.workers.schedule.state_snapshots import StateSnapshots
from lorafleet.workers.schedule.step_budget import StepBudget, StepLimits
from tests.workers.schedule.stepped_scheduler import Events, SteppedScheduler

BLOCK = 16
SYSTEM = list(range(1000, 1200))  # a system prompt, which ends within a block


class Recurrent:
    """An engine without a model: the state of a slot is the list of tokens that it has taken in."""

    def __init__(self, num_snapshots: int = 8, num_blocks: int = 400, most_tokens: int = 1000, seqs: int = 4) -> None:
        rope = RopeConfig(rotary_dim=8, theta=10000.0, max_position_embeddings=16384)
        self.pool = StateSnapshots(range(100, 100 + num_snapshots))
        kv = KVCacheManager(num_blocks, BLOCK, enable_prefix_caching=True)
        limits = StepLimits(most_tokens)
        self.scheduler = Scheduler(kv, None, rope, seqs, StepBudget(limits), StateSlots(seqs, self.pool))
        self.driven = SteppedScheduler(self.scheduler, Events(launches=self._launch))
        self.states: dict[int, list[int]] = {}
        self.num_computed = 0
        self._count = 0

    def _launch(self, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            if chunk.resumes_from is not None:
                assert chunk.sequence.state_slot is not None
                self.states[chunk.sequence.state_slot] = self.states[chunk.resumes_from]
        for chunk in chunks:
            sequence, slot, start = chunk.sequence, chunk.sequence.state_slot, chunk.sequence.num_computed
            assert slot is not None
            # the tokens that SteppedScheduler samples are their own positions
            tokens = [at if token == UNKNOWN else token for at, token in enumerate(sequence.tokens)]
            assert start == 0 or self.states[slot] == tokens[:start]
            self.states[slot] = tokens[: start + chunk.num_tokens]
            self.num_computed += chunk.num_tokens
        for chunk in chunks:
            if chunk.snapshot is not None:
                assert chunk.sequence.state_slot is not None
                self.states[chunk.snapshot] = self.states[chunk.sequence.state_slot]

    def send(self, prompt: list[int], answer: int = 1, salt: str = "") -> Sequence:
        self._count += 1
        sent = Sequence(str(self._count), list(prompt), len(prompt), SamplingParams(), seed=0, max_tokens=answer)
        sent.cache_salt = salt
        self.scheduler.add(sent)
        return sent

    def answer(self, prompt: list[int], answer: int = 1, salt: str = "") -> Sequence:
        """Answers a prompt alone."""
        sent = self.send(prompt, answer, salt)
        self.finish()
        return sent

    def finish(self) -> None:
        while self.scheduler.has_work:
            self.driven.step()


def question(number: int, length: int) -> list[int]:
    return [10_000 * number + i for i in range(length)]


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 79, 80, 81, 300])
@pytest.mark.parametrize("most_tokens", [16, 23, 1000])
def test_a_prompt_that_comes_again_resumes_at_its_last_block_boundary(length: int, most_tokens: int) -> None:
    engine = Recurrent(most_tokens=most_tokens)
    assert engine.answer(question(1, length)).num_cached == 0
    boundary = (length - 1) // BLOCK * BLOCK
    expected = boundary if boundary >= 64 else 0  # a snapshot of fewer tokens is not worth a step
    assert engine.answer(question(1, length)).num_cached == expected
    assert engine.answer(question(1, length), salt="another").num_cached == 0


def test_the_next_turn_reads_neither_the_first_prompt_nor_the_answer_again() -> None:
    engine = Recurrent()
    first = engine.answer(question(1, 200), answer=150)
    assert engine.pool.num_used == 2, "the prompt's and the answer's last one"
    # Snapshots come every 64 tokens behind the prompt's, which is at 192.
    assert engine.answer(first.tokens + question(2, 30)).num_cached == 192 + 2 * 64


def test_answers_have_no_snapshots_where_they_would_replace_those_of_prompts() -> None:
    engine = Recurrent(num_snapshots=1)
    first = engine.answer(question(1, 200), answer=150)
    assert engine.answer(first.tokens + question(2, 30)).num_cached == 192


def test_a_system_prompt_has_a_snapshot_from_its_second_use_on() -> None:
    engine = Recurrent()
    cached = [engine.answer(SYSTEM + question(number, 100)).num_cached for number in range(1, 5)]
    assert cached == [0, 0, 192, 192]


def test_requests_that_come_together_wait_for_what_one_of_them_computes() -> None:
    engine = Recurrent(most_tokens=150)
    samples = [engine.send(question(1, 300), answer=3) for _ in range(4)]
    engine.finish()
    assert [sample.num_cached for sample in samples] == [0, 288, 288, 288]
    assert engine.num_computed == 288 + 4 * (300 - 288 + 2), "and of each answer all tokens but the last"


def test_nobody_waits_for_a_sequence_that_was_aborted() -> None:
    engine = Recurrent(most_tokens=100)
    first, second = (engine.send(question(1, 300)) for _ in range(2))
    engine.driven.step()
    engine.driven.step()
    assert second.blocks is None
    first.ended = True
    engine.scheduler.finish(first)
    engine.finish()
    assert second.num_cached == 0
    assert engine.answer(question(1, 300)).num_cached == 288


def test_snapshots_go_with_their_blocks_and_the_oldest_first() -> None:
    engine = Recurrent(num_snapshots=2, num_blocks=40)
    for number in (1, 2, 3):
        engine.answer(question(number, 100))
    assert [engine.answer(question(number, 100)).num_cached for number in (3, 1)] == [96, 0]
    engine.answer(question(4, 620))  # needs all blocks but one
    assert engine.pool.num_used == 1
    assert engine.answer(question(3, 100)).num_cached == 0


@pytest.mark.parametrize("seed", range(6))
def test_states_are_right_whatever_is_evicted_preempted_or_aborted(seed: int) -> None:
    """Recurrent._launch compares each state with its tokens."""
    draw = random.Random(seed)
    engine = Recurrent(
        num_snapshots=draw.choice([2, 4, 10]),
        num_blocks=draw.choice([45, 60]),
        most_tokens=draw.choice([5, 37, 200]),
        seqs=draw.choice([2, 5]),
    )
    talks = [SYSTEM[: draw.choice([50, 130, 200])] + question(n, draw.randrange(1, 90)) for n in range(1, 7)]
    for _ in range(60):
        i = draw.randrange(len(talks))
        sent = engine.send(talks[i], draw.randrange(1, 200), draw.choice(["", "", "", "own"]))
        for _ in range(draw.randrange(40)):
            if engine.scheduler.has_work:
                engine.driven.step()
        if draw.random() < 0.2 and not sent.ended:
            sent.ended = True
            engine.scheduler.finish(sent)
        elif sent.ended and len(sent.tokens) < 500:
            talks[i] = [at if token == UNKNOWN else token for at, token in enumerate(sent.tokens)] + [7] * 5
    engine.finish()
    assert engine.scheduler.kv.counts.hit_tokens > 0
    nodes = list(engine.pool._slots)
    for node in nodes:
        engine.pool.forget(node)
    assert engine.pool.num_used == 0, "no slot is lost, and none is pinned"
