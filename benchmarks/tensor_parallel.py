"""One replica over several GPUs: milliseconds a decode step and prompt tokens a second by tensor_parallel_size.

    python benchmarks/tensor_parallel.py [--shape 8b|70b|tiny] [--sizes 1 2 4] [--layouts off on] [--batches 1 8 64 256]
        [--adapters 0 8 64] [--json FILE]

Random weights in the shape of Llama 3 8B or 70B, bf16, prompts of 512 random tokens, 128 generated, greedy; adapters of
rank 16 on all seven projections, spread evenly over the batch. A step is timed on the host of rank 0 from the scheduler
to the tokens; the median of the steps in which every sequence decodes is given. layout: fully_sharded_loras.
`tiny --device cpu` runs anywhere and measures nothing but that it runs.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
import torch
from safetensors.torch import save_file

from lorafleet.workers.config import Device, EngineConfig
from lorafleet.workers.engine import Engine
from lorafleet.workers.lora.config import LoRAConfig
from lorafleet.workers.lora.request import LoRARequest
from lorafleet.workers.messages import EngineRequest
from lorafleet.workers.sampling_params import SamplingParams
from lorafleet.workers.startup import build_engine
from lorafleet.workers.tp.processes import RankProcesses

RANK = 16
PREFILL_TOKENS = 8192  # in one step


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

    @property
    def kv_size(self) -> int:
        return self.hidden // self.heads * self.kv_heads

    def config(self, device: Device) -> dict[str, object]:
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

    def projections(self) -> dict[str, tuple[int, int]]:
        hidden, inner, kv = self.hidden, self.inner, self.kv_size
        attention = {"q_proj": hidden, "k_proj": kv, "v_proj": kv, "o_proj": hidden}
        return {f"self_attn.{name}": (hidden, out) for name, out in attention.items()} | {
            "mlp.gate_proj": (hidden, inner),
            "mlp.up_proj": (hidden, inner),
            "mlp.down_proj": (inner, hidden),
        }


SHAPES = {
    "8b": Shape(4096, 14336, 32, 32, 8, 128256),
    "70b": Shape(8192, 28672, 80, 64, 8, 128256),
    "tiny": Shape(64, 128, 2, 4, 2, 512, prompt=32, generated=8),
}


@dataclass(frozen=True, slots=True)
class Row:
    """adapter_mb: of one adapter on rank 0, in the serving layout."""

    shape: str
    size: int
    layout: str
    batch: int
    adapters: int
    step_ms: float
    prefill_tokens_per_s: float
    adapter_mb: float


class Replica:
    """Rank 0's engine in this process, the other ranks in theirs."""

    def __init__(self, shape: Shape, folder: Path, size: int, layout: str, args: argparse.Namespace) -> None:
        gc.collect()  # the replica before
        most = max(args.adapters)
        config = EngineConfig(
            model=str(folder),
            device=args.device,
            load_format="dummy",
            max_num_seqs=max(args.batches),
            max_num_batched_tokens=PREFILL_TOKENS,
            max_num_mixed_tokens=PREFILL_TOKENS,
            enable_prefix_caching=False,
            tensor_parallel_size=size,
            lora=LoRAConfig(max_loras=most, max_lora_rank=RANK, max_cpu_loras=most, fully_sharded_loras=layout == "on")
            if most
            else None,
        )
        self._ranks = RankProcesses(config) if size > 1 else None
        self.engine: Engine = build_engine(config, addresses=None if self._ranks is None else self._ranks.addresses)
        self.loras = self._load(write_adapters(shape, folder, most)) if most else []

    def adapter_bytes(self) -> int:
        loras = self.engine.loras
        found = [] if loras is None else [s.adapter.block.numel() for s in loras.slots.slots if s.adapter is not None]
        return max(found, default=0)

    def close(self) -> None:
        self.engine.close()
        if self._ranks is not None:
            self._ranks.close()

    def _load(self, paths: list[Path]) -> list[LoRARequest]:
        asked = [LoRARequest(path.name, i + 1, str(path)) for i, path in enumerate(paths)]
        loads = [self.engine.load_adapter(lora) for lora in asked]
        while not all(load.done() for load in loads):
            self.engine.step()
            time.sleep(0.001)
        return [
            msgspec.structs.replace(lora, digest=load.result().digest) for lora, load in zip(asked, loads, strict=True)
        ]


