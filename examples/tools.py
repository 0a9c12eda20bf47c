"""Makes the model call a function.

It needs `pip install openai`, and a model whose chat template shows it tools (the bundled demo's does not).

    python examples/tools.py llama
"""

import json
import os
import sys
from typing import Any

import openai

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Madrid", "Paris"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def weather(city: str) -> str:
    return f"It rains in {city}."


with openai.OpenAI(
    base_url=os.environ.get("LORAFLEET_URL", "http://127.0.0.1:8000") + "/v1",
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
) as client:
    messages: list[Any] = [{"role": "user", "content": "How is the weather in Madrid?"}]
    asked = client.chat.completions.create(
        model=sys.argv[1],
        messages=messages,
        tools=[WEATHER],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=200,
        temperature=0,
    )
    messages.append(asked.choices[0].message.model_dump(exclude_none=True))
    for call in asked.choices[0].message.tool_calls or []:
        print(f"{call.function.name}({call.function.arguments})")
        result = weather(**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    answer = client.chat.completions.create(model=sys.argv[1], messages=messages, max_tokens=40)
    print(answer.choices[0].message.content)
