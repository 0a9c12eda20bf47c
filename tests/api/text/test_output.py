from __future__ import annotations

import random
from typing import Any

import pytest

from lorafleet.api.text.output import Delta, OutputProcessor
from lorafleet.api.text.tokenizer import Tokenizer
from lorafleet.protocol.messages import FinishReason, TokenLogprobs, TokenOutput
from lorafleet.protocol.sampling_params import SamplingParams


def run(
    tokenizer: Tokenizer,
    ids: list[int],
    *,
    finish: FinishReason = "length",
    stop_token_id: int | None = None,
    per_output: int = 1,
    **params: Any,
) -> tuple[OutputProcessor, list[Delta]]:
    """Feeds ids as the engine would, until the answer has ended."""
    processor = OutputProcessor(tokenizer, [], SamplingParams(max_tokens=None, **params))
    deltas = []
    for at in range(0, len(ids), per_output):
        chunk = ids[at : at + per_output]
        last = at + per_output >= len(ids)
        logprobs = [TokenLogprobs(i, -0.5, 1, [i], [-0.5]) for i in chunk] if "logprobs" in params else None
        deltas.append(
            processor.push(
                TokenOutput(
                    request_id="r",
                    token_ids=chunk,
                    logprobs=logprobs,
                    finish_reason=finish if last else None,
                    stop_token_id=stop_token_id if last else None,
                )
            )
        )
        if processor.finish_reason is not None:
            break
    return processor, deltas


def text_of(deltas: list[Delta]) -> str:
    return "".join(d.text for d in deltas)


def test_text_ends_before_the_stop_string_and_none_of_it_leaks(tokenizer: Tokenizer) -> None:
    processor, deltas = run(tokenizer, tokenizer.encode("the story END of it"), stop=["END"])
    assert text_of(deltas) == "the story "
    assert (processor.finish_reason, deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", "stop", "END")


def test_include_stop_str_in_output_keeps_the_stop_string(tokenizer: Tokenizer) -> None:
    _, deltas = run(tokenizer, tokenizer.encode("the END is"), stop="END", include_stop_str_in_output=True)
    assert text_of(deltas) == "the END"


@pytest.mark.parametrize("stop", ["日本", "本語", "🎉", "é w", "\ufffd"])
def test_stop_strings_are_found_across_bytes_of_characters(tokenizer: Tokenizer, stop: str) -> None:
    text = "x日本語🎉é wé\ufffdz"
    ids = [i for char in text for i in tokenizer.encode(char)]
    _, deltas = run(tokenizer, ids, stop=[stop])
    assert text_of(deltas) == text[: text.index(stop)]


def test_text_that_only_began_like_a_stop_is_shown_after_all(tokenizer: Tokenizer) -> None:
    processor, deltas = run(tokenizer, tokenizer.encode("an EN"), stop=["END"])
    assert text_of(deltas) == "an EN"
    assert processor.finish_reason == "length"


def test_text_does_not_depend_on_how_many_tokens_an_output_carries(tokenizer: Tokenizer) -> None:
    rng = random.Random(3)
    for _ in range(300):
        text = "".join(rng.choice("abé日") for _ in range(12))
        ids = tokenizer.encode(text)
        stops = ["".join(rng.choice("abé日") for _ in range(rng.randrange(1, 4))) for _ in range(3)]
        results = set()
        for per_output in (1, 2, 100):
            processor, deltas = run(tokenizer, ids, stop=stops, per_output=per_output)
            results.add((text_of(deltas), deltas[-1].stop_reason, processor.num_tokens))
        assert len(results) == 1


def test_tokens_and_logprobs_wait_for_their_text_and_end_with_the_stop(tokenizer: Tokenizer) -> None:
    ids = [i for char in "a EDEND more" for i in tokenizer.encode(char)]
    processor, deltas = run(tokenizer, ids, stop=["END"], logprobs=0)
    shown = [i for d in deltas for i in d.token_ids]
    assert tokenizer.decode(shown) == "a EDEND"
    assert [e.token_id for d in deltas for e in d.logprobs or []] == shown
    assert [o for d in deltas for o in d.offsets] == [0, 1, 2, 3, 4, 4, 4]
    assert processor.num_tokens == 7
    assert [len(d.token_ids) for d in deltas] == [1, 1, 0, 2, 0, 0, 3]


def test_tokens_of_one_character_become_visible_together(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a") + [
        next(i for i in range(320) if tokenizer.token_bytes(i) == bytes([b])) for b in "é".encode()
    ]
    _, deltas = run(tokenizer, ids, logprobs=0)
    assert [(d.text, len(d.token_ids)) for d in deltas] == [("a", 1), ("", 0), ("é", 2)]
    assert [o for d in deltas for o in d.offsets] == [0, 1, 1]


def test_eos_is_no_text(tokenizer: Tokenizer) -> None:
    eos = tokenizer.eos_token_id
    assert eos is not None
    for options in ({}, {"skip_special_tokens": False}, {"logprobs": 0}):
        processor, deltas = run(tokenizer, [*tokenizer.encode("hi"), eos], finish="stop", stop_token_id=eos, **options)
        assert text_of(deltas) == "hi"
        assert (processor.finish_reason, deltas[-1].stop_reason) == ("stop", None)


def test_a_stop_token_is_named_and_shown_only_when_asked_for(tokenizer: Tokenizer) -> None:
    token = tokenizer.encode("!")[-1]
    ids = [*tokenizer.encode("hi"), token]
    for include, want in ((False, "hi"), (True, "hi!")):
        _, deltas = run(
            tokenizer,
            ids,
            finish="stop",
            stop_token_id=token,
            stop_token_ids=[token],
            include_stop_str_in_output=include,
        )
        assert (text_of(deltas), deltas[-1].stop_reason) == (want, token)


def test_stop_strings_do_not_count_before_min_tokens(tokenizer: Tokenizer) -> None:
    ids = [i for char in "abcabc" for i in tokenizer.encode(char)]
    _, deltas = run(tokenizer, ids, stop=["b"], min_tokens=2)
    assert text_of(deltas) == "abca"
    _, deltas = run(tokenizer, ids, stop=["b", "bz"], min_tokens=2)
    assert text_of(deltas) == "abca"


def test_special_tokens_are_shown_when_asked_for(tokenizer: Tokenizer) -> None:
    start = tokenizer._backend.get_vocab()["<|im_start|>"]
    assert text_of(run(tokenizer, [start], skip_special_tokens=False)[1]) == "<|im_start|>"
    assert text_of(run(tokenizer, [start])[1]) == ""


def test_an_unfinished_character_is_flushed_at_the_end(tokenizer: Tokenizer) -> None:
    half = next(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == b"\xf0")
    for options in ({}, {"logprobs": 0}, {"stop": "x"}):
        _, deltas = run(tokenizer, [*tokenizer.encode("a"), half], **options)
        assert text_of(deltas) == "a\ufffd"
        assert sum(len(d.token_ids) for d in deltas) == 2
