"""An 8B Llama with random weights and eight adapters, served by `lorafleet serve` on a GPU: answers over HTTP against
transformers + PEFT on the same weights. Needs 40 GB of disk and 120 GB of GPU memory."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from openai import AsyncOpenAI
from transformers import LlamaConfig, LlamaForCausalLM

from tests.cluster.harness import running_server
from tiny_models import ALL_TARGETS, tokenizer

pytestmark = [
    pytest.mark.xdist_group("own_server"),
    pytest.mark.gpu,
    pytest.mark.timeout(900),
]

SHAPE = LlamaConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=int(os.environ.get("LORAFLEET_TEST_LAYERS", "32")),
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=8192,
    rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    eos_token_id=1,
)
ADAPTERS: dict[str, dict[str, Any]] = {
    f"a{i}": {"r": rank, "lora_alpha": 2 * rank, "target_modules": targets}
    for i, (rank, targets) in enumerate(
        [
            (16, ALL_TARGETS),
            (8, ["q_proj", "v_proj"]),
            (64, ALL_TARGETS),
            (1, ["o_proj"]),
            (32, ["gate_proj", "up_proj", "down_proj"]),
            (5, ["q_proj", "k_proj", "v_proj", "o_proj"]),
            (16, ["down_proj"]),
            (48, ["k_proj", "up_proj"]),
        ]
    )
}
NUM_TOKENS = 32


def make(folder: Path) -> LlamaForCausalLM:
    """Writes model and adapters; returns the model, in bf16 on the GPU."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = LlamaForCausalLM._from_config(SHAPE, dtype=torch.bfloat16).eval()
    model.save_pretrained(folder / "model", max_shard_size="4GB")
    tokenizer().save_pretrained(folder / "model")
    for i, (name, options) in enumerate(ADAPTERS.items()):
        torch.manual_seed(100 + i)
        wrapped = peft.get_peft_model(model, peft.LoraConfig(**options))
        for parameter_name, parameter in wrapped.named_parameters():
            if "lora_" in parameter_name:
                torch.nn.init.normal_(parameter, std=0.02)
        wrapped.save_pretrained(folder / name)
        model = wrapped.unload()
    return model


async def ask_all(url: str, model: str, jobs: list[tuple[list[int], str | None]]) -> list[Any]:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300) as client:

        async def ask(ids: list[int], name: str | None) -> Any:
            extra = {"ignore_eos": True, "return_token_ids": True}
            answer = await client.completions.create(
                model=name or model, prompt=ids, max_tokens=NUM_TOKENS, temperature=0, logprobs=0, extra_body=extra
            )
            return answer.choices[0]

        await asyncio.gather(*(ask(*job) for job in jobs))  # warms up: kernels are compiled, adapters loaded
        started = time.perf_counter()
        answers = await asyncio.gather(*(ask(*job) for job in jobs))
        took_s = time.perf_counter() - started
        print(f"\n{len(jobs)} requests x {NUM_TOKENS} tokens in {took_s:.2f} s")
        return answers


@torch.inference_mode()
def scores(model: Any, jobs: list[tuple[list[int], str | None]], answers: list[Any]) -> list[torch.Tensor]:
    """Teacher-forced logprobs of each answer's tokens."""
    found = []
    for (ids, name), answer in zip(jobs, answers, strict=True):
        tokens = torch.tensor([ids + answer.model_extra["token_ids"]], device="cuda")
        with model.disable_adapter() if name is None else torch.inference_mode():
            if name is not None:
                model.set_adapter(name)
            logits = model(input_ids=tokens).logits[0, len(ids) - 1 : -1].float().log_softmax(-1)
        found.append(logits.gather(1, tokens[0, len(ids) :, None]).squeeze(1).cpu())
    return found


def test_answers_over_http_agree_with_transformers_and_peft(tmp_path: Path, prompt: Callable[[int], list[int]]) -> None:
    model = make(tmp_path)
    jobs = [(prompt(n), name) for n in (7, 130, 600) for name in (None, *ADAPTERS)]
    arguments = ["--model", str(tmp_path / "model"), "--served-model-name", "base", "--max-loras", "8"]
    arguments += ["--lora-modules", *(f"{name}={tmp_path / name}" for name in ADAPTERS)]
    arguments += ["--gpu-memory-utilization", "0.4", "--device", "cuda"]
    with running_server(arguments, tmp_path / "serve.log") as url:
        answers = asyncio.run(ask_all(url, "base", jobs))
    print((tmp_path / "serve.log").read_text())
    first, *others = ADAPTERS
    keep = {"autocast_adapter_dtype": False}  # else PEFT makes the adapters float32
    wrapped = peft.PeftModel.from_pretrained(model, tmp_path / first, adapter_name=first, **keep).eval()
    for name in others:
        wrapped.load_adapter(tmp_path / name, adapter_name=name, **keep)
    half = scores(wrapped, jobs, answers)
    for parameter in wrapped.parameters():  # .float() would also touch the rope's frequencies
        parameter.data = parameter.data.float()
    exact = scores(wrapped, jobs, answers)
    for name in (None, *ADAPTERS):
        rows = [i for i, job in enumerate(jobs) if job[1] == name]
        ours = [(torch.tensor(answers[i].logprobs.token_logprobs) - exact[i]).abs().mean().item() for i in rows]
        theirs = [(half[i] - exact[i]).abs().mean().item() for i in rows]
        print(f"{name}: error {sum(ours) / 3:.4f}, of transformers + PEFT in bf16 {sum(theirs) / 3:.4f}")
        assert sum(ours) < 1.5 * sum(theirs) + 0.006
