"""Trains an adapter for the demo model with the parts of TRL's AsyncGRPOTrainer, which sample from a running server.

The reward is the share of capitals among an answer's letters. TRL's rollout worker samples and scores, TRL's queue
drops stale samples, and TRL's weight sync publishes each step's adapter. Only the loss and the optimizer are here,
because the trainer's own constructor and attention need CUDA. README.md says how to install TRL and start the server.

    python examples/rl/trl_async_grpo.py out
"""

import argparse
import itertools
import os
from collections import defaultdict
from pathlib import Path

import torch
from accelerate import Accelerator
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
from trl.experimental.async_grpo.async_grpo_trainer import RolloutQueueDataset, select_adapter_sync
from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker
from trl.experimental.async_grpo.vllm_client import VLLMClient

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


class AdapterSync(AsyncGRPOTrainer):
    """Has the trainer's weight sync, and what that reads of the trainer."""

    def __init__(
        self, model: PeftModel, args: AsyncGRPOConfig, client: VLLMClient, worker: AsyncRolloutWorker, lora_name: str
    ) -> None:
        self.model, self.args, self.vllm_client, self.rollout_worker = model, args, client, worker
        self.accelerator = Accelerator(cpu=True)
        self.model_version = 0
        self._lora_sync = True
        self._lora_name = lora_name
        self._lora_dir = str(Path(args.output_dir, ".vllm_lora").resolve())
        self._adapter_name = model.active_adapters[0]
        self._metrics = {"train": defaultdict(list)}

    def publish(self) -> None:
        self._sync_weight()


def policy_loss(model: PeftModel, samples: list[dict], pad: int, epsilon: float) -> torch.Tensor:
    """Returns GRPO's clipped loss, a mean over all generated tokens (arXiv 2402.03300)."""

    def padded(name: str, fill: float) -> torch.Tensor:
        rows = [torch.as_tensor(sample[name]) for sample in samples]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=fill)

    ids, generated = padded("input_ids", pad), padded("completion_mask", 0)[:, 1:].bool()
    logits = model(input_ids=ids).logits[:, :-1]  # Padding is on the right, where causal attention does not see it.
    logprobs = torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None])[..., 0]
    ratio = (logprobs - padded("old_log_probs", 0.0)[:, 1:]).exp()
    advantage = torch.tensor([sample["advantage"] for sample in samples])[:, None]
    gain = torch.min(ratio * advantage, ratio.clamp(1 - epsilon, 1 + epsilon) * advantage)
    return -gain[generated].mean()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--url", default=os.environ.get("LORAFLEET_URL", "http://127.0.0.1:8000"))
    parser.add_argument("--steps", type=int, default=40)
    given = parser.parse_args()
    torch.set_num_threads(1)  # The other core is the server's.

    args = AsyncGRPOConfig(
        output_dir=str(given.folder),
        vllm_server_base_url=given.url,
        max_staleness=2,
        num_generations=8,
        per_device_train_batch_size=32,
        max_completion_length=24,
        learning_rate=1e-3,
        seed=0,
        use_cpu=True,
        bf16=False,
    )
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.response_template = CHATML
    torch.manual_seed(args.seed)
    lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32), lora)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)

    client = VLLMClient(given.url)
    client.wait_for_server_ready()
    if not select_adapter_sync(client.get_server_info(), model, args):
        raise SystemExit("The server does not take adapters.")
    lora_name = "trl-policy"
    system = {"role": "system", "content": SYSTEM}
    prompts = [[system, {"role": "user", "content": f"What colour is a {thing}?"}] for thing in THINGS]
    worker = AsyncRolloutWorker(
        model_name=str(MODEL),
        lora_name=lora_name,
        dataset=Dataset.from_dict({"prompt": prompts}),
        reward_funcs=[share_of_capitals],
        processing_class=tokenizer,
        eos_token_ids=[tokenizer.eos_token_id],
        num_generations=args.num_generations,
        max_inflight_tasks=args.max_staleness * args.per_device_train_batch_size,
        queue_maxsize=args.queue_maxsize,
        vllm_server_url=args.vllm_server_base_url,
        max_tokens=args.max_completion_length,
        request_timeout=args.request_timeout,
    )
    sync = AdapterSync(model, args, client, worker, lora_name)
    sync.publish()
    worker.start()
    try:
        rollouts = RolloutQueueDataset(
            worker.rollout_buffer,
            lambda: sync.model_version,
            worker.check_health,
            args.heartbeat_stale_after_s,
            defaultdict(list),
            args.max_staleness,
        )
        queue = iter(rollouts)
        for step in range(1, given.steps + 1):
            samples = list(itertools.islice(queue, args.per_device_train_batch_size))
            policy_loss(model, samples, tokenizer.pad_token_id, args.epsilon).backward()
            optimizer.step()
            optimizer.zero_grad()
            sync.publish()
            reward = sum(sample["metrics"]["reward"] for sample in samples) / len(samples)
            print(f"step {step}: reward {reward:.3f}", flush=True)
    finally:
        worker.stop()
    print(f"served as {lora_name}-v{sync.model_version}")


if __name__ == "__main__":
    main()
