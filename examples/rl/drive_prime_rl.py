"""Drives prime-rl's client of its inference servers against a running server.

    python examples/rl/drive_prime_rl.py http://127.0.0.1:8000/v1 MODEL ADAPTER_FOLDER

It needs prime-rl's src/ on the path, renderers, httpx, openai and tenacity. verifiers is stubbed, since nothing is
rolled out here. prime-rl samples through renderers.client, which this script calls with token IDs.
"""

import asyncio
import sys
from pathlib import Path
from types import SimpleNamespace

from stub_imports import stub

stub("verifiers", "prime_rl.configs", "prime_rl.utils.logger", "vllm")
import prime_rl.utils.client as client  # noqa: E402  # Its imports must be stubbed before.
from openai import AsyncOpenAI  # noqa: E402
from renderers.client import generate  # noqa: E402

url, model, folder = sys.argv[1:]
NAME = "policy"


class Tokens:
    """The part of a renderer that a prompt of token IDs needs."""

    def get_stop_token_ids(self) -> list[int]:
        return [2]

    def parse_response(self, _: list[int], **__: object) -> SimpleNamespace:
        return SimpleNamespace(content="", reasoning_content=None, reasoning_complete=True, tool_calls=[])


def as_config(**more: object) -> SimpleNamespace:
    fields = {"base_url": url, "admin_base_url": None, "headers": {}, "headers_from_env": {}, "api_key_var": "NO_KEY"}
    return SimpleNamespace(**{**fields, **more})


async def main() -> None:
    client.get_logger = lambda: SimpleNamespace(info=print, debug=print, warning=print)
    admins = client.setup_admin_clients(as_config())
    await client.check_health(admins)
    await client.maybe_check_has_model(admins, model)
    sampler = AsyncOpenAI(base_url=url, api_key="none")
    for step in range(2):
        await client.update_weights(admins, Path(folder), lora_name=NAME, step=step)
        answer = await generate(
            client=sampler,
            renderer=Tokens(),
            messages=[],
            model=NAME,
            prompt_ids=[5, 6, 7],
            sampling_params={"max_tokens": 6, "temperature": 1.0},
            cache_salt=str(step),
        )
        print("sampled:", answer["completion_ids"], answer["completion_logprobs"], answer["finish_reason"])
    await client._pause_engines(admins, step=2)
    await client._resume_engines(admins)
    await client.unload_lora_adapter(admins, NAME)


asyncio.run(main())
