"""Speculation on a simulated device: it is faster where drafts are right and cheap, and hardly slower anywhere."""

from __future__ import annotations

import random
from collections.abc import Sequence as Many
from dataclasses import dataclass

import pytest

from lorafleet.protocol.sampling_params import SamplingParams
from lorafleet.protocol.step_metrics import StepShape
from lorafleet.workers.schedule.sequence import UNKNOWN, Chunk, Sequence
from lorafleet.workers.schedule.step_budget import StepBudget, StepLimits
from lorafleet.workers.speculation.drafter import Wanted
from lorafleet.workers.speculation.speculation import Speculation

NUM_DRAFTS, NUM_PROMPT_STEPS = 4, 8
RIGHT, WRONG = 1, 0


@dataclass(frozen=True)
class Device:
    """How long steps take."""

    step_s: float = 4.4e-3
    token_s: float = 15e-6
    drafted_s: float = 1.5e-3  # seconds that the host needs before a step with drafts, and again before the next step
    draft_token_s: float = 50e-6
    first_s: float = 0.0  # seconds that the first step with drafts takes longer

    def seconds(self, num_decodes: int, num_drafts: int) -> float:
        seconds = self.step_s + self.token_s * num_decodes
        return seconds + self.drafted_s + self.draft_token_s * num_drafts if num_drafts else seconds


class Coins:
    """Drafts of which each token is right with a given probability, after a share of the steps."""

    def __init__(self, right: float, found: float, rng: random.Random) -> None:
        self._right, self._found, self._rng = right, found, rng

    def propose(self, wanted: Many[Wanted]) -> list[list[int]]:
        return [
            [RIGHT if self._rng.random() < self._right else WRONG for _ in range(entry.most)]
            if self._rng.random() < self._found
            else []
            for entry in wanted
        ]

    def release(self, sequence: Sequence) -> None:
        pass


def gain(device: Device, batches: Many[int], right: float, found: float = 1.0, num_tokens: int = 300) -> float:
    """Returns the tokens per second with speculation, as a multiple of those without. Batches of these sizes run one
    after another, until each sequence has about num_tokens. Each begins with steps with prompts."""
    rng = random.Random(4)
    made = Speculation(Coins(right, found, rng), StepBudget(StepLimits(2048)), NUM_DRAFTS, 512)
    plain_s = taken_s = 0.0
    first_s = device.first_s
    for batch in batches:
        running = [_decode(str(i)) for i in range(batch)]
        left = num_tokens * batch
        plain_s += num_tokens * device.seconds(batch, 0)
        for _ in range(NUM_PROMPT_STEPS):
            made.choose([], batch)
            made.observe(StepShape("prefill", batch, 512, 0), 0, 10e-3)
        while left > 0:
            drafts = made.choose(running, batch)
            num_drafts = sum(map(len, drafts.values()))
            seconds = device.seconds(batch, num_drafts)
            if num_drafts:
                seconds, first_s = seconds + first_s, 0.0
            for sequence, tokens in drafts.items():
                num_right = (*tokens, WRONG).index(WRONG)
                made.verified(sequence, len(tokens), num_right)
                left -= num_right
            left -= batch
            taken_s += seconds
            # The host is busy now and then, which a step without speculation would suffer from as well.
            seen_s = seconds * rng.uniform(0.97, 1.03) * (5 if rng.random() < 0.005 else 1)
            made.observe(StepShape("decode", batch, batch + num_drafts, 0), num_drafts, seen_s)
        for sequence in running:
            made.release(sequence)
    return plain_s / taken_s


def _decode(name: str) -> Sequence:
    made = Sequence(name, [1, 2, 3, 4], 3, SamplingParams(), seed=0, max_tokens=10_000)
    made.num_computed = 3
    return made


def test_it_gains_with_few_sequences_and_drafts_that_are_right() -> None:
    assert gain(Device(), [1] * 6, right=0.7) > 1.7
    assert gain(Device(), [8] * 6, right=0.7) > 1.5
    assert gain(Device(), [1] * 6, right=1.0) > 2.8


def test_it_gains_though_the_first_step_with_drafts_takes_long() -> None:
    """The times are those of an H200 with an 8B model and 8 adapters (benchmarks/NOTES.md)."""
    device = Device(step_s=4.8e-3, token_s=18e-6, drafted_s=2.4e-3, draft_token_s=19e-6, first_s=50e-3)
    assert gain(device, [64], right=0.7) > 1.15
    assert gain(device, [64] * 4, right=0.7) > 1.2  # 1.25 if it always knew the best number of drafts


@pytest.mark.parametrize("right", [0.0, 0.2, 0.5, 0.7, 1.0])
@pytest.mark.parametrize("found", [0.1, 1.0])
def test_it_is_hardly_slower_for_any_batch(right: float, found: float) -> None:
    for batch in (1, 8, 64, 256):
        assert gain(Device(), [batch] * 6, right, found) > 0.98, batch


def test_it_is_hardly_slower_while_the_load_changes() -> None:
    for right in (0.1, 0.5, 0.7):
        assert gain(Device(), [1, 8, 64, 256, 64, 8, 1] * 2, right) > 0.98, right


def test_it_is_hardly_slower_where_steps_with_drafts_stand_alone_between_prompts() -> None:
    busy_host = Device(drafted_s=3e-3, draft_token_s=25e-6)
    for batch, right in ((16, 0.6), (32, 0.7)):
        assert gain_between_prompts(busy_host, batch, right, num_between=1) > 0.98, batch
    assert gain_between_prompts(busy_host, 16, 0.8, num_between=2) > 1.2


def gain_between_prompts(device: Device, batch: int, right: float, num_between: int, num_steps: int = 1000) -> float:
    """Returns the tokens per second with speculation, as a multiple of those without. A step computes a prompt after
    every num_between that do not. The host is busy while the device waits, before and behind steps with drafts."""
    now_s, rng = 0.0, random.Random(4)
    limits = StepBudget(StepLimits(2048))
    made = Speculation(Coins(right, 1.0, rng), limits, NUM_DRAFTS, 512, clock=lambda: now_s)
    running = [_decode(str(i)) for i in range(batch)]
    plain_s, plain_tokens, tokens, drafts = 0.0, 0, 0, dict[Sequence, list[int]]()
    for step in range(num_steps):
        is_prompt, began_s = step % (num_between + 1) == num_between, now_s
        in_flight = [Chunk(sequence, 1 + len(found), drafts=found) for sequence, found in drafts.items()]
        for sequence in running:
            sequence.tokens[-1] = UNKNOWN
        is_settled = made.needs_tokens(in_flight, [] if is_prompt else running, batch)
        for sequence in running if is_settled else ():
            sequence.tokens[-1] = RIGHT
        drafts = {} if is_prompt else made.choose(running, batch)
        num_drafts = sum(map(len, drafts.values()))
        now_s += device.drafted_s if is_settled else 0.0
        made.launched([Chunk(sequence, 1, drafts=drafts.get(sequence, [])) for sequence in running], now_s)
        now_s += device.seconds(batch, num_drafts) - (device.drafted_s if num_drafts else 0.0)
        for sequence, found in drafts.items():
            num_right = (*found, WRONG).index(WRONG)
            made.verified(sequence, len(found), num_right)
            tokens += num_right
        tokens, plain_tokens, plain_s = tokens + batch, plain_tokens + batch, plain_s + device.seconds(batch, 0)
        shape = StepShape("prefill" if is_prompt else "decode", batch, batch + num_drafts, 0)
        made.observe(shape, num_drafts, now_s - began_s)
    return tokens / now_s / (plain_tokens / plain_s)
