"""A step is planned before a drafter on the host knows the tokens behind which it drafts."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from typing import Any

import pytest
import torch

from lorafleet.protocol.engine_config import SpeculativeConfig
from lorafleet.protocol.messages import DraftCounts
from lorafleet.workers.device.draft_verification import DraftVerification, VerifiedRows
from lorafleet.workers.schedule.sequence import UNKNOWN, Chunk, Sequence
from lorafleet.workers.speculation.ahead_pace import AheadPace
from lorafleet.workers.speculation.awaited_drafts import AwaitedDrafts, AwaitingDrafter
from lorafleet.workers.speculation.drafter import Wanted
from stepped_engine import SteppedEngine
from tests.workers.speculation.drafting import Guesses, speculate
from tests.workers.speculation.test_speculation import decode


class Known:
    """Drafts given tokens, and records behind which ones."""

    def __init__(self, drafts: dict[Sequence, list[int]]) -> None:
        self.drafts = drafts
        self.behind: dict[Sequence, list[int]] = {}
        self.was_read: list[Sequence] = []
        self.released: list[Sequence] = []

    def propose(self, wanted: Many[Wanted]) -> list[list[int]]:
        self.behind = {entry.sequence: entry.sequence.tokens[: entry.num_known] for entry in wanted}
        return [self.drafts[entry.sequence][: entry.most] for entry in wanted]

    def read(self, sequences: Iterable[Sequence]) -> None:
        self.was_read = list(sequences)

    def release(self, sequence: Sequence) -> None:
        self.released.append(sequence)


def in_flight(*sequences: Sequence) -> DraftVerification:
    """Returns a step of these sequences, whose tokens the host does not know yet."""
    for one in sequences:
        one.tokens.append(UNKNOWN)
    rows = {one: VerifiedRows(i, 3 * i, 2) for i, one in enumerate(sequences)}
    return DraftVerification(1, rows, torch.zeros(64, dtype=torch.int64), torch.zeros(len(sequences)))


def chunk(sequence: Sequence, *drafts: int) -> Chunk:
    return Chunk(sequence, 1 + len(drafts), drafts=list(drafts))


def test_drafts_follow_the_tokens_that_the_host_has_read_by_now() -> None:
    one, other, forced, left = (decode(name) for name in ("one", "other", "forced", "left"))
    known = list(one.tokens)
    in_flight(one, other, forced, left)
    host = Known({one: [21, 22, 23], other: [31], forced: [99], left: [99]})
    made = AwaitedDrafts(AwaitingDrafter(host), {one: 2, other: 2, left: 2}).make(
        [chunk(one, UNKNOWN, UNKNOWN), chunk(other, UNKNOWN, UNKNOWN), chunk(forced, 8, 9)],
        {one: [11, 12], other: [13], forced: [14], left: [15]},
    )
    assert host.behind == {one: [*known, 11, 12], other: [*known, 13]}
    assert made.counts == {one: 2, other: 1} and made.found == 3 / 4
    assert made.tokens == [12, 21, 22, 13, 31, 31, 14]  # The last row of the second sequence has no draft.
    assert one.tokens == other.tokens == forced.tokens == [*known, UNKNOWN]


def test_a_drafter_that_fails_leaves_the_tokens_as_they_were() -> None:
    one = decode("one")
    known = list(one.tokens)
    in_flight(one)
    with pytest.raises(KeyError):
        AwaitedDrafts(AwaitingDrafter(Known({})), {one: 2}).make([chunk(one, UNKNOWN)], {one: [11, 12, 13]})
    assert one.tokens == [*known, UNKNOWN]


def test_a_sequence_without_drafts_gets_no_room_until_there_are_some_again() -> None:
    one, other = decode("one"), decode("other")
    host = Known({one: [21], other: []})
    drafter = AwaitingDrafter(host)
    step = in_flight(one, other)
    entries = [Wanted(one, 4, 2), Wanted(other, 4, 2)]
    assert [drafter.is_current(entry, step) for entry in entries] == [True, True]
    room = drafter.propose_behind(entries, step)
    assert host.was_read == [one, other], "while the step runs"
    room.make([chunk(one, UNKNOWN), chunk(other, UNKNOWN)], {one: [11], other: [12]})
    assert [drafter.is_current(entry, step) for entry in entries] == [True, False]
    assert not drafter.may_catch_up(other)
    drawn = {one: [11], other: [12]}
    host.drafts = {one: [21], other: [31]}
    made = drafter.propose_behind(entries[:1], step).make([chunk(one, UNKNOWN), chunk(other)], drawn)
    assert made.found == 1 / 2, "one of two that have drafts had room for them"
    host.drafts = {one: [], other: [31]}
    made = drafter.propose_behind(entries[:1], step).make([chunk(one, UNKNOWN), chunk(other)], drawn)
    assert made.found == 0.0
    assert [drafter.is_current(entry, step) for entry in entries] == [False, True]
    drafter.release(one)
    assert host.released == [one] and drafter.is_current(entries[0], step)
    assert not drafter.is_current(Wanted(decode("new"), 4, 2), step)


class Short(Guesses):
    """Has two drafts, however many are wanted."""

    def propose(self, wanted: Many[Wanted]) -> list[list[int]]:
        return [draft[:2] for draft in super().propose(wanted)]


def test_rows_without_drafts_are_neither_accepted_nor_counted(
    fleet: Callable[[str], Any], prompt: Callable[[int], list[int]]
) -> None:
    """The answer repeats one token, so that what is in these rows would be right."""
    config = SpeculativeConfig("ngram")
    stepped = SteppedEngine(fleet("llama3").base, speculative_config=config, async_scheduling=True)
    speculate(stepped.engine, Short({"a": [9] * 40}, mistakes=0.0))
    counts: list[DraftCounts] = []
    step = stepped.engine.step

    def recorded() -> Any:
        outputs = step()
        counts.extend(output.drafts for output in outputs if output.drafts is not None)
        return outputs

    stepped.engine.step = recorded  # type: ignore[method-assign]
    stepped.add("a", prompt(20), params={"max_tokens": 40, "allowed_token_ids": [9]})
    rooms: list[int] = []
    while "a" not in stepped.ended:
        stepped.step()
        rooms += [len(chunk.drafts) for chunk in stepped.engine.pipeline.chunks if UNKNOWN in chunk.drafts]
    assert stepped.tokens["a"] == [9] * 40
    assert rooms.count(4) > 5
    assert max(found.num_tokens for found in counts) == 2
    assert all(found.num_accepted == found.num_tokens for found in counts)


class Ragged(Guesses):
    """Has any number of drafts, and often none."""

    def propose(self, wanted: Many[Wanted]) -> list[list[int]]:
        return [draft[: self._rng.choice((0, 0, 1, 2, 4))] for draft in super().propose(wanted)]


class Alternating(AheadPace):
    """Plans most steps before the tokens are known, and others afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self._rng = random.Random(7)

    def is_ahead(self, *_args: object, **_kwargs: object) -> bool:
        return self._rng.random() < 0.8


