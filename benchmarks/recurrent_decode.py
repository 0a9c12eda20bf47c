"""Measures decode steps and prefill of models with recurrent layers, in the shapes of Qwen3.5 9B and 35B-A3B.

    python benchmarks/recurrent_decode.py [--only qwen3.5-9b ...] [--batches 1 8 64 256] [--adapted 64] [--prompts 32]
        [--without-attention-model] [--attention-backend triton] [--seconds 60] [--json FILE]

The weights are random. Decode steps, their floor and the 8 adapters are those of families_decode.py; the floor includes
that each state is read and written. The allowed time is 1.4 floors and 1 ms. Prefill computes prompts of 1024 tokens in
steps of 8192. It is compared with a model that has attention in all layers, and the same hidden size, layers and MLPs
or experts: Llama's or Qwen3-MoE's. The two differ a little in the size of their linears, so the last figure divides the
rates of floating-point operations of the linears. No shape begins after --seconds. FlashInfer, which
--attention-backend auto takes, compiles for minutes at its first use on a machine.
"""

from __future__ import annotations

import argparse
import gc
import logging
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch

import families_decode
from benchmark_results import Case, write_results
from engine_driver import copy_bandwidth, decode_step_ms, load, prefill_tokens_per_s
from families_decode import FAMILIES, floor_bytes, make_engine, write_adapters
from lorafleet.protocol.engine_config import AttentionName
from lorafleet.workers.engine import Engine
from lorafleet.workers.models.engine_model import EngineModel

ALLOWED, ALLOWED_MS = 1.4, 1.0  # The aim: this factor of the floor and so many milliseconds.
PROMPT, REPEATS = 1024, 2  # Tokens of a prompt, and times that prefill is measured.
HEADS: dict[str, Any] = {"num_attention_heads": 32, "head_dim": 128, "partial_rotary_factor": 1.0}
# Settings that make a shape of families_decode.FAMILIES one with attention in all layers.
WITH_ATTENTION: dict[str, dict[str, Any]] = {
    "qwen3.5-9b": HEADS | {"architectures": ["LlamaForCausalLM"], "num_key_value_heads": 8},
    "qwen3.5-35b-a3b": HEADS
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_key_value_heads": 4,
        "intermediate_size": 512,
        "norm_topk_prob": True,
    },
}
UNITS = {
    "step_ms": "ms, median",
    "floor_ms": "ms",
    "allowed_ms": "ms",
    "adapted_ms": f"ms with {families_decode.ADAPTERS} adapters, median",
    "prefill_tokens_per_s": "tokens/s",
    "attention_tokens_per_s": "tokens/s of the model with attention in all layers",
    "flops_share": "rate of the linears' operations relative to that model's",
}


@dataclass(frozen=True, slots=True)
class Prefill:
    tokens_per_s: float
    linear_flops: float  # of a token

    @property
    def flops(self) -> float:
        return self.tokens_per_s * self.linear_flops


def linear_flops(model: EngineModel) -> float:
    """Returns the operations of all linears of the layers for one token, with its experts but without the head."""
    numbers = sum(linear.in_features * sum(linear.out_features) for _, linear in model.packed_linears())
    for _, mixture in model.mixtures():
        share = mixture.experts.per_token / mixture.experts.count
        numbers += int(share * (mixture.gate_up_EUD.numel() + mixture.down_EDI.numel()))
    return 2.0 * numbers


def prefill(engine: Engine, prompts: int) -> Prefill:
    rate = prefill_tokens_per_s(engine, prompts, PROMPT, 1, [], REPEATS)
    return Prefill(rate, linear_flops(engine.runner.steps.model))


def started(folder: Path, config: dict[str, Any], batches: list[int], backend: AttentionName) -> Engine:
    folder.mkdir()
    return make_engine(folder, config, batches, backend)


def free_memory() -> None:
    """Frees the memory of engines that nothing refers to any more."""
    gc.collect()
    if families_decode.DEVICE == "cuda":
        torch.cuda.empty_cache()