def write_adapters(shape: Shape, folder: Path, count: int) -> list[Path]:
    """They share one file of weights and differ in lora_alpha: distinct digests, slots and bytes on the GPUs."""
    weights = folder / "weights"
    projections = shape.projections()
    if not weights.exists():
        generator = torch.Generator().manual_seed(0)
        tensors = {}
        for layer in range(shape.layers):
            for name, (inputs, outputs) in projections.items():
                for leaf, size in (("lora_A", (RANK, inputs)), ("lora_B", (outputs, RANK))):
                    value = (torch.randn(size, generator=generator) * 0.02).bfloat16()
                    tensors[f"base_model.model.model.layers.{layer}.{name}.{leaf}.weight"] = value
        save_file(tensors, weights)
    paths = [folder / f"a{i}" for i in range(count)]
    for i, path in enumerate(paths):
        if path.exists():
            continue
        path.mkdir()
        (path / "adapter_model.safetensors").hardlink_to(weights)
        leaves = [name.split(".")[1] for name in projections]
        config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK + i, "target_modules": leaves}
        (path / "adapter_config.json").write_text(json.dumps(config))
    return paths


def submit(engine: Engine, shape: Shape, name: str, batch: int, loras: list[LoRARequest]) -> None:
    params = SamplingParams(temperature=0, max_tokens=shape.generated, ignore_eos=True)
    generator = torch.Generator().manual_seed(len(name))
    for i in range(batch):
        prompt = torch.randint(10, shape.vocab - 10, (shape.prompt,), generator=generator).tolist()
        lora = loras[i % len(loras)] if loras else None
        engine.add(EngineRequest(request_id=f"{name} {i}", prompt_token_ids=prompt, params=params, lora=lora))


def until_all_answer(engine: Engine, name: str, batch: int) -> float:
    """Seconds until each of the requests has its first token."""
    waiting = {f"{name} {i}" for i in range(batch)}
    started = time.perf_counter()
    while waiting:
        waiting -= {output.request_id for output in engine.step()}
    return time.perf_counter() - started


def measure(replica: Replica, shape: Shape, batch: int, loras: list[LoRARequest]) -> tuple[float, float]:
    """Milliseconds a decode step, prompt tokens a second."""
    engine, prefills = replica.engine, []
    for repeat in range(4):
        name = f"{batch} {len(loras)} {repeat}"
        submit(engine, shape, name, batch, loras)
        prefills.append(until_all_answer(engine, name, batch))
        if repeat < 3:
            for i in range(batch):
                engine.abort(f"{name} {i}")
    steps: list[float] = []
    while engine.has_work:
        before = time.perf_counter()
        if len(engine.step()) == batch:
            steps.append(time.perf_counter() - before)
    return statistics.median(steps) * 1e3, batch * shape.prompt / statistics.median(prefills[1:])


def run(name: str, folder: Path, size: int, layout: str, args: argparse.Namespace) -> list[Row]:
    shape = SHAPES[name]
    replica = Replica(shape, folder, size, layout, args)
    rows = []
    for count in args.adapters:
        for batch in args.batches:
            step_ms, rate = measure(replica, shape, batch, replica.loras[:count])
            row = Row(name, size, layout, batch, count, step_ms, rate, replica.adapter_bytes() / 1e6)
            rows.append(row)
            print(
                f"{row.shape:5}  {row.size:2}  {row.layout:6}  {row.batch:5}  {row.adapters:8}  {row.step_ms:9.2f}  "
                f"{row.prefill_tokens_per_s:17.0f}  {row.adapter_mb:12.2f}",
                flush=True,
            )
    replica.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--layouts", choices=["off", "on"], nargs="+", default=["off", "on"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--adapters", type=int, nargs="+", default=[0, 8, 64])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    print("shape  tp  layout  batch  adapters  ms a step   prefill tokens/s  MB a adapter")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(SHAPES[args.shape].config(args.device)))
        for size in args.sizes:
            for layout in args.layouts if size > 1 else ["off"]:
                rows += run(args.shape, folder, size, layout, args)
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
