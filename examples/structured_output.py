"""Requests an answer that is always an object of a given class, whatever the model would otherwise write.

It needs `pip install openai`.

    python examples/structured_output.py demo
"""

import os
import sys
from typing import Literal

import openai
import pydantic


class Weather(pydantic.BaseModel):
    sky: Literal["clear", "cloudy"]
    degrees: int = pydantic.Field(ge=-40, le=50)


with openai.OpenAI(
    base_url=os.environ.get("LORAFLEET_URL", "http://127.0.0.1:8000") + "/v1",
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
) as client:
    answer = client.chat.completions.parse(
        model=sys.argv[1],
        messages=[{"role": "user", "content": "How is the weather in Spain?"}],
        response_format=Weather,
        max_tokens=300,
        temperature=0,
    )
    print(repr(answer.choices[0].message.parsed))

    chosen = client.chat.completions.create(
        model=sys.argv[1],
        messages=[{"role": "user", "content": "Is a lime green or blue?"}],
        extra_body={"structured_outputs": {"choice": ["green", "blue"]}},
    )
    print(chosen.choices[0].message.content)