def decode(engine: Engine, folder: Path, shape: str, args: argparse.Namespace) -> list[Case]:
    """Returns a case for each batch, and prints it."""
    model, cases = engine.runner.steps.model, []
    loras = load(engine, write_adapters(folder / "adapters", model))
    prompt = families_decode.PROMPT
    for batch in sorted(args.batches):
        generated = families_decode.generated_tokens(batch)
        step_ms = decode_step_ms(engine, batch, prompt, generated, [])
        floor_ms = floor_bytes(model, batch, prompt + generated / 2) / args.bandwidth / 1e9
        allowed_ms = ALLOWED * floor_ms + ALLOWED_MS
        figures: dict[str, float | None] = {"step_ms": step_ms, "floor_ms": floor_ms, "allowed_ms": allowed_ms}
        text = f"{shape} batch {batch:3}: {step_ms:6.2f} ms, floor {floor_ms:5.2f}, {step_ms / floor_ms:.2f} x, "
        text += f"{'within' if step_ms <= allowed_ms else 'MISSES'} {allowed_ms:.2f}"
        if batch == args.adapted:
            adapted_ms = figures["adapted_ms"] = decode_step_ms(engine, batch, prompt, generated, loras)
            text += f"; {len(loras)} adapters {adapted_ms:.2f} ({adapted_ms / step_ms:.3f} x)"
        print(text, flush=True)
        cases.append(Case({"shape": shape, "batch": batch}, figures))
    return cases


def measure(shape: str, args: argparse.Namespace) -> list[Case]:
    _, layers, config = FAMILIES[shape]
    config = config | {"num_hidden_layers": layers}
    batches = sorted({*args.batches, args.adapted})
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        engine = started(folder / "recurrent", config, batches, args.attention_backend)
        cases = decode(engine, folder, shape, args)
        own = prefill(engine, args.prompts)
        engine.close()
        del engine
        free_memory()  # for the next model, which may need all of it
        figures: dict[str, float | None] = {"prefill_tokens_per_s": own.tokens_per_s}
        text = f"{shape} prefill: {own.tokens_per_s:.0f} tokens/s, {own.flops / 1e12:.0f} TFLOP/s"
        if not args.without_attention_model:
            engine = started(folder / "attention", config | WITH_ATTENTION[shape], batches, args.attention_backend)
            other = prefill(engine, args.prompts)
            engine.close()
            del engine
            free_memory()
            share = own.flops / other.flops
            figures |= {"attention_tokens_per_s": other.tokens_per_s, "flops_share": share}
            text += f"; with attention in all layers {other.tokens_per_s:.0f}, {other.flops / 1e12:.0f}: {share:.3f} x"
        print(text, flush=True)
    return [*cases, Case({"shape": shape}, figures)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(WITH_ATTENTION), default=list(WITH_ATTENTION))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--adapted", type=int, default=64, help="the batch that is measured with adapters too")
    parser.add_argument("--prompts", type=int, default=32, help="prompts whose prefill is measured")
    parser.add_argument("--without-attention-model", action="store_true", help="compare with no other model")
    parser.add_argument("--attention-backend", choices=get_args(AttentionName), default="triton")
    parser.add_argument("--seconds", type=float, default=60.0, help="no shape begins later than this")
    parser.add_argument("--bandwidth", type=float, help="TB/s; default: that of a copy in the same run")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    args.bandwidth = args.bandwidth or copy_bandwidth() / 1e12
    print(f"floors are for {args.bandwidth:.2f} TB/s", flush=True)
    began_s, cases = time.monotonic(), []
    for shape in args.only:
        started_s = time.monotonic()
        if started_s - began_s > args.seconds:
            print(f"{shape}: left out, since {args.seconds:.0f} s are over", flush=True)
            continue
        cases += measure(shape, args)
        print(f"{shape}: {time.monotonic() - started_s:.0f} s", flush=True)
    write_results(args.json, UNITS, cases)


if __name__ == "__main__":
    main()
