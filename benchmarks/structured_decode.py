"""Measures the cost of grammars in a decode step: with a grammar for every row of the batch, and without any.

    python benchmarks/structured_decode.py [--batch 64] [--steps 100] [--layers 2] [--hidden 256] [--device cpu]

The model is a random Llama with realistic_vocabulary.py's 128 256 tokens. Each answer has one of four JSON schemas. All
rows are sampled by temperature in both arms, so that only the masks differ. The wait is the time that a step waits for
its masks after its forward is launched: the part of making masks that the forward does not hide. The figures are
medians over the steps with a full batch. On a GPU use an 8B's --layers 32 --hidden 4096; the goal there is 4 % of the
step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from engine_driver import settle
from lorafleet.api.text.tokenizer import Tokenizer
from lorafleet.api.text.tokenizer_files import TokenizerFiles
from lorafleet.protocol import structured_spec
from lorafleet.protocol.engine_config import EngineConfig
from lorafleet.protocol.messages import EngineRequest
from lorafleet.protocol.sampling_params import SamplingParams
from lorafleet.workers.engine import Engine
from lorafleet.workers.startup import build_engine
from realistic_vocabulary import realistic_tokenizer

TEXT = {"type": "string", "minLength": 400}  # Long texts, so that no answer ends while it is measured.
SCHEMAS = [
    {"type": "object", "properties": {"text": TEXT}, "required": ["text"], "additionalProperties": False},
    {"type": "object", "additionalProperties": {"type": "number"}, "minProperties": 100},
    {"type": "array", "items": {"enum": [f"value number {i}" for i in range(1000)]}, "minItems": 200},
    {
        "type": "array",
        "items": {
            "type": "object",
            "properties": {"id": {"type": "integer", "minimum": 0}, "at": {"type": "string", "format": "date-time"}},
            "required": ["id", "at"],
        },
        "minItems": 50,
    },
]


def write_model(folder: Path, layers: int, hidden: int) -> None:
    PreTrainedTokenizerFast(tokenizer_object=realistic_tokenizer()).save_pretrained(folder)
    vocab_size = realistic_tokenizer().get_vocab_size()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": 7 * hidden // 2,
        "num_hidden_layers": layers,
        "num_attention_heads": max(1, hidden // 128),
        "num_key_value_heads": max(1, hidden // 512),
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "torch_dtype": "bfloat16",
        "eos_token_id": vocab_size - 1,
    }
    (folder / "config.json").write_text(json.dumps(config))


def measure(engine: Engine, tokenizer: Tokenizer, files: TokenizerFiles, args: argparse.Namespace, bound: bool) -> None:
    for i in range(args.batch):
        given = structured_spec.json_schema(SCHEMAS[i % len(SCHEMAS)], "x", any_whitespace=False) if bound else None
        params = SamplingParams(
            seed=i, max_tokens=args.steps + 20, ignore_eos=True, structured_outputs=given, min_p=0.0
        )
        request = EngineRequest(
            request_id=f"{bound}-{i}",
            prompt_token_ids=tokenizer.encode(f"{i}: some prompt"),
            params=params,
            tokenizer=files.of(tokenizer) if bound else None,
        )
        engine.add(request)
    finish = engine._structured.finish
    waits: list[float] = []

    def timed() -> object:
        started = time.perf_counter()
        found = finish()
        waits.append(time.perf_counter() - started)
        return found

    engine._structured.finish = timed  # type: ignore[method-assign, assignment]  # This times it.
    taken = []
    running = set(engine._sequences)
    while running:
        started, first = time.perf_counter(), len(waits)
        outputs = engine.step()
        for output in outputs:
            if output.error is not None:
                raise RuntimeError(output.error)
        if sum(bool(output.token_ids) for output in outputs) == args.batch:
            taken.append((time.perf_counter() - started, sum(waits[first:])))
        running -= {output.request_id for output in outputs if output.finish_reason is not None}
    engine._structured.finish = finish  # type: ignore[method-assign]  # This restores it.
    steps_ms = sorted(1e3 * step for step, _ in taken)
    wait_ms = 1e3 * statistics.median(wait for _, wait in taken)
    name = "grammars" if bound else "none"
    print(
        f"{name:10} {len(taken)} steps, median {statistics.median(steps_ms):.2f} ms, waits {wait_ms:.2f} ms", flush=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), args.layers, args.hidden)
        config = EngineConfig(
            model=folder,
            device=args.device,
            load_format="dummy",
            max_num_seqs=args.batch,
            kv_cache_tokens=args.batch * (args.steps + 64),
            max_model_len=args.steps + 64,
            async_scheduling=True,
        )
        engine, files, tokenizer = build_engine(config), TokenizerFiles(), Tokenizer.from_folder(folder)
        settle(engine)
        for bound in (False, True, False, True):
            measure(engine, tokenizer, files, args, bound)
        engine.close()
        files.close()


if __name__ == "__main__":
    main()
