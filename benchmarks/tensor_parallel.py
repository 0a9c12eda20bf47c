"""Measures one replica over several GPUs: milliseconds per decode step and prompt tokens per second.

    python benchmarks/tensor_parallel.py [--shape 8b|70b|tiny] [--sizes 1 2 4] [--layouts off on] [--batches 1 8 64 256]
        [--adapters 0 8 64] [--json FILE] [--record]

--sizes are the values of tensor_parallel_size, and --layouts those of fully_sharded_loras. The model has random weights
in the shape of Llama 3 8B or 70B in bf16. Prompts have 512 random tokens, and greedy answers 128 tokens. Adapters of
rank 16 on all seven projections are spread evenly over the batch. A step is timed on the host of rank 0 from the
scheduler to the tokens; the figure is the median of the steps in which every sequence decodes. `tiny --device cpu` runs
anywhere, and only tests that the benchmark runs. --record writes both layouts' steps with the most adapters to
kernels/lora/tuned/<GPU>.sharding.json, from which replicas choose their layout (workers/tp/sharding_choice.py).
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from engine_driver import decode_step_ms, load, prefill_tokens_per_s
from lorafleet.protocol.engine_config import Device, EngineConfig
from lorafleet.protocol.lora_config import LoRAConfig
from lorafleet.workers.engine import Engine
from lorafleet.workers.rank_processes import RankProcesses
from lorafleet.workers.startup import build_engine
from lorafleet.workers.tp.sharding_choice import MeasuredSteps, sharding_path, write_steps
from random_llama import write_alike_adapters

RANK = 16
PREFILL_TOKENS = 8192  # The most tokens in one step.
REPEATS = 3  # The number of repeats of each prefill.


@dataclass(frozen=True, slots=True)
class Shape:
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    prompt: int = 512
    generated: int = 128

    def config(self, device: Device) -> dict[str, Any]:
        return {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "max_position_embeddings": 8192,
            "rope_theta": 500000.0,
            "torch_dtype": "float32" if device == "cpu" else "bfloat16",
        }


SHAPES = {
    "8b": Shape(4096, 14336, 32, 32, 8, 128256),
    "70b": Shape(8192, 28672, 80, 64, 8, 128256),
    "tiny": Shape(64, 128, 2, 4, 2, 512, prompt=32, generated=8),
}


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table."""

    shape: str
    size: int
    layout: str
    batch: int
    adapters: int
    step_ms: float
    prefill_tokens_per_s: float
    adapter_mb: float  # The size of one adapter on rank 0, in the serving layout.


class Replica:
    """Runs rank 0's engine in this process, and the other ranks in processes of their own."""

    def __init__(self, folder: Path, adapters: list[Path], size: int, layout: str, args: argparse.Namespace) -> None:
        gc.collect()  # Frees the previous replica.
        most = len(adapters)
        config = EngineConfig(
            model=str(folder),
            device=args.device,
            load_format="dummy",
            max_num_seqs=max(args.batches),
            max_num_batched_tokens=PREFILL_TOKENS,
            max_num_mixed_tokens=PREFILL_TOKENS,
            max_gap_ms=10_000,
            enable_prefix_caching=False,
            tensor_parallel_size=size,
            lora=LoRAConfig(max_loras=most, max_lora_rank=RANK, max_cpu_loras=most, fully_sharded_loras=layout == "on")
            if most
            else None,
        )
        self._ranks = RankProcesses(config) if size > 1 else None
        self.engine: Engine = build_engine(config, addresses=None if self._ranks is None else self._ranks.addresses)
        self.loras = load(self.engine, adapters)

    def adapter_bytes(self) -> int:
        loras = self.engine.loras
        found = [] if loras is None else [s.adapter.block.numel() for s in loras.slots.slots if s.adapter is not None]
        return max(found, default=0)

    def close(self) -> None:
        self.engine.close()
        if self._ranks is not None:
            self._ranks.close()


def run(folder: Path, adapters: list[Path], size: int, layout: str, args: argparse.Namespace) -> list[Row]:
    shape = SHAPES[args.shape]
    started = time.perf_counter()
    replica = Replica(folder, adapters, size, layout, args)
    print(f"tp {size}: started in {time.perf_counter() - started:.0f} s", flush=True)
    rows = []
    for count in args.adapters:
        for batch in args.batches:
            loras = replica.loras[:count]
            rate = prefill_tokens_per_s(replica.engine, batch, shape.prompt, shape.generated, loras, REPEATS)
            step_ms = decode_step_ms(replica.engine, batch, shape.prompt, shape.generated, loras)
            row = Row(args.shape, size, layout, batch, count, step_ms, rate, replica.adapter_bytes() / 1e6)
            rows.append(row)
            print(
                f"{row.shape:5}  {row.size:2}  {row.layout:6}  {row.batch:5}  {row.adapters:8}  {row.step_ms:9.2f}  "
                f"{row.prefill_tokens_per_s:17.0f}  {row.adapter_mb:12.2f}",
                flush=True,
            )
    replica.close()
    return rows


def steps_of_sizes(rows: list[Row]) -> dict[int, list[MeasuredSteps]]:
    """Returns, by number of ranks, the steps with the most adapters that were measured in both layouts."""
    most = max(row.adapters for row in rows)
    ms = {(row.size, row.batch, row.layout): row.step_ms for row in rows if row.adapters == most and row.size > 1}
    found: dict[int, list[MeasuredSteps]] = {}
    for (size, batch, layout), step_ms in ms.items():
        if layout == "on" and (size, batch, "off") in ms:
            found.setdefault(size, []).append(MeasuredSteps(batch, step_ms, ms[size, batch, "off"]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--layouts", choices=["off", "on"], nargs="+", default=["off", "on"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--adapters", type=int, nargs="+", default=[0, 8, 64])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--record", action="store_true")
    args = parser.parse_args()
    if args.record and (args.device == "cpu" or args.shape == "tiny" or max(args.adapters) == 0):
        parser.error("--record needs GPUs, a real shape and adapters")
    print("shape  tp  layout  batch  adapters  ms a step   prefill tokens/s  MB a adapter")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config, most = SHAPES[args.shape].config(args.device), max(args.adapters)
        (folder / "config.json").write_text(json.dumps(config))
        adapters = write_alike_adapters(folder / "adapters", config, most, RANK) if most else []
        for size in args.sizes:
            for layout in args.layouts if size > 1 else ["off"]:
                # A process can share the GPUs' memory only once, so this runs in one of its own, as a server's ranks
                # do.
                with ProcessPoolExecutor(1, get_context("spawn")) as process:
                    rows += process.submit(run, folder, adapters, size, layout, args).result()
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    if args.record:
        write_steps(sharding_path(torch.cuda.get_device_name()), steps_of_sizes(rows))


if __name__ == "__main__":
    main()
