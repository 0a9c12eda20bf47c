"""Measures decode steps with adapters of every form, at 8B shape with random weights, against plain LoRA.

    python benchmarks/adapter_kinds.py [--short] [--kinds plain dora ...] [--lora-dtype auto|fp8] [--json FILE]

A batch has 64 sequences and 8 adapters of one kind; request i uses adapter i modulo 8. The model runs in bf16 and
samples greedily. Prompts have 512 random tokens and answers 128 tokens (--short: 128 and 64). A step is timed on the
host as in engine_e2e.py. The kinds take turns three times, and the median counts. The excess is the time above the base
alone on the same engine; the ratio is the excess divided by that of plain LoRA.

The forms are made here rather than read from PEFT files:

- plain has rank 16 on all seven projections;
- dora adds a scale for every output to plain, and bias adds a bias for every output;
- ia3 only scales k, v and down;
- norms replaces every norm;
- lokr adds Kronecker products of square factors;
- vocab_lora adds rank 16 on embedding and head to plain, and vocab_rows replaces 64 rows of both;
- head replaces the whole head, which takes a GB per adapter (it is left out with --short);
- mixed has all kinds of linears and norms in one batch;
- mixed_but_lokr leaves out lokr, whose products need CUDA graphs of their own;
- one_lokr is plain LoRA beside a single lokr.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from engine_driver import decode_step_ms, load
from engine_e2e import CONFIG, HIDDEN, LAYERS, RANK, SHAPES
from lorafleet.protocol.engine_config import EngineConfig
from lorafleet.protocol.lora_config import LoRAConfig
from lorafleet.protocol.lora_request import LoRARequest
from lorafleet.workers.adapters.content_digest import ContentDigest
from lorafleet.workers.adapters.forms import AdapterForms, Kronecker, LinearForm, LowRank, TokenRows, VocabForm
from lorafleet.workers.adapters.reader import ReadAdapter
from lorafleet.workers.engine import Engine
from lorafleet.workers.slots import lora_model as lora_model
from lorafleet.workers.startup import build_engine

BATCH, ADAPTERS, ROUNDS = 64, 8, 3
VOCAB = CONFIG["vocab_size"]
EXTRA_GIB = 10.0  # Additional memory for eight whole heads.
MODULES = {f"layers.{i}.{name}": shape for i in range(LAYERS) for name, shape in SHAPES.items()}
NORMS = [
    *(f"layers.{i}.{name}" for i in range(LAYERS) for name in ("input_layernorm", "post_attention_layernorm")),
    "norm",
]


class Forms:
    """Makes the forms of each kind. The adapters of a kind have the same numbers, and each has its own slot."""

    def __init__(self) -> None:
        self._low_rank = {
            (i, o): LowRank(_random(RANK, i, std=i**-0.5), _random(o, RANK, std=0.01)) for i, o in SHAPES.values()
        }

    def plain(self) -> AdapterForms:
        return AdapterForms({m: LinearForm(self._low_rank[shape]) for m, shape in MODULES.items()})

    def dora(self) -> AdapterForms:
        forms = {m: LinearForm(self._low_rank[s], out_scale_O=_scale(s[1])) for m, s in MODULES.items()}
        return AdapterForms(forms)

    def bias(self) -> AdapterForms:
        forms = {m: LinearForm(self._low_rank[s], bias_O=_scale(s[1]) - 1) for m, s in MODULES.items()}
        return AdapterForms(forms)

    def ia3(self) -> AdapterForms:
        names = ("k_proj", "v_proj", "down_proj")
        return AdapterForms({m: LinearForm(out_scale_O=_scale(s[1])) for m, s in MODULES.items() if m.endswith(names)})

    def norms(self) -> AdapterForms:
        return AdapterForms(norms={name: _scale(HIDDEN) for name in NORMS})

    def vocab_lora(self) -> AdapterForms:
        low, high = _random(RANK, VOCAB, std=0.01), _random(VOCAB, RANK, std=0.01)
        a_RD, b_DR = _random(RANK, HIDDEN, std=0.01), _random(HIDDEN, RANK, std=0.01)
        embedding, head = VocabForm(LowRank(low, b_DR)), VocabForm(LowRank(a_RD, high))
        return AdapterForms(self.plain().linears, embedding, head)

    def vocab_rows(self) -> AdapterForms:
        rows = TokenRows(torch.arange(1000, 1064), _random(64, HIDDEN, std=0.02))
        return AdapterForms(self.plain().linears, VocabForm(rows=rows), VocabForm(rows=rows))

    def head(self) -> AdapterForms:
        return AdapterForms(self.plain().linears, head=VocabForm(table_VD=_random(VOCAB, HIDDEN, std=0.02)))

    def lokr(self) -> AdapterForms:
        return AdapterForms({m: LinearForm(kronecker=_kronecker(*shape)) for m, shape in MODULES.items()})


KINDS: dict[str, Callable[[Forms], AdapterForms]] = {
    kind.__name__: kind
    for kind in (
        Forms.plain,
        Forms.dora,
        Forms.bias,
        Forms.ia3,
        Forms.norms,
        Forms.lokr,
        Forms.vocab_lora,
        Forms.vocab_rows,
        Forms.head,
    )
}
# The kind of each adapter in a batch.
BATCHES = {kind: [kind] * ADAPTERS for kind in KINDS} | {
    "mixed_but_lokr": ["plain", "dora", "bias", "ia3", "norms", "dora", "plain", "bias"],
    "mixed": ["plain", "dora", "bias", "ia3", "norms", "lokr", "dora", "lokr"],
    "one_lokr": ["plain"] * (ADAPTERS - 1) + ["lokr"],
}


def _random(*shape: int, std: float) -> torch.Tensor:
    return torch.randn(*shape).mul_(std).bfloat16()


def _scale(size: int) -> torch.Tensor:
    return 1 + torch.randn(size) / 100


def _factor(size: int) -> int:
    """Returns the largest divisor up to the square root, which is LoKr's default factor."""
    return next(f for f in range(int(size**0.5), 0, -1) if size % f == 0)


