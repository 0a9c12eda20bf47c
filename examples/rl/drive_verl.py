"""Drives verl's HTTP clients of SGLang against a running server: each step pushes an adapter from memory.

    python examples/rl/drive_verl.py 127.0.0.1 8000 ADAPTER_FOLDER

It needs verl, aiohttp and requests. SGLang is stubbed, because the clients import only the types of its requests.
"""

import asyncio
import json
import sys
from pathlib import Path
from types import SimpleNamespace

from stub_imports import stub

stub("sglang")
from verl.workers.rollout.sglang_rollout import http_server_engine  # noqa: E402  # SGLang must be stubbed before.

NAME = "verl_actor_lora_name"  # verl's SGLANG_LORA_NAME
host, port, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
config = json.loads((folder / "adapter_config.json").read_text())
weights = (folder / "adapter_model.safetensors").read_bytes()  # A trainer has safetensors.torch.save(tensors).
http_server_engine.ServerArgs = lambda **fields: SimpleNamespace(node_rank=0, is_embedding=False, **fields)
settings = {"host": host, "port": port, "launch_server": False, "max_attempts": 1}


async def step(engine: http_server_engine.AsyncHttpServerAdapter) -> None:
    """Does what verl's ServerAdapter.update_weights does, and then samples."""
    models = await engine.available_models()
    if any(model["id"] == NAME for model in models["data"]):
        await engine.unload_lora_adapter(NAME)
    push = SimpleNamespace(lora_name=NAME, config_dict=config, serialized_named_tensors=[weights])
    print("loaded:", (await engine.load_lora_adapter_from_tensor(push))["success"])
    await engine.flush_cache()
    sampling = {"max_new_tokens": 8, "temperature": 1.0, "top_p": 1.0, "top_k": -1}
    answer = await engine.async_generate(
        input_ids=[5, 6, 7, 8], sampling_params=sampling, lora_path=NAME, return_logprob=True
    )
    print("sampled:", answer["meta_info"]["output_token_logprobs"])


async def main() -> None:
    engine = http_server_engine.AsyncHttpServerAdapter(**settings)
    await step(engine)
    await step(engine)
    await engine.abort_request(abort_all=True)
    await engine.unload_lora_adapter(NAME)


asyncio.run(main())
sync = http_server_engine.HttpServerAdapter(**settings)
print("base:", sync.generate("Hello", {"max_new_tokens": 4, "temperature": 0})["text"])
