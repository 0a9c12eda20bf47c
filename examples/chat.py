"""Asks the base and several adapters the same question; the model name of a request selects an adapter.

It needs `pip install openai`.

    python examples/chat.py demo shout pirate json
"""

import os
import sys

import openai

with openai.OpenAI(
    base_url=os.environ.get("LORAFLEET_URL", "http://127.0.0.1:8000") + "/v1",
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
) as client:
    for model in sys.argv[1:]:
        answer = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "What colour is a lime?"}],
            max_tokens=40,
            temperature=0,
        )
        print(f"{model}: {answer.choices[0].message.content}")