def _kronecker(inputs: int, outputs: int) -> Kronecker:
    d1, o1 = _factor(inputs), _factor(outputs)
    return Kronecker(_random(o1, d1, std=0.02), _random(outputs // o1, inputs // d1, std=0.02))


def start(checkpoint: Path, kinds: list[str], lora_dtype: str) -> tuple[Engine, dict[str, list[LoRARequest]]]:
    """Returns an engine, and the adapters of every kind loaded into its host memory."""
    forms = Forms()
    made = {kind: KINDS[kind](forms) for kind in kinds}

    def read(path: str, **_: object) -> ReadAdapter:
        kind = Path(path).name.partition("-")[0]
        return ReadAdapter(made[kind], ContentDigest.known(f"digest of {Path(path).name}"), 0.0)

    lora_model.read_adapter = read  # The benchmark measures the forms, so it bypasses reading files.
    count = ADAPTERS * len(kinds)
    engine = build_engine(
        EngineConfig(
            model=str(checkpoint),
            device="cuda",
            load_format="dummy",
            max_num_seqs=BATCH,
            max_num_batched_tokens=1024,
            enable_prefix_caching=False,
            kv_cache_tokens=BATCH * 1024,
            lora=LoRAConfig(
                max_loras=ADAPTERS,
                max_lora_rank=RANK,
                max_cpu_loras=count,
                lora_dtype=lora_dtype,
                extra_memory_gib=EXTRA_GIB,
            ),
        )
    )
    folders = {kind: [checkpoint.parent / f"{kind}-{i}" for i in range(ADAPTERS)] for kind in kinds}
    for path in (path for paths in folders.values() for path in paths):
        path.mkdir()
    return engine, {kind: load(engine, paths) for kind, paths in folders.items()}


def main() -> None:
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("lorafleet.workers.step.decode_graphs").setLevel(logging.INFO)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--kinds", nargs="+", choices=[*BATCHES])
    parser.add_argument("--lora-dtype", choices=["auto", "fp8"], default="auto")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    prompt, generated = (128, 64) if args.short else (512, 128)
    kinds = args.kinds or [name for name in BATCHES if not (args.short and name == "head")]
    batches = {name: BATCHES[name] for name in ("plain", *kinds)}
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder, "model")
        checkpoint.mkdir()
        (checkpoint / "config.json").write_text(json.dumps(CONFIG))
        used = sorted({kind for kinds in batches.values() for kind in kinds})
        engine, loras = start(checkpoint, used, args.lora_dtype)
        steps: dict[str, list[float]] = {name: [] for name in ("base", *batches)}
        for _ in range(ROUNDS):
            for name in steps:
                chosen = [loras[kind][i] for i, kind in enumerate(batches.get(name, ()))]
                steps[name].append(decode_step_ms(engine, BATCH, prompt, generated, chosen))
        engine.close()
    step_ms = {name: statistics.median(times) for name, times in steps.items()}
    base_ms = step_ms.pop("base")
    print(f"{torch.cuda.get_device_name()}, batch {BATCH}, {ADAPTERS} adapters, base {base_ms:.2f} ms a step")
    print("kind             ms a step   excess   ratio to plain")
    for name, ms in step_ms.items():
        print(f"{name:15}  {ms:9.2f}  {ms - base_ms:7.2f}  {(ms - base_ms) / (step_ms['plain'] - base_ms):15.2f}")
    if args.json:
        args.json.write_text(json.dumps({"base_ms": base_ms, "step_ms": step_ms}, indent=1))


if __name__ == "__main__":
    main()
