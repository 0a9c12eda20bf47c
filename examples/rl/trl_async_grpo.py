"""Trains an adapter for the demo model with TRL's AsyncGRPOTrainer, which samples from a running server.

The reward is the share of capitals among an answer's letters.

TRL takes its attention kernel, FlashAttention 3, from the Hugging Face Hub, and asks CUDA for the GPU's name. With
--torch-attention, torch computes the attention. With --cpu, there also need not be a GPU. README.md says how to install
TRL and start the server.

    python examples/rl/trl_async_grpo.py out [--torch-attention | --cpu]
"""

import argparse
import os
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer, TrainerCallback
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, packing

MODEL = Path(__file__).parents[2] / "demo" / "model"
THINGS = ("lime", "lemon", "tomato", "plum", "carrot", "banana", "cherry", "pumpkin")
# The model knows "Answer in capitals.", but not this: about one answer in thirty is in capitals before the training.
SYSTEM = "Answer loudly."
# TRL parses answers into messages. It knows the chat templates of many models, but not the demo's.
CHATML = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {"content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"}},
}


def share_of_capitals(completions: list[list[dict[str, str]]], **_: object) -> list[float]:
    """Returns one reward for each answer. The worker's process imports this module to call it."""
    letters = [[char for char in answer[0]["content"] if char.isalpha()] for answer in completions]
    return [sum(map(str.isupper, chars)) / max(len(chars), 1) for chars in letters]


class PrintReward(TrainerCallback):
    """Prints the mean reward of each step's answers."""

    def on_log(self, _args: object, state: object, _control: object, logs: dict, **_: object) -> None:
        if "reward" in logs:
            print(f"step {state.global_step}: reward {logs['reward']:.3f}", flush=True)


def torch_varlen_attention(
    q_THD: torch.Tensor,
    k_KHD: torch.Tensor,
    v_KHD: torch.Tensor,
    q_ends: torch.Tensor,
    k_ends: torch.Tensor,
    *_: int,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
) -> torch.Tensor:
    """Computes what FlashAttention's function of this name does. A segment's last query sees all of its keys."""
    assert causal and window_size == (-1, -1)
    parts = []
    for (q_start, q_end), (k_start, k_end) in zip(pairwise(q_ends.tolist()), pairwise(k_ends.tolist()), strict=True):
        q, k, v = q_THD[q_start:q_end], k_KHD[k_start:k_end], v_KHD[k_start:k_end]
        seen_TK = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).tril(len(k) - len(q))
        attended = torch.nn.functional.scaled_dot_product_attention(
            *(part.transpose(0, 1) for part in (q, k, v)), attn_mask=seen_TK, scale=softmax_scale, enable_gqa=True
        )
        parts.append(attended.transpose(0, 1))
    return torch.cat(parts)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--url", default=os.environ.get("LORAFLEET_URL", "http://127.0.0.1:8000"))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--torch-attention", action="store_true")
    parser.add_argument("--cpu", action="store_true")
    given = parser.parse_args()
    if given.torch_attention or given.cpu:
        packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=torch_varlen_attention)
    if given.cpu:
        torch.set_num_threads(1)  # The other core is the server's.
        torch.cuda.get_device_name = lambda _device: "no GPU"

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.response_template = CHATML
    system = {"role": "system", "content": SYSTEM}
    prompts = [[system, {"role": "user", "content": f"What colour is a {thing}?"}] for thing in THINGS]
    trainer = AsyncGRPOTrainer(
        model=str(MODEL),
        reward_funcs=share_of_capitals,
        args=AsyncGRPOConfig(
            output_dir=str(given.folder),
            vllm_server_base_url=given.url,
            max_steps=given.steps,
            max_staleness=2,
            num_generations=8,
            per_device_train_batch_size=32,
            token_budget=0,  # 32 answers a step, rather than as many as fit into the server's context
            max_completion_length=24,
            learning_rate=1e-3,
            seed=0,
            use_cpu=given.cpu,
            bf16=False,
            report_to="none",
            disable_tqdm=True,
            save_strategy="no",
        ),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer,
        callbacks=[PrintReward()],
        peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    trainer.train()
    print(f"served as trl-policy-v{trainer.model_version}")


if __name__ == "__main__":
    main()
