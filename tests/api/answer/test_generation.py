"""What the samples of one request may be together."""

from __future__ import annotations

from typing import Any

import pytest

from lorafleet.api.answer.generation import Task, group_of
from lorafleet.api.request.prompts import Prompt
from lorafleet.api.request.request_deadline import RequestDeadline
from lorafleet.protocol.errors import InvalidRequest
from lorafleet.protocol.limits import MAX_ANSWER_LOGPROBS, MAX_PROMPT_TOKENS
from lorafleet.protocol.sampling_params import SamplingParams


def task(num_tokens: int, n: int) -> Task:
    model: Any = None
    return Task(Prompt([1] * num_tokens, None), model, SamplingParams(n=n))


NO_DEADLINE = RequestDeadline(None, 0.0)


def test_all_sequences_of_a_request_and_their_tokens_are_counted() -> None:
    group = group_of("r", [task(10, 3), task(5, 2)], NO_DEADLINE)
    assert (group.num_sequences, group.num_tokens) == (5, 40)
    assert group.name != group_of("r", [task(1, 1)], NO_DEADLINE).name


def test_prompts_that_are_sent_n_times_are_bounded_together() -> None:
    assert group_of("r", [task(MAX_PROMPT_TOKENS // 16, 16)], NO_DEADLINE).num_tokens == MAX_PROMPT_TOKENS
    with pytest.raises(InvalidRequest, match=f"{128 << 17} tokens in total.* {MAX_PROMPT_TOKENS} .*fewer answers"):
        group_of("r", [task(1 << 17, 128)], NO_DEADLINE)


def test_logprobs_of_prompts_are_bounded_together() -> None:
    model: Any = None
    prompt = Prompt([1] * (MAX_ANSWER_LOGPROBS // 64), None)
    assert group_of("r", [Task(prompt, model, SamplingParams(n=32, prompt_logprobs=1))], NO_DEADLINE)
    with pytest.raises(InvalidRequest, match=f"{21 << 21} logprobs in total.* {MAX_ANSWER_LOGPROBS} .*fewer logprobs"):
        group_of("r", [Task(prompt, model, SamplingParams(n=16, prompt_logprobs=20))] * 4, NO_DEADLINE)
