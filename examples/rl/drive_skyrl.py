"""Drives SkyRL's RemoteInferenceClient against a running server.

    python examples/rl/drive_skyrl.py http://127.0.0.1:8000 MODEL ADAPTER_FOLDER

It needs skyrl, Python 3.12 and aiohttp. Ray and vLLM are stubbed, since the client is plain HTTP.
"""

import asyncio
import sys

from stub_imports import stub

stub("jax", "ray", "vllm")
from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import (  # noqa: E402  # Stubs come before.
    RemoteInferenceClient,
)

url, model, folder = sys.argv[1:]
NAME = "skyrl-lora"


async def main() -> None:
    client = RemoteInferenceClient(url, [url], data_parallel_size=1, model_name=model, uses_lora_weight_sync=True)
    print("world size:", await client.get_world_size())
    for _ in range(2):
        await client.pause_generation()
        await client.load_lora_adapter(NAME, folder)
        await client.resume_generation()
        await client.reset_prefix_cache()
        sampling = {"max_tokens": 6, "temperature": 1.0, "logprobs": 1}
        batch = {"prompt_token_ids": [[5, 6, 7], [8, 9]], "sampling_params": sampling, "session_ids": ["a", "b"]}
        answer = await client.generate(batch, model=NAME)
        print("sampled:", answer["responses"], answer["response_logprobs"], answer["stop_reasons"])
    chunk = {"type": "encoded_text", "tokens": [5, 6, 7]}
    wanted = {"prompt": {"chunks": [chunk]}, "num_samples": 2, "include_prompt_logprobs": True, "model": NAME}
    wanted["sampling_params"] = {"max_tokens": 3, "temperature": 1.0, "seed": 1}
    sampled = await client.sample({"json": wanted})
    print("tinker:", [sequence["tokens"] for sequence in sampled["sequences"]], sampled["prompt_logprobs"])
    messages = [{"role": "user", "content": "Hello"}]
    chat = {"json": {"model": NAME, "messages": messages, "max_tokens": 4, "session_id": "a"}}
    print("chat:", (await client.chat_completion(chat))["choices"][0]["message"]["content"])
    print("rendered:", (await client.render_chat_completion(chat))["token_ids"])
    print("tokens:", await client.tokenize(["Hello"]))
    await client.finish_session("a")
    await client.unload_lora_adapter(NAME)
    await client.teardown()


asyncio.run(main())