@pytest.mark.parametrize(("seed", "kv_cache_tokens"), [(1, 4096), (2, 400), (3, 400)])
def test_requests_that_come_end_and_are_aborted_at_any_time_get_the_answers_without_drafts(
    fleet: Callable[[str], Any], prompt: Callable[[int], list[int]], seed: int, kv_cache_tokens: int
) -> None:
    rng = random.Random(seed)
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0, "seed": 3},
        {"stop_token_ids": list(range(seed, 260, 7))},
        {"logprobs": 1, "frequency_penalty": 0.5},
    ]
    jobs = {
        f"r{i}": (prompt(rng.randrange(1, 60)), {"max_tokens": rng.choice((1, 5, 20, 40))} | rng.choice(kinds))
        for i in range(20)
    }
    room = {"kv_cache_tokens": kv_cache_tokens, "max_model_len": 128, "max_num_batched_tokens": 64, "max_num_seqs": 6}
    plain = SteppedEngine(fleet("llama3").base, async_scheduling=True, **room)
    for name, (ids, params) in jobs.items():
        plain.add(name, ids, params=params)
    plain.until(lambda: jobs.keys() <= plain.ended.keys())

    config = SpeculativeConfig("ngram")
    stepped = SteppedEngine(fleet("llama3").base, async_scheduling=True, speculative_config=config, **room)
    speculate(stepped.engine, Ragged(plain.tokens, mistakes=0.2), pace=Alternating())
    waiting, aborted, num_planned = list(jobs), set[str](), 0
    while waiting or stepped.engine.has_work:
        if waiting and rng.random() < 0.5:
            name = waiting.pop()
            stepped.add(name, jobs[name][0], params=jobs[name][1])
        running = [sequence.request_id for sequence in stepped.engine.scheduler.running]
        if running and rng.random() < 0.03:
            name = rng.choice(running)
            aborted.add(name)
            stepped.engine.abort(name)
        stepped.step()
        num_planned += any(UNKNOWN in chunk.drafts for chunk in stepped.engine.pipeline.chunks)
    assert num_planned > 5 and aborted
    for name, tokens in plain.tokens.items():
        found = stepped.tokens.get(name, [])
        assert found == (tokens[: len(found)] if name in aborted else tokens)
    stats = stepped.engine.stats()
    assert stats.kv_blocks_free == stats.kv_blocks_total
