"""Compares the logprobs of sampled tokens with those that a trainer computes for them: transformers + PEFT.

    python benchmarks/train_serve_mismatch.py                              # the bundled demo model, on a CPU
    python benchmarks/train_serve_mismatch.py --layers 8 --device cuda     # random weights in the shape of an 8B Llama

Requests of the base and of the adapters are sampled together at temperature 1. The trainer then computes each sequence
by one forward pass, in the same dtype. The columns of the table, over all sampled tokens:

- KL: the estimate mean(exp(d) - 1 - d), where d is the trainer's logprob minus the server's;
- mean and max |d|;
- alone: the largest change of a logprob if the same request is sent alone, over tokens before the first that differs.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from lorafleet.offline.llm import LLM, LoRARequest, SamplingParams

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "demo"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
EIGHT_B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
    "max_position_embeddings": 8192,
}
NUM_ALONE = 4  # requests that are sent alone too


@dataclass(frozen=True)
class Served:
    """A base with adapters, and prompts for them."""

    base: Path
    adapters: dict[str, Path]
    prompts: list[list[int]]


@dataclass(frozen=True)
class Sampled:
    prompt: list[int]
    adapter: str | None
    tokens: list[int]
    logprobs: list[float]


def demo(count: int) -> Served:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(DEMO / "model")
    texts = json.loads((DEMO / "prompts.json").read_text())
    prompts = [tokenizer(texts[i % len(texts)])["input_ids"] for i in range(count)]
    return Served(DEMO / "model", {path.name: path for path in sorted((DEMO / "adapters").iterdir())}, prompts)


def random_8b(folder: Path, layers: int, count: int, device: str) -> Served:
    """Writes a random base with the number of layers, and three random adapters on all of its linears."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = LlamaForCausalLM(LlamaConfig(**EIGHT_B, num_hidden_layers=layers))
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder / "base")
    adapters = {}
    for i, rank in enumerate((8, 16, 64)):
        config = LoraConfig(r=rank, lora_alpha=rank, target_modules="all-linear", init_lora_weights=False)
        adapted = get_peft_model(model, config)
        for name, weight in adapted.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(weight, std=0.01)
        adapters[f"r{rank}"] = folder / f"adapter{i}"
        adapted.save_pretrained(adapters[f"r{rank}"])
        model = adapted.unload()
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(20, 400, (count,), generator=generator).tolist()
    prompts = [torch.randint(5, 128_000, (n,), generator=generator).tolist() for n in lengths]
    return Served(folder / "base", adapters, prompts)


def sample(
    served: Served, dtype: str, device: str, batch_invariant: bool, max_tokens: int
) -> tuple[list[Sampled], float]:
    """Returns what was sampled in one batch, and the largest change of a logprob of requests that are sent alone."""
    llm = LLM(
        str(served.base),
        device=device,  # type: ignore[arg-type]  # argparse has checked it
        dtype=dtype,  # type: ignore[arg-type]  # a key of DTYPES
        enable_lora=True,
        max_loras=4,
        max_lora_rank=64,
        kv_cache_tokens=32_768,
        batch_invariant=batch_invariant,
        gpu_memory_utilization=0.6,
    )
    names = [None, *served.adapters]
    loras = {name: LoRARequest(name, i + 1, str(path)) for i, (name, path) in enumerate(served.adapters.items())}
    adapters = [names[i % len(names)] for i in range(len(served.prompts))]

    def run(indices: list[int]) -> list[Sampled]:
        outputs = llm.generate(
            [{"prompt_token_ids": served.prompts[i]} for i in indices],
            [SamplingParams(seed=i, max_tokens=max_tokens, logprobs=0, ignore_eos=True) for i in indices],
            lora_request=[loras.get(adapters[i] or "") for i in indices],
        )
        answers = [output.outputs[0] for output in outputs]
        return [
            Sampled(served.prompts[i], adapters[i], answer.token_ids, [e.logprob for e in answer.logprobs or ()])
            for i, answer in zip(indices, answers, strict=True)
        ]

    together = run(list(range(len(served.prompts))))
    alone = [run([i])[0] for i in range(NUM_ALONE)]
    llm.close()
    return together, max(_change(one, other) for one, other in zip(alone, together, strict=False))


def _change(one: Sampled, other: Sampled) -> float:
    pairs = zip(one.tokens, other.tokens, one.logprobs, other.logprobs, strict=True)
    changes = [0.0]
    for token, other_token, logprob, other_logprob in pairs:
        if token != other_token:
            break
        changes.append(abs(logprob - other_logprob))
    return max(changes)


@torch.inference_mode()
def differences(served: Served, sampled: list[Sampled], dtype: str, device: str) -> list[float]:
    """Returns the trainer's logprob minus the server's, for each sampled token."""
    model: Any = AutoModelForCausalLM.from_pretrained(served.base, dtype=DTYPES[dtype]).to(device).eval()
    found = _differences(model, [one for one in sampled if one.adapter is None], device)
    differences = list(found)
    for name, path in served.adapters.items():
        adapted = PeftModel.from_pretrained(model, path, autocast_adapter_dtype=False).to(DTYPES[dtype]).eval()
        differences += _differences(adapted, [one for one in sampled if one.adapter == name], device)
        model = adapted.unload()
    return differences


def _differences(model: Any, sampled: list[Sampled], device: str) -> Iterator[float]:
    for one in sampled:
        ids = torch.tensor([[*one.prompt, *one.tokens]], device=device)
        logits_TV = model(input_ids=ids).logits[0, len(one.prompt) - 1 : -1].float()
        own_T = logits_TV.log_softmax(-1).gather(1, ids[0, len(one.prompt) :, None]).squeeze(1)
        yield from (trained - served for trained, served in zip(own_T.tolist(), one.logprobs, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--layers", type=int, help="random weights in the shape of an 8B Llama with so many layers")
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    args = parser.parse_args()
    where = torch.cuda.get_device_name() if args.device == "cuda" else f"CPU ({platform.machine()})"
    print(f"python {' '.join(sys.argv)}, {where}, torch {torch.__version__}\n", flush=True)
    print("| dtype | `--batch-invariant` | tokens | KL | mean abs. difference | max | alone | seconds |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        count = args.requests
        served = demo(count) if args.layers is None else random_8b(Path(folder), args.layers, count, args.device)
        for dtype in args.dtypes:
            for batch_invariant in (False, True):
                started = time.monotonic()
                sampled, change = sample(served, dtype, args.device, batch_invariant, args.max_tokens)
                seconds = time.monotonic() - started
                found = differences(served, sampled, dtype, args.device)
                kl = sum(math.exp(d) - 1 - d for d in found) / len(found)
                mean, most = sum(map(abs, found)) / len(found), max(map(abs, found))
                print(
                    f"| {dtype} | {'yes' if batch_invariant else 'no'} | {len(found)} | {kl:.1e} | {mean:.1e} | "
                    f"{most:.1e} | {change:.1e} | {seconds:.0f} |",
                    flush=True,
                )
                if args.device == "cuda":
                    torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
