"""Drives the part of ART that talks to its inference server against a running lorafleet.

    python examples/rl/drive_art.py 127.0.0.1 8000 ADAPTER_FOLDER

It needs openpipe-art, httpx and torch. The trainers' libraries are stubbed, since nothing is trained.
"""

import asyncio
import sys

import httpx
from stub_imports import stub

stub("unsloth", "trl", "peft", "datasets", "litellm", "polars", "nest_asyncio", "setproctitle", "tblib", "PIL")
from art.unsloth.service import UnslothService  # noqa: E402  # Its imports must be stubbed before.

host, port, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
config = {"rollout_weights_mode": "lora", "trainer_gpu_ids": [0], "inference_gpu_ids": [1]}


async def main() -> None:
    service = UnslothService("policy", "base", config, "/tmp", _vllm_host=host, _vllm_port=port)
    for number in range(3):
        await service.register_lora_for_step(number, folder)
        body = {"model": f"policy@{number}", "prompt": "Hello", "max_tokens": 4, "logprobs": 1}
        async with httpx.AsyncClient(base_url=f"http://{host}:{port}") as client:
            answer = await client.post("/v1/completions", json=body)
        print(f"step {number}:", answer.json()["choices"][0]["text"])
        await service.prune_loaded_adapters(retain_steps={number})
    print("loaded:", service._loaded_adapter_steps)
    await service._unload_adapter(0)  # It is gone already: ART accepts the 404.
    await service._unload_adapter(2)


asyncio.run(main())
