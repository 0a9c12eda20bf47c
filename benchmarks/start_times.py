"""Prints the phases of an engine's start in seconds, from the start of its process to its first answer.

    python benchmarks/start_times.py [--fresh] [--adapters 64] [--switch-s 0] [--layers 32] [--hidden 4096]

The model is a random Llama in the shape of an 8B. Every start is a process of its own. With --fresh, the caches of
FlashInfer and Triton are empty at the first start, as on a new machine, and the second start uses what the first has
compiled. Without it, there is one start, with the caches of this user. The server's own processes are not included.

After the first answer, 8 streams go on for some seconds, or until the attention has been switched and at most
--switch-s seconds. The script prints the gaps between their tokens: those that are longer than 50 ms are captures of
graphs, the switch, or a compiler.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lorafleet.workers.engine import Engine

STREAMS = 8
PROMPT = 64
LEAST_STREAM_S = 5.0
LONG_GAP_S = 0.05
BEGAN = "LORAFLEET_START_BEGAN"  # Unix time of the start of the process, in its environment.


class Phases(logging.Handler):
    """Records the time of each message, and so the end of each phase."""

    def __init__(self, began_s: float) -> None:
        super().__init__()
        self._began_s = self._last_s = began_s

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.startswith("lorafleet"):
            self.mark(record.getMessage())

    def mark(self, name: str) -> None:
        now_s = time.time()
        print(f"{now_s - self._began_s:7.1f} s  +{now_s - self._last_s:5.1f}  {name[:150]}", flush=True)
        self._last_s = now_s


def start_once(folder: Path, args: argparse.Namespace) -> None:
    """Starts an engine in this process."""
    phases = Phases(float(os.environ[BEGAN]))
    logging.getLogger().addHandler(phases)
    logging.getLogger("lorafleet").setLevel(logging.INFO)
    from lorafleet.protocol.engine_config import EngineConfig
    from lorafleet.protocol.lora_config import LoRAConfig
    from lorafleet.workers.startup import build_engine

    phases.mark("imported torch and the engine")
    lora = LoRAConfig(max_loras=args.adapters, max_lora_rank=16) if args.adapters else None
    engine = build_engine(EngineConfig(str(folder), load_format="dummy", lora=lora, enable_prefix_caching=False))
    phases.mark("built the engine")
    _add_streams(engine, 1, "first")
    while not any(output.token_ids for output in engine.step()):
        pass
    phases.mark("first answer")
    _stream(engine, phases, args.switch_s)
    engine.close()


def _add_streams(engine: Engine, count: int, name: str) -> None:
    from lorafleet.protocol.messages import EngineRequest
    from lorafleet.protocol.sampling_params import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=100_000, ignore_eos=True)
    for i in range(count):
        engine.add(
            EngineRequest(request_id=f"{name} {i}", prompt_token_ids=list(range(10, 10 + PROMPT)), params=params)
        )


def _stream(engine: Engine, phases: Phases, switch_s: float) -> None:
    """Streams until the attention is the last one, within switch_s, and prints the gaps before and after."""
    engine.abort("first 0")
    for after in (False, True):
        _add_streams(engine, STREAMS, f"after {after}")
        gaps: list[float] = []
        began_s = last_s = time.perf_counter()
        while True:
            if engine.step():
                now_s = time.perf_counter()
                gaps.append(now_s - last_s)
                last_s = now_s
            waits = not after and engine.runner.steps.late.awaits_attention
            if last_s - began_s > (max(switch_s, LEAST_STREAM_S) if waits else LEAST_STREAM_S):
                break
        long = ", ".join(f"{1000 * gap:.0f}" for gap in gaps[1:] if gap > LONG_GAP_S)
        late = engine.runner.steps.late
        median_ms, longest_ms = 1000 * statistics.median(gaps), 1000 * max(gaps[1:])
        phases.mark(
            f"{STREAMS} streams, median gap {median_ms:.2f} ms, longest {longest_ms:.0f}, "
            f"{late.num_decode_graphs} graphs, switched: {late.switched_s > 0}"
        )
        print(f"           gaps over {1000 * LONG_GAP_S:.0f} ms: {long or 'none'}", flush=True)
        for i in range(STREAMS):
            engine.abort(f"after {after} {i}")
        if late.awaits_attention:
            break


def _environment(caches: Path | None) -> dict[str, str]:
    own = dict(os.environ)
    if caches is not None:
        own |= {"FLASHINFER_WORKSPACE_BASE": str(caches), "TRITON_CACHE_DIR": str(caches / "triton")}
    return own


def _model(args: argparse.Namespace) -> dict[str, Any]:
    from engine_setup import llama_config

    args.device = "cuda"
    return llama_config(args, 8192)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fresh", action="store_true", help="two starts, the first of them with empty caches")
    parser.add_argument("--adapters", type=int, default=64, help="slots for adapters")
    parser.add_argument("--switch-s", type=float, default=0.0, help="seconds to wait for the switch of the attention")
    for name, default in (("layers", 32), ("hidden", 4096), ("vocabulary", 128256)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.folder is not None:
        start_once(args.folder, args)
        return
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(_model(args)))
        caches = Path(folder) / "caches" if args.fresh else None
        for name in ("fresh", "later") if args.fresh else ("start",):
            print(f"== {name}", flush=True)
            command = [sys.executable, __file__, *sys.argv[1:], "--folder", folder]
            environment = _environment(caches) | {BEGAN: str(time.time())}
            if subprocess.run(command, env=environment, check=False).returncode != 0:
                sys.exit(f"the {name} start failed")


if __name__ == "__main__":
    main()
