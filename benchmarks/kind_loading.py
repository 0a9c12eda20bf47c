"""Measures the time to load adapters that are computed from the base's weights, against a plain LoRA of the same rank.

    python benchmarks/kind_loading.py [--rank 16]

The model is an 8B Llama shape with random weights in bf16 on one GPU. The time runs from requesting an adapter on all
seven projections to having it in host memory. Files are in the page cache, and nothing else runs. Two adapters of
different bytes are loaded, and the second load counts. PiSSA and KaSA decompose every weight, so their adapters cover
only one layer (seven modules).
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from engine_e2e import CONFIG
from lorafleet.protocol.engine_config import EngineConfig
from lorafleet.protocol.lora_config import LoRAConfig
from lorafleet.protocol.lora_request import LoRARequest
from lorafleet.workers.engine import Engine
from lorafleet.workers.startup import build_engine
from random_llama import write_adapters

KINDS: dict[str, dict[str, Any]] = {
    "LoRA": {},
    "DoRA": {"use_dora": True},
    "OLoRA": {"init_lora_weights": "olora"},
    "HRA": {"peft_type": "HRA"},
    "PiSSA, one layer": {"init_lora_weights": "pissa", "layers_to_transform": [0]},
    "KaSA, one layer": {"kasa_config": {}, "layers_to_transform": [0]},
}


def write_kind(plain: Path, folder: Path, rank: int, fields: dict[str, Any]) -> Path:
    """Writes the plain LoRA with the additional fields and tensors of the kind."""
    config = json.loads((plain / "adapter_config.json").read_text()) | fields
    tensors = load_file(plain / "adapter_model.safetensors")
    if "layers_to_transform" in fields:
        tensors = {name: tensor for name, tensor in tensors.items() if ".layers.0." in name}
    for name, tensor in list(tensors.items()):
        module = name.partition(".lora_")[0]
        if config["peft_type"] == "HRA":
            del tensors[name]
            if "lora_A" in name:
                tensors[f"{module}.hra_u"] = tensor.T.contiguous()
        elif "use_dora" in fields and "lora_B" in name:
            tensors[f"{module}.lora_magnitude_vector"] = torch.ones(tensor.shape[0], dtype=torch.bfloat16)
        elif "kasa_config" in fields and "lora_B" in name:
            tensors[f"{module}.lora_diag"] = torch.ones(rank, dtype=torch.bfloat16)
    if config["peft_type"] == "HRA":
        del config["lora_alpha"]
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def load_s(engine: Engine, path: Path, number: int) -> float:
    assert engine.loras is not None
    started = time.monotonic()
    loaded = engine.loras.load(LoRARequest(f"{path.name}{number}", number, str(path)))
    while not loaded.done():
        engine.loras.poll()
        time.sleep(0.002)
    loaded.result()
    return time.monotonic() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, default=16)
    rank = parser.parse_args().rank
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "config.json").write_text(json.dumps(CONFIG))
        engine = build_engine(
            EngineConfig(
                model=str(folder),
                device="cuda",
                load_format="dummy",
                kv_cache_tokens=16_384,
                max_num_seqs=4,
                max_num_batched_tokens=512,
                enforce_eager=True,
                lora=LoRAConfig(max_loras=4, max_lora_rank=2 * rank, max_cpu_loras=32),
            )
        )
        write_adapters(folder / "plain", CONFIG, 2, rank)
        for kind, (name, fields) in enumerate(KINDS.items()):
            paths = [write_kind(folder / "plain" / f"a{i}", folder / f"{kind}{i}", rank, fields) for i in range(2)]
            first, second = (load_s(engine, path, 2 * kind + i + 1) for i, path in enumerate(paths))
            peak = torch.cuda.max_memory_reserved() / 2**30
            print(
                f"{name}: first {first:.2f} s, second {second:.2f} s; {peak:.2f} GiB reserved at the peak", flush=True
            )
        assert engine.loras is not None
        engine.loras.close()


if __name__ == "__main__":
    main()
