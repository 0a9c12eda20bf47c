"""Measures the cost of sampling fields in a decode step, in the rows that have them and in the others.

    python benchmarks/sampling.py [--batches 64 256] [--history 2000] [--generated 64] [--layers 32] [--hidden 4096]
        [--vocabulary 128256] [--device cuda] [--json FILE]

The model is a random Llama of 8B shape (on a CPU use --layers 2 --hidden 256 --batches 16), and prompts have `history`
random tokens. A step is timed on the host from the scheduler to the tokens. The figures are the median of the steps in
which every sequence decodes, and how many of them were launched before the tokens of the previous step were known.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmark_results import Case, write_results
from engine_driver import settle
from engine_setup import add_shape_arguments, llama_config
from lorafleet.protocol.engine_config import EngineConfig
from lorafleet.protocol.messages import EngineRequest
from lorafleet.protocol.sampling_params import SamplingParams
from lorafleet.workers.engine import Engine
from lorafleet.workers.startup import build_engine

PENALTIES = {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.5}
BIASES = {"logit_bias": dict.fromkeys(range(100, 1124), 1.0), "min_tokens": 1000, "stop_token_ids": [1, 2, 3]}
# Maps a case to the fields of the first `rows` of a batch, where 0 stands for all rows. The other rows are greedy.
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "greedy": (0, {"temperature": 0}),
    "temperature, top_p": (0, {"temperature": 0.8, "top_p": 0.9, "seed": 1}),
    "penalties in one row": (1, {"temperature": 0, **PENALTIES}),
    "penalties in all rows": (0, {"temperature": 0, **PENALTIES}),
    "1024 biases in all rows": (0, {"temperature": 0, **BIASES}),
    "all fields in all rows": (0, {"temperature": 0.8, "top_p": 0.9, "seed": 1, **PENALTIES, **BIASES}),
}


UNITS = {"step_ms": "ms, median", "slowest_ms": "ms", "overlapped": "steps", "steps": "steps"}


@dataclass(frozen=True, slots=True)
class Measured:
    batch: int
    case: str
    step_ms: float
    slowest_ms: float
    overlapped: int
    steps: int

    def result(self) -> Case:
        figures = {"step_ms": self.step_ms, "slowest_ms": self.slowest_ms, "overlapped": self.overlapped}
        return Case({"case": self.case, "batch": self.batch}, figures | {"steps": self.steps})


def add_batch(engine: Engine, batch: int, case: str, args: argparse.Namespace) -> None:
    rows, fields = CASES[case]
    generator = torch.Generator().manual_seed(batch)
    for i in range(batch):
        chosen = fields if i < (rows or batch) else {"temperature": 0}
        params = SamplingParams(max_tokens=args.generated + 1000, ignore_eos=True, **chosen)
        prompt = torch.randint(10, args.vocabulary - 10, (args.history,), generator=generator).tolist()
        engine.add(EngineRequest(request_id=f"{case} {i}", prompt_token_ids=prompt, params=params))


def measure(engine: Engine, batch: int, case: str, args: argparse.Namespace) -> Measured:
    add_batch(engine, batch, case, args)
    steps: list[float] = []
    overlapped = 0
    while len(steps) < args.generated:
        began_s = time.perf_counter()
        full = len(engine.step()) == batch
        if full:
            steps.append(time.perf_counter() - began_s)
            overlapped += engine.pipeline.has_step
    for i in range(batch):
        engine.abort(f"{case} {i}")
    while engine.has_work:
        engine.step()
    steps = steps[4:]
    return Measured(batch, case, statistics.median(steps) * 1e3, max(steps) * 1e3, overlapped, args.generated)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--history", type=int, default=2000)
    parser.add_argument("--generated", type=int, default=64)
    add_shape_arguments(parser)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows: list[Measured] = []
    with tempfile.TemporaryDirectory() as folder:
        config = llama_config(args, args.history + args.generated + 2048)
        Path(folder, "config.json").write_text(json.dumps(config))
        room = (args.history + args.generated + 32) * max(args.batches)
        engine = build_engine(
            EngineConfig(
                folder,
                device=args.device,
                load_format="dummy",
                max_num_seqs=max(args.batches),
                max_num_batched_tokens=8192,
                max_num_mixed_tokens=8192,
                max_gap_ms=10_000,
                enable_prefix_caching=False,
                kv_cache_tokens=room if args.device == "cpu" else None,
                async_scheduling=True,
            )
        )
        settle(engine)
        print(torch.cuda.get_device_name() if args.device == "cuda" else "CPU")
        print("batch  step ms  slowest ms  overlapped  case")
        for batch in args.batches:
            for case in CASES:
                row = measure(engine, batch, case, args)
                rows.append(row)
                overlapped = f"{row.overlapped}/{row.steps}"
                print(f"{batch:5}  {row.step_ms:7.2f}  {row.slowest_ms:10.2f}  {overlapped:>10}  {case}", flush=True)
        engine.close()
    write_results(args.json, UNITS, [row.result() for row in rows])


if __name__ == "__main__":
    main()
