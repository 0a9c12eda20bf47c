"""Streams answers of several adapters at once, which share the steps of one engine.

It needs `pip install openai`.

    python examples/streaming.py demo shout pirate
"""

import asyncio
import os
import sys

import openai


async def stream(client: openai.AsyncOpenAI, model: str) -> None:
    chunks = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Count from two to seven."}],
        max_tokens=40,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    async for chunk in chunks:
        for choice in chunk.choices:
            print(f"{model}: {choice.delta.content!r}")
        if chunk.usage is not None:
            print(f"{model} wrote {chunk.usage.completion_tokens} tokens")


async def main() -> None:
    async with openai.AsyncOpenAI(
        base_url=os.environ.get("LORAFLEET_URL", "http://127.0.0.1:8000") + "/v1",
        api_key=os.environ.get("OPENAI_API_KEY", "none"),
    ) as client:
        await asyncio.gather(*(stream(client, model) for model in sys.argv[1:]))


asyncio.run(main())
