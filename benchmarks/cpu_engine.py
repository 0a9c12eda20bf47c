"""Compares tokens per second of the engine on a CPU with those of transformers' generate, on the demo model.

    python benchmarks/cpu_engine.py [--requests 16] [--tokens 64] [--threads 2] [--repeats 5] [--json FILE]

All arms sample greedily and use the same prompts and the same number of tokens. The arms are:

- transformers, one request after another;
- transformers, with all requests in one padded batch;
- lorafleet on the base;
- lorafleet over three adapters in one batch.

Each arm runs once to warm up. Then the arms take turns, so that a slowdown of the machine affects all of them. Medians
are compared.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from lorafleet.offline.llm import LLM, LoRARequest, Prompt, SamplingParams

ROOT = Path(__file__).parents[1]
PAD = 0


def transformers_arms(model: Path, prompts: list[list[int]], num_tokens: int) -> dict[str, Callable[[], None]]:
    hf = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    options: dict[str, Any] = {
        "max_new_tokens": num_tokens,
        "min_new_tokens": num_tokens,
        "do_sample": False,
        "pad_token_id": PAD,
    }

    @torch.inference_mode()
    def generate(batch: list[list[int]]) -> None:
        longest = max(map(len, batch))
        ids = torch.tensor([[PAD] * (longest - len(p)) + p for p in batch])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in batch])
        hf.generate(input_ids=ids, attention_mask=mask, **options)

    def one_by_one() -> None:
        for prompt in prompts:
            generate([prompt])

    return {"transformers, one after another": one_by_one, "transformers, one batch": lambda: generate(prompts)}


def lorafleet_arms(
    model: Path, adapters: list[Path], prompts: list[list[int]], num_tokens: int
) -> dict[str, Callable[[], None]]:
    # The arms repeat their prompts, and transformers computes them each time, so the prefix cache is off.
    llm = LLM(str(model), enable_lora=True, dtype="float32", device="cpu", enable_prefix_caching=False)
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    given: list[Prompt] = [{"prompt_token_ids": p} for p in prompts]
    requests = [LoRARequest(path.name, i + 1, str(path)) for i, path in enumerate(adapters)]
    mixed = [requests[i % len(requests)] for i in range(len(prompts))]

    def base() -> None:
        assert all(len(o.outputs[0].token_ids) == num_tokens for o in llm.generate(given, params))

    def over_adapters() -> None:
        assert all(len(o.outputs[0].token_ids) == num_tokens for o in llm.generate(given, params, mixed))

    return {"lorafleet, base": base, f"lorafleet, {len(adapters)} adapters": over_adapters}


def measure(arms: dict[str, Callable[[], None]], repeats: int) -> dict[str, float]:
    """Returns the median seconds of each arm."""
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(repeats + 1):
        for name, run in arms.items():
            started = time.perf_counter()
            run()
            if turn:
                seconds[name].append(time.perf_counter() - started)
    return {name: statistics.median(values) for name, values in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "demo" / "model")
    parser.add_argument("--adapters", type=Path, default=ROOT / "demo" / "adapters", help="folder of adapters")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(16, 48, (args.requests,), generator=generator).tolist()
    prompts = [torch.randint(10, 250, (n,), generator=generator).tolist() for n in lengths]
    adapters = sorted(path for path in args.adapters.iterdir() if path.is_dir())
    arms = transformers_arms(args.model, prompts, args.tokens)
    arms |= lorafleet_arms(args.model, adapters, prompts, args.tokens)
    seconds = measure(arms, args.repeats)
    tokens_per_s = {name: args.requests * args.tokens / value for name, value in seconds.items()}
    base = tokens_per_s["lorafleet, base"]
    print(f"{args.requests} requests x {args.tokens} tokens, float32, {args.threads} threads, {platform.machine()}")
    for name, value in tokens_per_s.items():
        print(f"{name:34} {value:9.0f} tokens/s   lorafleet's base is {base / value:5.2f} x")
    if args.json:
        args.json.write_text(json.dumps({"arguments": vars(args), "tokens_per_s": tokens_per_s}, default=str, indent=1))


if __name__ == "__main__":
    main()
