"""A server's answers are read as the engine's own are."""

from __future__ import annotations

from contextlib import closing

import pytest

from lorafleet.protocol.errors import InvalidRequest, QueueFull
from lorafleet.protocol.messages import TokenLogprobs
from lorafleet.tools.examples import Example
from lorafleet.tools.server_runner import ATTEMPTS, ServerRunner
from tests.api.conftest import base_url, catalog, config, engine, front, holder  # noqa: F401  fixtures


@pytest.fixture
def runner(base_url):  # noqa: F811  the fixture above
    made = ServerRunner(f"{base_url}/v1/", {"base": "llama", "a": "sql"})
    yield made
    made.close()


def test_prompts_are_tokenized_there(runner, tokenizer):
    assert runner.encode(Example("hello world")) == tokenizer.encode("hello world")
    chat = Example(messages=({"role": "user", "content": "hello"},))
    assert runner.encode(chat) == tokenizer.encode(tokenizer.render_chat(chat.messages))
    assert runner.encode_answer("END") == tokenizer.encode("END", add_special_tokens=False)
    assert runner.decode(tokenizer.encode("the story")) == "the story"


def test_answers_come_with_their_end_from_the_model_that_was_asked(runner, tokenizer):
    prompts = [tokenizer.encode(text) for text in ("one", "another")]
    [one, other] = runner.generate("a", prompts, 50)
    assert tokenizer.decode(one) == tokenizer.decode(other) == "sql wörld 🎉"
    assert one[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(runner.generate("base", prompts, 3)[0]) == tokenizer.decode(
        tokenizer.encode("base wörld")[:3]
    )


def test_scores_have_the_tokens_own_entry_and_the_best(runner):
    [[first, second]] = runner.score("a", [[70, 71]], 1)
    assert first is None
    assert second == TokenLogprobs(71, -0.5, 2, [40], [-0.25])
    [[_, second]] = runner.score("a", [[70, 71]], 0)
    assert (second.logprob, second.top_ids) == (-0.5, [])


def test_a_busy_server_is_asked_again(base_url, engine):  # noqa: F811  the fixtures above
    engine.fail_after, engine.failure = 0, QueueFull("come later", retry_after_s=2.0)
    waits = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        engine.fail_after = None

    with closing(ServerRunner(base_url, {"a": "sql"}, sleep=wait)) as runner:
        assert runner.generate("a", [[70]], 2)
    assert waits == [2.0]


def test_a_server_that_stays_busy_is_given_up_at_once_after_the_last_attempt(base_url, engine):  # noqa: F811
    engine.fail_after, engine.failure = 0, QueueFull("come later", retry_after_s=2.0)
    waits = []
    with (
        closing(ServerRunner(base_url, {"a": "sql"}, sleep=waits.append)) as runner,
        pytest.raises(InvalidRequest, match="429: come later"),
    ):
        runner.generate("a", [[70]], 2)
    assert waits == [2.0] * (ATTEMPTS - 1)


def test_a_servers_refusal_comes_in_its_words(runner):
    with pytest.raises(InvalidRequest, match=r"400.*token id 100000"):
        runner.generate("a", [[100000]], 2)
