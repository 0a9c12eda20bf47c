from conversations import Conversations, count_endless_hits, draw
from http_load import Call

LOAD = Conversations(
    rate=2.0,
    duration_s=20.0,
    adapters=("a", "b", "c"),
    turns=3,
    system_tokens=32,
    turn_tokens=16,
    think_s=1.0,
    token_ids=(10, 200),
    seed=1,
)


def test_each_turn_repeats_the_turns_before_it() -> None:
    calls = draw(LOAD)
    assert calls == draw(LOAD) and len(calls) % 3 == 0 and len(calls) > 60
    assert [call.at_s for call in calls] == sorted(call.at_s for call in calls)
    longest = [call for call in calls if not any(_begins(other, call) for other in calls if other is not call)]
    assert len(longest) == len(calls) // 3
    for last in longest:
        turns = sorted((call for call in calls if _begins(last, call)), key=lambda call: len(call.prompt))
        assert len(turns) == 3 and [one.at_s for one in turns] == sorted(one.at_s for one in turns)


def _begins(whole: Call, part: Call) -> bool:
    return whole.model == part.model and whole.prompt[: len(part.prompt)] == part.prompt


def test_conversations_of_an_adapter_share_its_system_prompt() -> None:
    begins = {(call.model, tuple(call.prompt[:16])) for call in draw(LOAD)}
    assert len(begins) == len({model for model, _ in begins}) == 3


def test_an_endless_cache_has_the_whole_blocks_of_earlier_prompts() -> None:
    first = Call(0.0, "a", list(range(10, 20)), 1)
    assert count_endless_hits([first], 4) == 0
    assert count_endless_hits([first, first], 4) == 8
    assert count_endless_hits([first, Call(1.0, "a", [*range(10, 15), 99, *range(16, 30)], 1)], 4) == 4
    assert count_endless_hits([first, Call(1.0, "b", first.prompt, 1)], 4) == 0, "adapters share nothing"
    whole = Call(0.0, "a", list(range(10, 18)), 1)
    assert count_endless_hits([whole, whole], 4) == 4, "the last token is computed"
