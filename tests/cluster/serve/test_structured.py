"""Structured output over HTTP, by the client that people use."""

from __future__ import annotations

import re
from typing import Literal

import openai
import pydantic
import pytest

from tests.cluster.harness import SharedServer

pytestmark = pytest.mark.xdist_group("shared_server")


class Weather(pydantic.BaseModel):
    """Nothing in it can be longer than the context, whatever random weights make of the blanks."""

    sky: Literal["clear", "cloudy"]
    degrees: int = pydantic.Field(ge=-40, le=50)
    windy: bool


@pytest.fixture
def client(shared_server: SharedServer):
    with openai.OpenAI(base_url=shared_server.running.url + "/v1", api_key="none", timeout=120) as client:
        yield client


@pytest.mark.parametrize("model", ["base", "ref1"])
def test_openais_parse_gives_an_object_of_the_model_asked_for(client: openai.OpenAI, model: str):
    answer = client.chat.completions.parse(
        model=model,
        messages=[{"role": "user", "content": "how is the weather?"}],
        response_format=Weather,
        max_tokens=950,
        seed=1,
    )
    assert answer.choices[0].finish_reason == "stop"
    assert isinstance(answer.choices[0].message.parsed, Weather)


def test_a_stream_and_a_completion_match_too(client: openai.OpenAI):
    pattern = r"[A-Z]{2}-[0-9]{4}"
    chunks = client.chat.completions.create(
        model="base",
        messages=[{"role": "user", "content": "a code"}],
        max_tokens=50,
        stream=True,
        extra_body={"structured_outputs": {"regex": pattern}},
    )
    assert re.fullmatch(pattern, "".join(chunk.choices[0].delta.content or "" for chunk in chunks))
    whole = client.completions.create(
        model="ref0", prompt="left or right?", max_tokens=50, n=3, extra_body={"guided_choice": ["left", "right"]}
    )
    assert {choice.text for choice in whole.choices} <= {"left", "right"}


def test_a_schema_that_cannot_be_enforced_is_a_400_that_names_its_place(client: openai.OpenAI):
    schema = {"type": "object", "properties": {"tags": {"type": "array", "uniqueItems": True}}}
    with pytest.raises(openai.BadRequestError, match=r"at /properties/tags: .*uniqueItems"):
        client.chat.completions.create(
            model="base",
            messages=[{"role": "user", "content": "hi"}],
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
            stream=True,
        )
