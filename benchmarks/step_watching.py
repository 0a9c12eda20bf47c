"""Measures the cost of metrics and traces in a decode step, at 8B shape with random weights.

    python benchmarks/step_watching.py [--batches 1 64 256] [--rounds 5] [--layers 32] [--device cuda] [--json FILE]

The arms are:

- unwatched: steps are neither counted nor timed on the GPU, and no statistics are reported;
- counted: the default; ten times a second the statistics are collected and encoded, as in the engine's process;
- traced: like counted, and every sequence also records its times for a span.

The arms take turns, in another order each round, with 8 adapters. A step is timed on the host as in engine_e2e.py. The
mean of all steps of an answer counts, since a median would miss costs that only some steps have.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import torch

from engine_driver import load, submit, until_all_answer
from engine_e2e import CONFIG
from lorafleet.protocol.engine_config import EngineConfig
from lorafleet.protocol.lora_config import LoRAConfig
from lorafleet.protocol.lora_request import LoRARequest
from lorafleet.workers.engine import Engine
from lorafleet.workers.startup import build_engine
from lorafleet.workers.worker import STATS_PERIOD_S
from random_llama import write_alike_adapters

ADAPTERS, RANK, PROMPT = 8, 16, 128
ARMS = ("unwatched", "counted", "traced")
encode = msgspec.msgpack.Encoder().encode


def mean_step_ms(engine: Engine, arm: str, batch: int, generated: int, loras: list[LoRARequest]) -> float:
    """Returns the mean time of the steps in which every sequence decodes."""
    name = f"{arm} {batch}"
    submit(engine, name, batch, PROMPT, generated, loras, traced=arm == "traced")
    until_all_answer(engine, name, batch)
    steps, reported_at = [], time.perf_counter()
    while engine.has_work:
        began = time.perf_counter()
        outputs = engine.step()
        if arm != "unwatched" and began - reported_at > STATS_PERIOD_S:
            encode(engine.stats())
            reported_at = began
        if len(outputs) == batch:
            steps.append(time.perf_counter() - began)
    return statistics.fmean(steps) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--generated", type=int, default=400)
    parser.add_argument("--layers", type=int, default=CONFIG["num_hidden_layers"])
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    config = CONFIG | {"num_hidden_layers": args.layers}
    most = max(args.batches)
    with tempfile.TemporaryDirectory() as root:
        model = Path(root, "model")
        model.mkdir()
        (model / "config.json").write_text(json.dumps(config))
        adapters = write_alike_adapters(Path(root, "adapters"), config, ADAPTERS, RANK)
        engine = build_engine(
            EngineConfig(
                model=str(model),
                device=args.device,
                load_format="dummy",
                max_num_seqs=most,
                kv_cache_tokens=most * (PROMPT + args.generated + 32),
                enable_prefix_caching=False,
                lora=LoRAConfig(max_loras=ADAPTERS, max_lora_rank=RANK, max_cpu_loras=ADAPTERS),
            )
        )
        loras = load(engine, adapters)
        watched: dict[str, Any] = {"metrics": engine.statistics.steps, "clock": engine.runner._clock}
        taken: dict[int, dict[str, list[float]]] = {batch: {arm: [] for arm in ARMS} for batch in args.batches}
        for turn in range(args.rounds):
            for batch in args.batches:
                for arm in (ARMS[(turn + i) % len(ARMS)] for i in range(len(ARMS))):
                    engine.statistics.steps = Unwatched() if arm == "unwatched" else watched["metrics"]
                    engine.runner._clock = None if arm == "unwatched" else watched["clock"]
                    taken[batch][arm].append(mean_step_ms(engine, arm, batch, args.generated, loras))
        engine.close()
    print(torch.cuda.get_device_name() if args.device == "cuda" else "CPU")
    print(f"batch  {'  '.join(f'{arm:>12}' for arm in ARMS)}   counted  traced: beside unwatched, of the same round")
    for batch, arms in taken.items():
        times = "  ".join(f"{statistics.median(arms[arm]):9.3f} ms" for arm in ARMS)
        shares = "  ".join(f"{_share(arms, arm):+7.2%}" for arm in ARMS[1:])
        print(f"{batch:5}  {times}   {shares}")
    if args.json:
        args.json.write_text(json.dumps(taken, indent=1))


class Unwatched:
    """Replaces StepMetrics, and counts nothing. The budget learns from the duration that it returns."""

    num_steps = 0

    def __init__(self) -> None:
        self._ended_s = 0.0

    def ended(self, shape: object, began_s: float) -> float:  # noqa: ARG002  as StepMetrics
        now = time.perf_counter()
        seconds, self._ended_s = now - max(began_s, self._ended_s), now
        return seconds


def _share(arms: dict[str, list[float]], arm: str) -> float:
    pairs = zip(arms[arm], arms["unwatched"], strict=True)
    return statistics.median(mine / bare - 1 for mine, bare in pairs)


if __name__ == "__main__":
    main()
