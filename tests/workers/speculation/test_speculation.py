"""When tokens are drafted, and for whom."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Any

import pytest

from lorafleet.protocol.lora_request import LoRARequest
from lorafleet.protocol.sampling_params import SamplingParams
from lorafleet.protocol.step_metrics import StepShape
from lorafleet.workers.schedule.sequence import UNKNOWN, Chunk, Sequence
from lorafleet.workers.schedule.step_budget import StepBudget, StepLimits
from lorafleet.workers.speculation.acceptance import FIRST_ACCEPTANCE
from lorafleet.workers.speculation.draft_choice import PROBE_SEQUENCES, PROBE_TOKENS
from lorafleet.workers.speculation.draft_turns import DRAFTED_STEPS, FIRST_PROBES, MOVED_STEPS, PLAIN_STEPS, PROBE_STEPS
from lorafleet.workers.speculation.drafter import Wanted
from lorafleet.workers.speculation.speculation import Speculation
from lorafleet.workers.speculation.step_pace import StepPace
from lorafleet.workers.structured.forced_tokens import ForcedTokens
from tests.workers.speculation.drafting import DraftsCost, DraftsPay

TOKEN = 7


class Sevens:
    """Drafts as many tokens as are wanted."""

    def __init__(self) -> None:
        self.wanted: list[Wanted] = []

    def propose(self, wanted: Many[Wanted]) -> list[list[int]]:
        self.wanted = list(wanted)
        return [[TOKEN] * entry.most for entry in wanted]

    def release(self, sequence: Sequence) -> None:
        pass


def decode(name: str = "r", max_tokens: int = 100, digest: str = "", **fields: Any) -> Sequence:
    """Returns a sequence whose newest token is not computed yet."""
    lora = LoRARequest(digest, 1, "path", digest) if digest else None
    params = fields.pop("params", SamplingParams())
    made = Sequence(name, [1, 2, 3, 4], 3, params, seed=0, max_tokens=max_tokens, lora=lora, **fields)
    made.num_computed = 3
    return made


def speculation(pace: StepPace | None = None, most_sampled: int = 64, most_tokens: int = 4) -> Speculation:
    """Returns one whose first steps without drafts are over."""
    made = Speculation(Sevens(), StepBudget(StepLimits(64)), most_tokens, most_sampled, pace or DraftsPay())
    plain(made, PLAIN_STEPS)
    return made


def plain(made: Speculation, num_steps: int, seconds: float = 5e-3) -> None:
    for _ in range(num_steps):
        made.observe(StepShape("decode", 1, 1, 0), 0, seconds)


def drafted(made: Speculation, num_steps: int, seconds: float = 5e-3) -> None:
    for _ in range(num_steps):
        made.observe(StepShape("decode", 1, 5, 0), 4, seconds)


def test_an_engine_begins_with_some_steps_without_drafts_and_has_some_now_and_then() -> None:
    made, one = Speculation(Sevens(), StepBudget(StepLimits(64)), 4, 64, DraftsPay()), decode()
    for _ in range(PLAIN_STEPS):
        assert not made.choose([one], 1)
        plain(made, 1)
    assert made.choose([one], 1) == {one: [TOKEN] * 4}
    drafted(made, DRAFTED_STEPS)
    for _ in range(PLAIN_STEPS):
        assert not made.choose([one], 1)
        plain(made, 1)
    assert made.choose([one], 1)


def test_steps_with_prompts_are_not_among_those_without_drafts_that_are_timed() -> None:
    """Otherwise, nothing would be known of steps without drafts where prompts come together."""
    made, one = Speculation(Sevens(), StepBudget(StepLimits(64)), 4, 64, DraftsPay()), decode()
    for _ in range(5):
        made.observe(StepShape("prefill", 2, 20, 0), 0, 5e-3)
    assert not made.choose([one], 1)
    plain(made, PLAIN_STEPS)
    assert made.choose([one], 1)


def test_steps_without_drafts_come_earlier_after_the_number_of_decodes_has_changed() -> None:
    for before, after, is_moved in ((4, 7, True), (7, 4, True), (4, 5, False)):
        made, one = Speculation(Sevens(), StepBudget(StepLimits(64)), 4, 64, DraftsPay()), decode()
        for _ in range(PLAIN_STEPS):
            made.observe(StepShape("decode", before, before, 0), 0, 5e-3)
        for _ in range(MOVED_STEPS):
            assert made.choose([one], 1)
            made.observe(StepShape("decode", after, after + 4, 0), 4, 5e-3)
        assert bool(made.choose([one], 1)) != is_moved


def test_where_steps_with_drafts_and_without_alternate_the_latter_are_timed_now_and_then() -> None:
    """A step that follows one with drafts does not overlap with it, so its time is not that of others."""
    made, one = speculation(), decode()
    for _ in range(DRAFTED_STEPS // 2):
        assert made.choose([one], 1)
        drafted(made, 1)
        plain(made, 1)
    for _ in range(PLAIN_STEPS):
        assert not made.choose([one], 1)
        plain(made, 1)
    assert made.choose([one], 1)


def test_the_first_steps_with_drafts_are_several_however_long_they_take() -> None:
    made, one = speculation(StepPace()), decode()
    for i in range(FIRST_PROBES):
        assert made.choose([one], 1)
        drafted(made, 1, seconds=60e-3 if i == 0 else 5.5e-3)
        made.verified(one, 4, 3)
    assert made.choose([one], 1), "the first one waited for what is done once"


def test_a_probe_is_of_few_sequences() -> None:
    made = speculation(StepPace())
    batch = [decode(str(i)) for i in range(2 * PROBE_SEQUENCES)]
    for one in batch:
        for _ in range(30):
            made.verified(one, 4, 0)
    plain(made, PROBE_STEPS)
    assert list(map(len, made.choose(batch, 16).values())) == [PROBE_TOKENS] * PROBE_SEQUENCES


def test_a_draft_ends_before_the_last_token_of_the_answer() -> None:
    made = speculation()
    for max_tokens, most in ((1, 0), (2, 0), (3, 1), (4, 2), (50, 4)):
        one = decode(max_tokens=max_tokens)
        assert len(made.choose([one], 1).get(one, [])) == most


def test_a_step_chooses_no_more_tokens_than_it_has_rows_for() -> None:
    made = speculation(most_sampled=12)
    batch = [decode(str(i)) for i in range(5)]
    chosen = made.choose(batch, num_sequences=5)
    assert [len(chosen.get(one, [])) for one in batch] == [2, 2, 1, 1, 1]
    assert not made.choose(batch, num_sequences=12), "so many may start in the step"


class Forcing:
    """A grammar that forces tokens behind those of decode()."""

    def __init__(self, *tokens: int) -> None:
        self.forced = ForcedTokens()
        self.forced.replace(3, [], [(0, [4, *tokens])])


def test_forced_tokens_and_other_drafts_have_no_more_rows_together_than_there_are() -> None:
    made = speculation(most_sampled=12)
    bound, *free = decode("bound"), *(decode(str(i)) for i in range(4))
    bound.grammar = Forcing(8, 9, 10)  # type: ignore[assignment]  # as much of a grammar as is needed
    chosen = made.choose([bound, *free], num_sequences=5)
    assert chosen[bound] == [8, 9, 10]
    assert sum(map(len, chosen.values())) == 12 - 5


def test_forced_tokens_are_drafts_and_say_nothing_about_other_drafts() -> None:
    made = speculation()
    bound, free = decode("bound"), decode("free")
    bound.grammar = Forcing(8, 9)  # type: ignore[assignment]  # as much of a grammar as is needed
    assert made.choose([bound, free], 2) == {bound: [8, 9], free: [TOKEN] * 4}
    made.launched([Chunk(bound, 3, drafts=[8, 9]), Chunk(free, 5, drafts=[TOKEN] * 4)], 0.0)
    assert made.choose([], 2) == {}, "the next step is scheduled before this one's tokens are known"
    made.verified(bound, 2, 2)
    assert made._acceptances.of(bound).probability == made._acceptances.of(free).probability == FIRST_ACCEPTANCE
    made.verified(free, 2, 2)
    assert made._acceptances.of(free).probability > made._acceptances.of(bound).probability
    bound.grammar = Forcing(*range(20))  # type: ignore[assignment]  # as above
    assert made.choose([bound, free], 2)[bound] == [0, 1, 2, 3], "no more than may be drafted"
    bound.grammar = Forcing()  # type: ignore[assignment]  # as above
    assert made.choose([bound, free], 2)[bound] == [TOKEN] * 4


def test_without_a_drafter_only_forced_tokens_are_drafted() -> None:
    made = Speculation(None, StepBudget(StepLimits(64)), 4, 64, DraftsPay())
    plain(made, PLAIN_STEPS)
    free, bound = decode("free"), decode("bound")
    bound.grammar = Forcing(8, 9)  # type: ignore[assignment]  # as much of a grammar as is needed
    assert made.choose([free, bound], 2) == {bound: [8, 9]}
    bound.grammar = Forcing()  # type: ignore[assignment]  # as above
    assert made.choose([free, bound], 2) == {}
    assert free not in made._acceptances._by_sequence, "a sequence that nobody drafts for costs nothing"
    made.release(free)


def test_forced_tokens_are_drafted_however_wrong_other_drafts_were() -> None:
    made, one = speculation(DraftsCost(0.5)), decode()
    drafted(made, FIRST_PROBES)
    for _ in range(30):
        made.verified(one, 4, 0)
    assert not made.choose([one], 1)
    one.grammar = Forcing(8, 9)  # type: ignore[assignment]  # as much of a grammar as is needed
    assert made.choose([one], 1) == {one: [8, 9]}
    one.tokens[-1] = UNKNOWN
    assert made.needs_tokens([Chunk(one, 1)], [one], 1), "what follows the token in flight is known"


def test_prompts_and_tokens_in_flight_get_no_drafts() -> None:
    made = speculation()
    prompt, flying, known = decode("prompt"), decode("flying"), decode("known")
    prompt.num_computed = 0
    flying.tokens[-1] = UNKNOWN
    assert set(made.choose([prompt, flying, known], 3)) == {known}


def test_steps_overlap_unless_drafts_are_in_flight_or_would_follow_a_token_in_flight() -> None:
    made, one = speculation(), decode()
    one.tokens[-1] = UNKNOWN
    assert made.needs_tokens([Chunk(one, 3, drafts=[5, 6])], [], 1)
    assert made.needs_tokens([Chunk(one, 1)], [one], 1)
    drafter: Any = made.drafter
    [wanted] = drafter.wanted
    assert (wanted.num_known, wanted.most) == (3, 5), "the first one is the token in flight"
    drafter.propose = lambda wanted: [[TOKEN] for _ in wanted]
    assert not made.needs_tokens([Chunk(one, 1)], [one], 1), "nothing would follow it"


def test_an_adapters_next_sequence_begins_where_the_last_ones_ended() -> None:
    made = speculation(DraftsCost(0.3))
    good, bad = decode("g", digest="good"), decode("b", digest="bad")
    drafted(made, FIRST_PROBES)
    assert {len(draft) for draft in made.choose([good, bad], 2).values()} == {1}
    for _ in range(20):
        made.verified(good, 4, 4)
        made.verified(bad, 4, 0)
    later = decode("g2", digest="good"), decode("b2", digest="bad")
    chosen = made.choose(later, 2)
    assert [len(chosen.get(one, [])) for one in later] == [4, 0]
    made.release(good)
    assert len(made.choose([decode("g3", digest="good")], 1)) == 1


def test_drafts_that_do_not_pay_are_tried_again_after_many_steps() -> None:
    made, one = speculation(StepPace()), decode()
    for _ in range(20):
        plain(made, 2)
        drafted(made, 1, seconds=20e-3)
        made.verified(one, 4, 1)
    plain(made, 1)
    assert not made.choose([one], 1), "four times as long, for one token more"
    plain(made, PROBE_STEPS - 2)
    assert not made.choose([one], 1)
    plain(made, 1)
    assert len(made.choose([one], 1)[one]) >= PROBE_TOKENS
    for _ in range(60):
        plain(made, 2)
        drafted(made, 1)
        made.verified(one, 4, 4)
    assert len(made.choose([one], 1)[one]) == 4, "they have become cheap"


def test_a_certain_drafter_is_asked_only_where_its_drafts_pay_and_what_it_has_is_verified() -> None:
    """The drafter has fewer tokens than were expected of it, since a model has not caught up."""

    class Halves(Sevens):
        def propose(self, wanted: Many[Wanted]) -> list[list[int]]:
            return [draft[:1] for draft in super().propose(wanted)]

    class FourPay(DraftsPay):
        def best_count(
            self,
            num_decodes: int,  # noqa: ARG002
            counts: Many[int],
            accepted: Many[float],  # noqa: ARG002
            token_s: float,  # noqa: ARG002
        ) -> int:
            return 4 if 4 in counts else 0

    for most, expected in ((4, 1), (3, 0)):
        drafter, one = Halves(), decode()
        made = Speculation(drafter, StepBudget(StepLimits(64)), most, 64, FourPay(), is_certain=True)
        plain(made, PLAIN_STEPS)
        drafted(made, FIRST_PROBES)
        one.tokens.append(UNKNOWN)
        one.num_computed += 1
        assert made.needs_tokens([], [one], 1) == bool(expected)
        assert not drafter.wanted, "it is not asked before the token is known"
        one.tokens[-1] = 5
        assert len(made.choose([one], 1).get(one, [])) == expected
        assert bool(drafter.wanted) == bool(expected)


def test_a_step_without_drafts_does_not_count_the_time_of_a_drafter_that_had_none() -> None:
    """A model that catches up with a long prompt takes its time and has no drafts yet."""

    class Nothing(Sevens):
        def propose(self, wanted: Many[Wanted]) -> list[list[int]]:
            clock[0] += 20e-3
            return [[] for _ in wanted]

    clock = [0.0]
    pace, limits = StepPace(), StepBudget(StepLimits(64))
    made = Speculation(Nothing(), limits, 4, 64, pace, is_certain=True, clock=lambda: clock[0])
    plain(made, PLAIN_STEPS)
    assert made.choose([decode()], 1) == {}
    undrafted_s = made.observe(StepShape("decode", 1, 1, 0), 0, 25e-3)
    assert 4.9e-3 < undrafted_s < 5.1e-3
    assert pace._plain.at(1, 0.0, 1) < 6e-3


@pytest.mark.parametrize(("catch_up_s", "pays"), [(1e-3, True), (0.1, False)])
def test_what_a_drafter_takes_before_it_drafts_counts_against_its_drafts(catch_up_s: float, pays: bool) -> None:
    """A draft model computes each new prompt. Where answers are short, its drafts may not make up for that."""
    clock = [0.0]

    class OnceInTwo(Sevens):
        num_asked = 0

        def propose(self, wanted: Many[Wanted]) -> list[list[int]]:
            self.num_asked += 1
            catches_up = self.num_asked % 2 == 1
            clock[0] += catch_up_s if catches_up else 0.0
            return [[] if catches_up else [TOKEN] * entry.most for entry in wanted]

    limits, one = StepBudget(StepLimits(64)), decode()
    made = Speculation(OnceInTwo(), limits, 4, 64, is_certain=True, clock=lambda: clock[0])
    plain(made, PLAIN_STEPS)
    for _ in range(40):
        began_s = clock[0]
        if made.choose([one], 1):
            drafted(made, 1)
            made.verified(one, 4, 4)
        else:
            plain(made, 1, seconds=5e-3 + clock[0] - began_s)
    assert made._choice.pay(1, [(one, 4)], (), limits.token_s) == pays


def test_the_device_waits_for_the_host_behind_drafts_from_the_last_known_token_to_the_launch() -> None:
    class Idled(StepPace):
        def __init__(self) -> None:
            super().__init__()
            self.found: list[tuple[int, float]] = []

        def idled(self, num_decodes: int, seconds: float) -> None:
            self.found.append((num_decodes, seconds))

    class SlowAndWithoutDrafts(Sevens):
        def propose(self, wanted: Many[Wanted]) -> list[list[int]]:
            now[0] += 100.0
            return [[] for _ in wanted]

    now, pace, one, other = [0.0], Idled(), decode(), decode("other")
    limits = StepBudget(StepLimits(64))
    made = Speculation(SlowAndWithoutDrafts(), limits, 4, 64, pace, is_certain=True, clock=lambda: now[0])
    plain(made, PLAIN_STEPS)

    def launch(in_flight: Chunk, following: Many[Chunk]) -> None:
        """The step in flight takes 5 s. The drafter takes 100 s before the next one, and the host 2 s to launch it."""
        made.needs_tokens([in_flight], [], 1)
        now[0] += 5.0
        made.observe(StepShape("decode", 1, in_flight.num_tokens, 0), len(in_flight.drafts), 5.0)
        assert made.choose([decode("asks for drafts")], 1) == {}
        now[0] += 2.0
        launched_s = now[0]
        now[0] += 1.0
        made.launched(following, launched_s)

    with_drafts, without = Chunk(one, 3, drafts=[TOKEN, TOKEN]), Chunk(one, 1)
    launch(with_drafts, [with_drafts])
    assert not pace.found, "it is part of the time of the second step with drafts"
    launch(with_drafts, [without, Chunk(other, 8)])
    assert pace.found == [(2, 2.0)]
    launch(without, [without])
    assert len(pace.found) == 1, "these steps overlap"
    assert made.needs_tokens([with_drafts], [], 1)
    made.times.nothing_to_launch()
    now[0] += 1000.0
    made.launched([Chunk(other, 8)], now[0])
    assert len(pace.found) == 1, "there was nothing to do"
