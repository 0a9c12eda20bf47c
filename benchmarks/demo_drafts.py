"""Measures the drafts of `make demo-drafts` in the engine, for the base and each adapter.

    make demo-drafts DRAFTS=/tmp/drafts
    python benchmarks/demo_drafts.py /tmp/drafts [--batches 1 8] [--device cpu]

The arms are no drafts, the draft model alone, and the draft model with the adapter's draft LoRA. Each has two forms.
In the first, the engine drafts 4 tokens for every sequence in every step, which shows how many are accepted. In the
second, it decides by itself, which shows the speed. The speeds are medians of some turns.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from benchmark_results import Case, write_results
from engine_driver import FreePace, good_outputs, load, make_speculation
from lorafleet.api.text.tokenizer import Tokenizer
from lorafleet.protocol.engine_config import EngineConfig, SpeculativeConfig
from lorafleet.protocol.lora_config import LoRAConfig
from lorafleet.protocol.lora_request import LoRARequest
from lorafleet.protocol.messages import DraftCounts, EngineRequest
from lorafleet.protocol.sampling_params import SamplingParams
from lorafleet.workers.engine import Engine
from lorafleet.workers.speculation.drafter import Drafter
from lorafleet.workers.startup import build_engine

DEMO = Path(__file__).parents[1] / "demo"
UNITS = {
    "predicted": "",
    "tokens_per_draft": "tokens",
    "tokens_per_s": "tokens/s",
    "plain_tokens_per_s": "tokens/s",
    "ratio": "",
}
MAX_TOKENS = 160
_numbers = itertools.count()


@dataclass(frozen=True)
class Answered:
    """All answers of one turn."""

    texts: list[list[int]]
    speed: float  # Tokens per second, prompts included in the time.
    drafts: DraftCounts


def answer(engine: Engine, prompts: list[list[int]], lora: LoRARequest | None, batch: int) -> Answered:
    """Answers the prompts, `batch` at a time."""
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    texts: dict[str, list[int]] = {}
    waiting, running, counts = list(prompts), 0, DraftCounts()
    started = time.perf_counter()
    while waiting or running:
        while waiting and running < batch:
            name = f"r {next(_numbers)}"
            texts[name] = []
            prompt = waiting.pop(0)
            engine.add(EngineRequest(request_id=name, prompt_token_ids=prompt, params=params, lora=lora))
            running += 1
        for output in good_outputs(engine):
            texts[output.request_id] += output.token_ids
            running -= output.finish_reason is not None
            counts = counts if output.drafts is None else counts + output.drafts
    speed = sum(map(len, texts.values())) / (time.perf_counter() - started)
    return Answered(list(texts.values()), speed, counts)


def measure(
    engine: Engine,
    drafter: Drafter,
    prompts: list[list[int]],
    arms: dict[str, LoRARequest | None],
    batch: int,
    args: argparse.Namespace,
) -> dict[str, dict[str, float]]:
    """Returns the figures of each arm. Raises SystemExit if drafts have changed an answer."""
    found: dict[str, dict[str, float]] = {}
    for name, lora in arms.items():
        engine.scheduler.speculation = make_speculation(engine, drafter, args.drafts, FreePace(), is_certain=True)
        counts = answer(engine, prompts, lora, batch).drafts
        found[name] = {
            "predicted": counts.num_accepted / max(1, counts.num_tokens),
            "tokens_per_draft": 1 + counts.num_accepted / max(1, counts.num_drafts),
        }
    plain_lora = next(iter(arms.values()))
    deciding = {name: make_speculation(engine, drafter, args.drafts, is_certain=True) for name in arms}
    speeds: dict[str, list[float]] = {name: [] for name in ("off", *arms)}
    for turn in range(1 + args.repeats):
        engine.scheduler.speculation = None
        plain = answer(engine, prompts, plain_lora, batch)
        turns = {"off": plain}
        for name, lora in arms.items():
            engine.scheduler.speculation = deciding[name]
            turns[name] = answer(engine, prompts, lora, batch)
            if turns[name].texts != plain.texts:
                raise SystemExit(f"drafts of {name} changed an answer")
        if turn > 0:  # In the first turn, speculation learns how long steps take.
            for name, one in turns.items():
                speeds[name].append(one.speed)
    off = statistics.median(speeds["off"])
    for name, figures in found.items():
        speed = statistics.median(speeds[name])
        figures |= {"tokens_per_s": speed, "plain_tokens_per_s": off, "ratio": speed / off}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="what make demo-drafts wrote")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cpu")
    parser.add_argument("--attention-backend", choices=("auto", "torch", "triton", "flashinfer"), default="auto")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    names = sorted(path.name for path in (DEMO / "adapters").iterdir())
    options = SpeculativeConfig("draft_model", args.drafts, model=str(args.folder / "model"))
    lora = LoRAConfig(max_loras=2 * len(names), max_lora_rank=16)
    config = EngineConfig(
        str(DEMO / "model"),
        device=args.device,
        attention_backend=args.attention_backend,
        lora=lora,
        speculative_config=options,
    )
    engine = build_engine(config)
    assert engine.scheduler.speculation is not None
    drafter = engine.scheduler.speculation.drafter
    plain = load(engine, [DEMO / "adapters" / name for name in names])
    drafted = [
        LoRARequest(f"{one.lora_name}-drafted", len(names) + i, one.lora_path, digest=one.digest)
        for i, one in enumerate(load(engine, [args.folder / "adapters" / name for name in names]), 1)
    ]
    tokenizer = Tokenizer.from_folder(DEMO / "model")
    lines = [json.loads(line) for line in (args.folder / "held_out.jsonl").read_text().splitlines()[: args.prompts]]
    prompts = [tokenizer.encode(tokenizer.render_chat(line["messages"]), add_special_tokens=False) for line in lines]
    models: dict[str, dict[str, LoRARequest | None]] = {"base": {"draft model": None}}
    for name, alone, with_lora in zip(names, plain, drafted, strict=True):
        models[name] = {"draft model": alone, "draft LoRA": with_lora}
    cases: list[Case] = []
    for batch, (name, arms) in itertools.product(args.batches, models.items()):
        for arm, figures in measure(engine, drafter, prompts, arms, batch, args).items():
            cases.append(Case({"model": name, "arm": arm, "batch": batch}, figures))
            print(
                f"batch {batch}  {name:7} {arm:12} accepted {figures['predicted']:.3f}  tokens per step "
                f"{figures['tokens_per_draft']:.2f}  {figures['plain_tokens_per_s']:.0f} -> "
                f"{figures['tokens_per_s']:.0f} tokens/s  x {figures['ratio']:.2f}",
                flush=True,
            )
    engine.close()
    write_results(args.json, UNITS, cases)


if __name__ == "__main__":
    main()
