"""The whole engine at 8B shape with random weights: milliseconds a decode step, prefill tokens a second.

    python benchmarks/engine_e2e.py [--batches 1 8 64 256] [--adapters 0 8 64]
        [--kv-cache-dtype auto|fp8] [--json FILE]

Prompts of 512 random tokens, 128 generated, greedy, bf16, adapters of rank 16 on all seven projections; request i uses
adapter i modulo their number. A step is timed on the host from the scheduler to the tokens, as a server lives through
it; the median of the steps in which every sequence decodes is given. Beside it stands the byte floor: the weights, the
batch's distinct adapters and the KV cache, read once at the copy bandwidth measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import tempfile
import time
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from safetensors.torch import save_file

from lorafleet.workers.config import EngineConfig
from lorafleet.workers.engine import Engine
from lorafleet.workers.lora.config import LoRAConfig
from lorafleet.workers.lora.request import AdapterInfo, LoRARequest
from lorafleet.workers.messages import EngineRequest
from lorafleet.workers.sampling_params import SamplingParams
from lorafleet.workers.startup import build_engine

PROMPT, GENERATED, RANK = 512, 128, 16
HIDDEN, INNER, LAYERS, KV = 4096, 14336, 32, 1024
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
}
SHAPES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN, KV),
    "self_attn.v_proj": (HIDDEN, KV),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (HIDDEN, INNER),
    "mlp.up_proj": (HIDDEN, INNER),
    "mlp.down_proj": (INNER, HIDDEN),
}
ADAPTER_BYTES = 2 * LAYERS * RANK * sum(i + o for i, o in SHAPES.values())
KV_NUMBERS_A_TOKEN = 2 * LAYERS * KV


def write_adapters(folder: Path, count: int) -> list[Path]:
    """They share one file of weights and differ in lora_alpha: distinct digests, slots and bytes on the GPU."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    tensors = {}
    for layer in range(LAYERS):
        for name, (inputs, outputs) in SHAPES.items():
            for leaf, shape in (("lora_A", (RANK, inputs)), ("lora_B", (outputs, RANK))):
                value = torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16) * 0.02
                tensors[f"base_model.model.model.layers.{layer}.{name}.{leaf}.weight"] = value.cpu()
    save_file(tensors, folder / "weights")
    paths = [folder / f"a{i}" for i in range(count)]
    for i, path in enumerate(paths):
        path.mkdir()
        (path / "adapter_model.safetensors").hardlink_to(folder / "weights")
        leaves = [name.split(".")[1] for name in SHAPES]
        config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK + i, "target_modules": leaves}
        (path / "adapter_config.json").write_text(json.dumps(config))
    return paths


def load(engine: Engine, paths: list[Path]) -> list[LoRARequest]:
    asked = [LoRARequest(path.name, i + 1, str(path)) for i, path in enumerate(paths)]
    futures: list[Future[AdapterInfo]] = [engine.load_adapter(lora) for lora in asked]
    while not all(future.done() for future in futures):
        engine.step()
        time.sleep(0.001)
    return [msgspec.structs.replace(lora, digest=f.result().digest) for lora, f in zip(asked, futures, strict=True)]


@dataclass(frozen=True, slots=True)
class Measured:
    batch: int
    adapters: int
    step_ms: float
    prefill_tokens_per_s: float
    floor_ms: float


def measure(engine: Engine, batch: int, loras: list[LoRARequest], bandwidth: float, weights: int) -> Measured:
    steps: list[float] = []
    prefill_s = 0.0
    for repeat in range(2):  # the first one compiles and warms up
        params = SamplingParams(temperature=0, max_tokens=GENERATED if repeat else 4, ignore_eos=True)
        generator = torch.Generator().manual_seed(1000 * batch + repeat)
        for i in range(batch):
            prompt = torch.randint(10, 128000, (PROMPT,), generator=generator).tolist()
            lora = loras[i % len(loras)] if loras else None
            engine.add(EngineRequest(request_id=str(i), prompt_token_ids=prompt, params=params, lora=lora))
        torch.cuda.synchronize()
        steps = []
        started = time.perf_counter()
        prefill_s, waiting = 0.0, set(range(batch))
        while engine.has_work:
            before = time.perf_counter()
            outputs = engine.step()
            now = time.perf_counter()
            if not waiting and len(outputs) == batch:
                steps.append(now - before)
            waiting -= {int(o.request_id) for o in outputs}
            prefill_s = prefill_s or (0.0 if waiting else now - started)
    distinct = min(batch, len(loras))
    kv_bytes = KV_NUMBERS_A_TOKEN * engine.runner.caches[0].k_NPGD.element_size()
    kv = batch * (PROMPT + GENERATED / 2) * kv_bytes
    floor_ms = (weights + distinct * ADAPTER_BYTES + kv) / bandwidth * 1e3
    return Measured(batch, len(loras), statistics.median(steps) * 1e3, batch * PROMPT / prefill_s, floor_ms)


def copy_bandwidth() -> float:
    """Bytes a second, read plus written."""
    source = torch.randint(0, 255, (4 << 30,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(5):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end))
    return 2 * source.numel() / best * 1e3


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--adapters", type=int, nargs="+", default=[0, 8, 64])
    parser.add_argument("--kv-cache-dtype", choices=["auto", "fp8"], default="auto")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    bandwidth = copy_bandwidth()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder, "model")
        checkpoint.mkdir()
        (checkpoint / "config.json").write_text(json.dumps(CONFIG))
        most = max(args.adapters)
        lora = LoRAConfig(max_loras=most, max_lora_rank=RANK, max_cpu_loras=most) if most else None
        engine = build_engine(
            EngineConfig(
                model=str(checkpoint),
                device="cuda",
                load_format="dummy",
                kv_cache_dtype=args.kv_cache_dtype,
                max_num_seqs=max(args.batches),
                max_num_batched_tokens=8192,
                enable_prefix_caching=False,
                lora=lora,
            )
        )
        loras = load(engine, write_adapters(Path(folder), most)) if most else []
        model = engine.runner.model
        read = sum(p.numel() * p.element_size() for p in model.parameters()) - model.embed_tokens.nbytes
        print(
            f"{torch.cuda.get_device_name()}, copy {bandwidth / 1e12:.2f} TB/s, "
            f"weights read a step {read / 2**30:.2f} GiB, "
            f"KV cache {engine.hello.kv_cache_tokens} tokens of {engine.runner.caches[0].k_NPGD.dtype}"
        )
        print("batch  adapters  ms a step   floor ms   prefill tokens/s")
        rows = []
        for count in args.adapters:
            for batch in args.batches:
                row = measure(engine, batch, loras[:count], bandwidth, read)
                rows.append(row)
                print(
                    f"{row.batch:5}  {row.adapters:8}  {row.step_ms:9.2f}  {row.floor_ms:9.2f}  "
                    f"{row.prefill_tokens_per_s:17.0f}",
                    flush=True,
                )
        engine.close()
    if args.json:
        results = [{name: getattr(row, name) for name in Measured.__slots__} for row in rows]
        args.json.write_text(json.dumps({"bandwidth": bandwidth, "results": results}, indent=1))


if __name__ == "__main__":
    main()
